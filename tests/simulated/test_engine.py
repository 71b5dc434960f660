"""The simulated engine: time, arrivals, rejections, SLO flags, digests, modes."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from evaluation.inprocess import DecisionRefused, InProcessSource
from slidingserve.contract.values import BatchAllocation, EngineLimits, Mode, OpenSession, Snapshot, Step
from tests.strategies import Feed, LinearTimer, batch, feed, feeds, random_feed, run_to_end, tight_limits

LIMITS = EngineLimits(max_tokens_per_iteration=64, max_sequences=8, kv_blocks=40, kv_block_tokens=4)
TIGHT = EngineLimits(max_tokens_per_iteration=32, max_sequences=6, kv_blocks=24, kv_block_tokens=4)


def source(limits: EngineLimits = LIMITS) -> InProcessSource:
    made = InProcessSource()
    made.open(OpenSession(limits, policy="vllm"))
    return made


class Listening(InProcessSource):
    """Keeps steps and answers."""

    def __init__(self, limits: EngineLimits = LIMITS, mode: Mode = Mode.ACTIVE) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.answers: list[BatchAllocation] = []
        self.open(OpenSession(limits, policy="vllm", mode=mode))

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        self.steps.append(step)
        self.answers.append(super().decide(step, snapshot))
        return self.answers[-1]


def listed(outcome: Outcome) -> dict[str, object]:
    """Everything, comparable (NaN as text)."""
    fields = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return {name: str(value.tolist()) if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def test_same_run_twice_is_the_same() -> None:
    runs = [
        SimulatedEngine(random_feed(seed, 60, 40, 12, 0.02), TIGHT, LinearTimer(), source(TIGHT)).run()
        for seed in (1, 1, 2)
    ]
    assert listed(runs[0]) == listed(runs[1])
    assert runs[0].preemptions > 0
    assert runs[0].allocation_digest != runs[2].allocation_digest


def test_arrival_during_an_iteration_waits_for_the_next() -> None:
    timer = LinearTimer(keep=True)
    first = 0.01 + 0.010
    engine = SimulatedEngine(feed([(0.0, 10, 2), (0.001, 5, 1), (first, 3, 1)]), LIMITS, timer)
    outcome = engine.run()
    assert timer.batches == [[(10, 0)], [(1, 10), (5, 0), (3, 0)]]
    assert outcome.first_token_seconds[0] == pytest.approx(first)
    assert outcome.first_token_seconds[1] == outcome.first_token_seconds[2] == outcome.last_token_seconds[0]


def test_idle_engine_jumps_to_the_next_arrival() -> None:
    outcome = SimulatedEngine(feed([(3.0, 10, 1), (50.0, 10, 1)]), LIMITS, LinearTimer(), source()).run()
    assert outcome.first_token_seconds.tolist() == pytest.approx([3.02, 50.02])
    assert outcome.makespan_seconds == pytest.approx(50.02)
    assert outcome.iterations == 2


def test_cpu_time_is_added_to_every_iteration() -> None:
    requests = feed([(0.0, 10, 7)])
    plain = SimulatedEngine(requests, LIMITS, LinearTimer()).run()
    slow = SimulatedEngine(requests, LIMITS, LinearTimer(), cpu_seconds_per_iteration=0.5).run()
    assert slow.makespan_seconds == pytest.approx(plain.makespan_seconds + 0.5 * plain.iterations)


def test_requests_that_never_fit_are_rejected_and_counted() -> None:
    limits = EngineLimits(64, 8, kv_blocks=8, kv_block_tokens=4)
    requests = feed([(0.0, 30, 3), (0.0, 30, 2), (0.0, 1, 32), (0.0, 2, 2), (1.0, 1, 31)])
    for made in (None, source(limits)):
        outcome = SimulatedEngine(requests, limits, LinearTimer(), made).run()
        assert outcome.rejected == 2
        assert outcome.finished.tolist() == [False, True, False, True, True]
        assert outcome.output_tokens.tolist() == [0, 2, 0, 2, 31]
        assert np.isnan(outcome.first_token_seconds[[0, 2]]).all()


def test_model_length_rejects_too() -> None:
    limits = EngineLimits(64, 8, kv_blocks=40, kv_block_tokens=4, max_model_tokens=20)
    outcome = SimulatedEngine(feed([(0.0, 18, 2), (0.0, 18, 3)]), limits, LinearTimer(), source(limits)).run()
    assert outcome.finished.tolist() == [True, False]
    assert outcome.rejected == 1


def test_first_request_rejected_still_brings_the_names() -> None:
    listener = Listening()
    SimulatedEngine(feed([(0.0, 500, 1), (1.0, 5, 1), (2.0, 5, 1)]), LIMITS, LinearTimer(), listener).run()
    arrived = [step.arrived for step in listener.steps if step.arrived is not None]
    assert [columns.handles.tolist() for columns in arrived] == [[1], [2]]
    assert listener.session.mirror.class_names == ["", "chat", "code"]


def test_rejected_request_does_not_prolong_the_run() -> None:
    outcome = SimulatedEngine(feed([(0.0, 5, 1), (100.0, 500, 1)]), LIMITS, LinearTimer()).run()
    assert outcome.makespan_seconds == pytest.approx(0.015), "it is when the last iteration ended"


def test_no_requests_no_run() -> None:
    outcome = SimulatedEngine(feed([]), LIMITS, LinearTimer(), source()).run()
    assert (outcome.iterations, outcome.makespan_seconds, len(outcome.finished)) == (0, 0.0, 0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(feeds(), tight_limits(), st.sampled_from([0.02, 0.1, 1.0]), st.sampled_from([0.012, 0.03, 0.2]))
def test_flags_follow_from_token_times(requests: Feed, limits: EngineLimits, ttft: float, tbt: float) -> None:
    count = len(requests.prompt_tokens)
    requests = feed(
        list(
            zip(
                requests.arrival_seconds.tolist(),
                requests.prompt_tokens.tolist(),
                requests.output_tokens.tolist(),
                strict=True,
            )
        ),
        ttft=ttft,
        tbt=tbt,
    )
    engine = SimulatedEngine(requests, limits, LinearTimer(), source(limits))
    times: list[list[float]] = [[] for _ in range(count)]
    before = np.zeros(count, np.int64)
    while engine.step():
        after = engine.outcome().output_tokens
        assert ((after - before) <= 1).all(), "an iteration brings a request one token at most"
        for row in np.flatnonzero(after > before).tolist():
            times[row].append(engine.now_seconds)
        before = after
    outcome = engine.outcome()
    gaps = 0
    for row in range(count):
        tokens, arrival = times[row], float(requests.arrival_seconds[row])
        late = any(time > arrival + ttft + k * tbt for k, time in enumerate(tokens))
        between = [later - earlier for earlier, later in pairwise(tokens)]
        gaps += len(between)
        assert bool(outcome.deadline_missed[row]) == late
        assert bool(outcome.gap_missed[row]) == any(gap > tbt for gap in between)
        assert len(tokens) == outcome.output_tokens[row]
        assert math.isnan(outcome.first_token_seconds[row]) == (not tokens)
        if tokens:
            assert (outcome.first_token_seconds[row], outcome.last_token_seconds[row]) == (tokens[0], tokens[-1])
    assert len(outcome.token_gaps) == gaps
    assert (outcome.token_gaps > 0).all()


def test_digest_is_over_step_count_handles_and_tokens() -> None:
    listener = Listening(TIGHT)
    outcome = SimulatedEngine(random_feed(4, 40, 30, 8, 0.02), TIGHT, LinearTimer(), listener).run()
    digest = hashlib.sha256()
    for answer in listener.answers:
        digest.update(struct.pack("<II", answer.step, len(answer.handles)))
        for handle, tokens in batch(answer):
            digest.update(struct.pack("<II", handle, tokens))
    assert outcome.allocation_digest == digest.hexdigest()
    alone = SimulatedEngine(random_feed(4, 40, 30, 8, 0.02), TIGHT, LinearTimer()).run()
    assert alone.allocation_digest == hashlib.sha256().hexdigest()


def test_steps_tell_only_what_changed() -> None:
    listener = Listening(TIGHT)
    engine = SimulatedEngine(random_feed(4, 40, 30, 8, 0.02), TIGHT, LinearTimer(), listener)
    outcome = engine.run()
    assert [step.iteration.step for step in listener.steps] == list(range(outcome.iterations))
    assert all(step.applied_exactly and step.applied is None and step.progress is None for step in listener.steps)
    arrived = [step.arrived.handles.tolist() for step in listener.steps if step.arrived is not None]
    assert [handle for handles in arrived for handle in handles] == list(range(40))
    finished = np.concatenate([step.finished_handles for step in listener.steps])
    assert len(set(finished.tolist())) == len(finished) >= 40 - TIGHT.max_sequences
    clock = [step.iteration.now_seconds for step in listener.steps]
    assert clock == sorted(clock)
    assert listener.steps[0].iteration.last_iteration_seconds == 0.0
    assert all(step.iteration.last_iteration_seconds > 0.0 for step in listener.steps[1:])
    assert len(listener.answers) == outcome.iterations


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SHADOW])
def test_modes_that_are_not_obeyed(mode: Mode) -> None:
    requests = random_feed(4, 40, 30, 8, 0.02)
    listener = Listening(TIGHT, mode)
    led = SimulatedEngine(requests, TIGHT, LinearTimer(), listener).run()
    alone = SimulatedEngine(requests, TIGHT, LinearTimer()).run()
    assert led.last_token_seconds.tolist() == alone.last_token_seconds.tolist()
    assert led.fallbacks == led.iterations == alone.iterations
    active = Listening(TIGHT)
    SimulatedEngine(requests, TIGHT, LinearTimer(), active).run()
    expected = [[] for _ in active.answers] if mode is Mode.OFF else [batch(answer) for answer in active.answers]
    assert [batch(answer) for answer in listener.answers] == expected
    assert not any(step.applied_exactly for step in listener.steps[1:])


def test_source_without_answers_is_the_engines_own_policy() -> None:
    class Silent(InProcessSource):
        def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> None:  # type: ignore[override]
            return None

    requests = random_feed(4, 40, 30, 8, 0.02)
    led = SimulatedEngine(requests, TIGHT, LinearTimer(), Silent()).run()
    alone = SimulatedEngine(requests, TIGHT, LinearTimer()).run()
    assert listed(led) == listed(alone)


def test_snapshot_holds_what_the_step_brought() -> None:
    engine = SimulatedEngine(feed([(0.0, 10, 3), (0.0, 6, 3), (0.001, 9, 2)]), LIMITS, LinearTimer())
    engine.step()
    full = engine.snapshot()
    assert full.requests.handles.tolist() == [0, 1]
    assert full.progress.computed_tokens.tolist() == [10, 6]
    assert full.progress.output_tokens.tolist() == [1, 1]
    assert (full.running_count, full.iteration.step, full.iteration.free_kv_blocks) == (2, 1, 40 - 3 - 2)
    assert full.requests.class_names == ("chat", "code")


def test_aborts_free_blocks_and_leave_the_others_alone() -> None:
    engine = SimulatedEngine(
        feed([(0.0, 10, 4), (0.0, 6, 4), (0.0, 200, 1), (0.0, 9, 2)]), LIMITS, LinearTimer(), source()
    )
    engine.step()
    assert engine.live == 3
    engine.abort(0)
    engine.abort(2)
    assert (engine.live, engine.finished) == (2, 2)
    assert engine.snapshot().iteration.free_kv_blocks == 40 - 2 - 3
    run_to_end(engine)
    outcome = engine.outcome()
    assert outcome.output_tokens.tolist() == [1, 4, 0, 2]
    assert outcome.finished.tolist() == [False, True, False, True]
    assert engine.snapshot().iteration.free_kv_blocks == 40


def test_refused_opening_is_loud() -> None:
    with pytest.raises(DecisionRefused, match="nope"):
        InProcessSource().open(OpenSession(LIMITS, policy="nope"))
