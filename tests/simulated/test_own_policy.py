"""The sidecar's `vllm` policy decides what the engine's own policy would, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.own_policy import schedule_own
from engine_adapter.simulated.state import (
    COUNTS,
    FREE_BLOCKS,
    REQUEST,
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    WAITING_START,
    WAITING_STOP,
)
from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import BatchAllocation, EngineLimits, OpenSession, SessionOpened, Snapshot, Step
from tests.strategies import (
    Feed,
    LinearTimer,
    batch,
    engine_rows,
    feed,
    feeds,
    ints,
    random_feed,
    run_to_end,
    tight_limits,
)

Plan = tuple[list[tuple[int, int]], list[int]]


def own_plan(full: Snapshot, limits: EngineLimits, budget: int, seats: int, reserve: bool) -> Plan:
    """What the engine's own policy says about a state."""
    rows = engine_rows(full, limits)
    requests = np.zeros(1 + max((row.handle for row in rows), default=0), REQUEST)
    for row in rows:
        record = requests[row.handle]
        record["state"] = RUNNING if row.running else WAITING
        record["prompt"], record["generated"], record["computed"] = row.prompt, row.output, row.computed
        record["blocks"] = row.blocks
    running = ints(*(row.handle for row in rows if row.running))
    waiting = ints(*(row.handle for row in rows if not row.running))
    counts = np.zeros(COUNTS, np.int64)
    counts[RUNNING_COUNT], counts[WAITING_START], counts[WAITING_STOP] = len(running), 0, len(waiting)
    counts[FREE_BLOCKS] = full.iteration.free_kv_blocks
    return schedule_own(
        requests, running, waiting, counts, budget, seats, limits.kv_block_tokens, reserve_full_prompt=reserve
    )


class ComparingSource:
    """An in-process source that asks the engine's own policy, too, and holds the answers together."""

    def __init__(self, limits: EngineLimits, parameters: Mapping[str, str]) -> None:
        self._inner = InProcessSource()
        self._limits = limits
        self._budget = min(int(parameters.get("max_tokens", 0)) or 10**9, limits.max_tokens_per_iteration)
        self._seats = min(int(parameters.get("max_sequences", 0)) or 10**9, limits.max_sequences)
        self._reserve = parameters.get("reserve_full_prompt", "true") == "true"
        self._inner.open(OpenSession(limits, policy="vllm", policy_parameters=parameters))
        self.preempted = 0

    def open(self, message: OpenSession) -> SessionOpened:
        raise NotImplementedError

    def close(self) -> None:
        self._inner.close()

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        allocation = self._inner.decide(step, snapshot)
        own_batch, own_victims = own_plan(snapshot(), self._limits, self._budget, self._seats, self._reserve)
        assert (batch(allocation), allocation.preempted_handles.tolist()) == (own_batch, own_victims)
        assert self._inner.session.guarded == 0, "the guard has nothing to cut"
        self.preempted += len(own_victims)
        return allocation


parameters = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 40).map(str),
        "max_sequences": st.integers(1, 6).map(str),
        "reserve_full_prompt": st.sampled_from(["true", "false"]),
    },
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(feeds(), tight_limits(), parameters)
def test_policy_equals_the_engines_own(requests: Feed, limits: EngineLimits, parameters: dict[str, str]) -> None:
    engine = SimulatedEngine(requests, limits, LinearTimer(), ComparingSource(limits, parameters))
    run_to_end(engine)
    assert engine.live == 0


LOADS = [
    (EngineLimits(32, 10, 24, 4), {}),
    (EngineLimits(5, 16, 27, 2), {}),
    (EngineLimits(512, 2, 14, 4), {}),
    (EngineLimits(64, 64, 60, 1), {"reserve_full_prompt": "false"}),
    (EngineLimits(64, 64, 60, 1), {"max_tokens": "7", "max_sequences": "3"}),
]


@pytest.mark.parametrize(("limits", "parameters"), LOADS)
def test_policy_equals_the_engines_own_under_load(limits: EngineLimits, parameters: dict[str, str]) -> None:
    source = ComparingSource(limits, parameters)
    engine = SimulatedEngine(random_feed(3, 60, 36, 16, 0.01), limits, LinearTimer(), source)
    run_to_end(engine)
    assert engine.outcome().preemptions == source.preempted > 0


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("limits", [load[0] for load in LOADS])
def test_run_with_the_policy_equals_run_without_a_source(limits: EngineLimits, reserve: bool) -> None:
    requests = random_feed(11, 80, 36, 16, 0.01)
    source = InProcessSource()
    parameters = {"reserve_full_prompt": str(reserve).lower()}
    source.open(OpenSession(limits, policy="vllm", policy_parameters=parameters))
    timers = LinearTimer(keep=True), LinearTimer(keep=True)
    led = SimulatedEngine(requests, limits, timers[0], source, reserve_full_prompt=reserve).run()
    alone = SimulatedEngine(requests, limits, timers[1], reserve_full_prompt=reserve).run()
    assert timers[0].batches == timers[1].batches
    for name in ("first_token_seconds", "last_token_seconds", "output_tokens", "token_gaps", "finished"):
        assert getattr(led, name).tolist() == getattr(alone, name).tolist(), name
    assert (led.makespan_seconds, led.preemptions, led.iterations) == (
        alone.makespan_seconds,
        alone.preemptions,
        alone.iterations,
    )
    assert (led.fallbacks, alone.fallbacks) == (0, alone.iterations)


EXAMPLE = EngineLimits(max_tokens_per_iteration=32, max_sequences=4, kv_blocks=6, kv_block_tokens=4)


def test_worked_example_of_a_preemption() -> None:
    """Three prompts of two blocks fill six blocks; their decodes need more, so the last ones give way."""
    timer = LinearTimer(keep=True)
    engine = SimulatedEngine(feed([(0.0, 8, 5), (0.0, 8, 3), (0.0, 7, 3), (0.0, 1, 1)]), EXAMPLE, timer)
    run_to_end(engine)
    assert timer.batches == [
        [(8, 0), (8, 0), (7, 0)],  # all blocks are taken, the fourth waits
        [(1, 8), (1, 8)],  # a third block each: request 2 is preempted and frees two; nobody is admitted
        [(1, 9), (1, 9)],  # no block is free; request 1 ends with its third token
        [(1, 10), (8, 0), (1, 0)],  # request 2 computes its prompt and its first token anew, request 3 takes the last
        [(1, 11), (1, 8)],  # request 3 has ended; request 2 takes its third block; request 0 ends
    ]
    outcome = engine.outcome()
    assert outcome.preemptions == 1
    assert outcome.output_tokens.tolist() == [5, 3, 3, 1]
