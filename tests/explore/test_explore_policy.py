"""Policy `explore`: within the limits, nobody starves, and every kind of batch comes up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import InProcessSource
from predictor.features import DECODE_CONTEXT, DECODES, PREFILL_TOKENS, ROW, TOKENS, batch_features
from sidecar.policies.explore import STEPS, Targets
from sidecar.session.machine import SessionDefaults
from slidingserve.contract.values import (
    BatchAllocation,
    EngineLimits,
    Floats,
    OpenSession,
    SessionOpened,
    Snapshot,
    Step,
)
from tests.core.test_policies import random_state
from tests.strategies import (
    Feed,
    LinearTimer,
    assert_within_limits,
    decide,
    feed,
    feeds,
    ints,
    opened,
    random_feed,
    run_to_end,
    tight_limits,
)

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ROOMY = EngineLimits(max_tokens_per_iteration=512, max_sequences=64, kv_blocks=8192, kv_block_tokens=16)
PARAMETERS = {"patience": "8"}


class WatchedSource:
    """Asks the policy; holds each answer against the engine's state, and counts how long requests go without.

    Attributes:
        longest: most iterations that a running request went without tokens.
    """

    def __init__(self, limits: EngineLimits, parameters: dict[str, str]) -> None:
        self._inner = InProcessSource(SessionDefaults("explore", parameters))
        self.open(OpenSession(limits))
        self._limits = limits
        self._unserved: dict[int, int] = {}
        self.longest = 0

    def open(self, message: OpenSession) -> SessionOpened:
        return self._inner.open(message)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        full = snapshot()
        allocation = self._inner.decide(step, snapshot)
        assert_within_limits(allocation, full, self._limits)
        assert not self._inner.session.guarded, "the policy asked for what there is not"
        if not len(full.requests.handles):
            return allocation
        served = set(allocation.handles.tolist())
        assert served, "somebody can always be served"
        running = full.requests.handles[: full.running_count].tolist()
        victims = set(allocation.preempted_handles.tolist())
        self._unserved = {h: 0 if h in served | victims else self._unserved.get(h, 0) + 1 for h in running}
        self.longest = max([self.longest, *self._unserved.values()])
        return allocation

    def close(self) -> None:
        self._inner.close()


def run(requests: Feed, limits: EngineLimits, seed: int = 0) -> tuple[WatchedSource, list[list[tuple[int, int]]]]:
    """Serves all requests; returns the source and the batches."""
    source, timer = WatchedSource(limits, {**PARAMETERS, "seed": str(seed)}), LinearTimer(keep=True)
    engine = SimulatedEngine(requests, limits, timer, source)
    run_to_end(engine)
    assert engine.finished == len(requests.arrival_seconds)
    return source, timer.batches


def rows_of(batches: list[list[tuple[int, int]]]) -> Floats:
    rows = np.zeros((len(batches), ROW))
    for row, one in zip(rows, batches, strict=True):
        chunk, context = (ints(*column) for column in zip(*one, strict=True))
        batch_features(chunk, context, len(chunk), row)
    return rows


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_from_any_state_a_decision_keeps_the_limits(seed: int) -> None:
    limits, full = random_state(np.random.default_rng(seed))
    session = opened(limits, SessionDefaults("explore", {"seed": str(seed)}))
    for epoch in range(1, 6):
        now = full._replace(iteration=full.iteration._replace(epoch=epoch))
        assert_within_limits(decide(session, now), now, limits)
    assert not session.guarded


@SETTINGS
@given(feeds(), tight_limits(), st.integers(0, 2**32 - 1))
def test_everybody_is_served_to_the_end_however_little_there_is(
    requests: Feed, limits: EngineLimits, seed: int
) -> None:
    run(requests, limits, seed)


@pytest.mark.parametrize("seed", range(4))
def test_no_running_request_waits_long(seed: int) -> None:
    limits = EngineLimits(max_tokens_per_iteration=64, max_sequences=24, kv_blocks=2000, kv_block_tokens=4)
    source, _ = run(random_feed(seed, 40, 200, 30, 0.01), limits, seed)
    # `patience` iterations pass; then the late ones go before all others, prompts in progress one after the other.
    assert source.longest <= 8 + 1 + 8


def test_the_same_states_give_the_same_decisions() -> None:
    requests = random_feed(3, 60, 300, 20, 0.05)
    assert run(requests, ROOMY, 7)[1] == run(requests, ROOMY, 7)[1]
    assert run(requests, ROOMY, 7)[1] != run(requests, ROOMY, 8)[1]


def closed_feed(count: int, seed: int) -> Feed:
    """All there at once, prompts and outputs log-uniform, so that queues hold everything for most of the run."""
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.uniform(np.log(2), np.log(3000), count)).astype(int)
    outputs = np.exp(rng.uniform(np.log(4), np.log(300), count)).astype(int)
    return feed([(0.0, int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)])


def test_batches_of_every_size_and_kind_come_up() -> None:
    _, batches = run(closed_feed(110, 5), ROOMY)
    rows = rows_of(batches)[: len(batches) * 3 // 4]  # at the end nothing is left to choose from
    prompt, decodes = rows[:, PREFILL_TOKENS], rows[:, DECODES]
    edges_p, edges_d = (0, 1, 17, 65, 257, 513), (0, 1, 3, 9, 33)
    for (low_p, high_p), (low_d, high_d) in itertools.product(itertools.pairwise(edges_p), itertools.pairwise(edges_d)):
        if high_p == 1 and high_d == 1:
            continue
        cell = (prompt >= low_p) & (prompt < high_p) & (decodes >= low_d) & (decodes < high_d)
        assert cell.sum() >= 5, (low_p, low_d)
    for kind, least in (((prompt == 0), 0.1), ((decodes == 0), 0.05), ((prompt > 0) & (decodes > 0), 0.4)):
        assert kind.mean() >= least
    shared = [sum(tokens > 1 for tokens, _ in one) for one in batches]
    assert max(shared) >= 6
    some = decodes >= 4
    context = rows[some, DECODE_CONTEXT] / decodes[some]
    assert np.quantile(context, 0.9) > 5 * np.quantile(context, 0.1), "short and long decodes apart"


def test_totals_lie_on_and_beside_steps() -> None:
    _, batches = run(closed_feed(80, 6), ROOMY)
    rows = rows_of(batches)
    totals = rows[(rows[:, PREFILL_TOKENS] > 0) & (rows[:, TOKENS] > 17), TOKENS].astype(int)
    for offset in (-1, 0, 1):
        share = np.mean([(total - offset) % 16 == 0 for total in totals])
        assert share > 0.12, offset  # 1/16 by chance


def test_targets_fill_their_space() -> None:
    budget = 512
    targets = [Targets(3, budget)[number] for number in range(2000)]
    without = np.mean([target.tokens == 0 for target in targets])
    assert without == pytest.approx(0.2, abs=0.01)
    logs = np.array([math.log(target.tokens, budget) for target in targets if target.tokens])
    counts, _ = np.histogram(logs, bins=10, range=(0.0, 1.0))
    assert counts[3:].min() > 0.9 * len(logs) / 10  # below, few whole numbers share the logarithms
    for target in targets:
        for decodes in (0, 5, 64):
            tokens = target.prompt_tokens(decodes, budget)
            assert (tokens == 0) == (target.tokens == 0)
            assert tokens + decodes <= budget
            if target.step and target.tokens + decodes > target.grain and tokens > 1:
                assert (tokens + decodes - target.step + 2) % target.grain == 0 or tokens + decodes == budget
        assert target.grain in STEPS


def test_a_request_that_comes_back_under_an_old_row_is_new() -> None:
    """Rows are used again; how long the one before had waited says nothing about the next."""
    limits = EngineLimits(max_tokens_per_iteration=32, max_sequences=2, kv_blocks=400, kv_block_tokens=4)
    rows = [(0.5 * place, 40, 3) for place in range(30)]
    source, _ = run(feed(rows), limits)
    assert source.longest <= 10
