"""What the client makes of answers, against a small real gRPC server over a Unix socket."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from engine_adapter.client import BreakerState, ClientSettings, FallbackReason, RoundTrips, SchedulerClient
from slidingserve.contract.values import NO_INTS, IterationState, Snapshot, Step
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.adapter.engine import LONG, OPEN, SHORT, Clock, Engine, breaker, error, fallbacks, kinds, resync
from tests.adapter.scripted_sidecar import OPENED, ScriptedSidecar, allocation


def test_right_answers_are_returned_and_steps_are_enough(engine: Engine, sidecar: ScriptedSidecar) -> None:
    for step in range(50):
        answer = engine.decide()
        assert answer is not None
        assert (answer.epoch, answer.step) == (0, step)
        np.testing.assert_array_equal(answer.tokens, [16, 1])
    assert kinds(sidecar) == ["OpenSession"] + ["Step"] * 50
    counters = engine.client.counters
    assert (counters.decisions, counters.total_fallbacks, counters.resyncs, counters.late_answers) == (50, 0, 0, 0)
    assert (engine.snapshots, len(counters.round_trips)) == (0, 50)
    assert (counters.round_trips.seconds() > 0).all()


def test_without_deadline_no_limit_is_sent(sidecar: ScriptedSidecar) -> None:
    client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None))
    client.open(OPEN)
    assert Engine(client).decide(within=0.0) is not None
    client.close()
    step = sidecar.received[-1]
    assert isinstance(step, Step)
    assert step.iteration.answer_within_seconds == 0.0


def test_the_settings_deadline_is_sent_and_kept(sidecar: ScriptedSidecar) -> None:
    client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=SHORT))
    client.open(OPEN)
    sidecar.will(sidecar.held)
    assert Engine(client).decide(within=0.0) is None
    assert fallbacks(client) == {"deadline": 1}
    sidecar.gate.set()
    client.close()
    step = sidecar.received[-1]
    assert isinstance(step, Step)
    assert step.iteration.answer_within_seconds == SHORT


def test_a_late_answer_is_dropped_and_a_snapshot_follows(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(sidecar.held)
    assert engine.decide(SHORT) is None
    sidecar.gate.set()
    answer = engine.decide()
    assert answer is not None
    assert (answer.epoch, answer.step) == (1, 1)
    assert kinds(sidecar) == ["OpenSession", "Step", "Snapshot"]
    counters = engine.client.counters
    assert (counters.late_answers, counters.resyncs, fallbacks(engine.client)) == (1, 1, {"deadline": 1})
    after = engine.decide()
    assert after is not None
    assert (after.epoch, kinds(sidecar)[-1]) == (1, "Step")


def test_a_missed_step_that_is_asked_again_needs_a_snapshot_too(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(sidecar.held)
    assert engine.decide(SHORT) is None
    sidecar.gate.set()
    engine.step -= 1
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "Snapshot"]


def test_three_misses_open_the_breaker_and_a_stalled_sidecar_costs_no_further_wait(
    engine: Engine, sidecar: ScriptedSidecar, clock: Clock
) -> None:
    sidecar.will(sidecar.held)
    for _ in range(3):
        assert engine.decide(SHORT) is None
    assert breaker(engine.client) is BreakerState.OPEN
    assert engine.decide() is None
    clock.seconds = 1.0
    # Half-open, but the sidecar still owes three answers: with LONG as deadline this would hang.
    assert engine.decide() is None
    assert engine.snapshots == 2
    assert fallbacks(engine.client) == {"deadline": 3, "breaker_open": 2}
    sidecar.gate.set()
    assert engine.decide_until(lambda answer: answer is not None) is not None
    assert breaker(engine.client) is BreakerState.CLOSED
    assert engine.client.counters.late_answers == 3
    assert engine.client.counters.reconnects == 0


def test_resync_is_answered_with_a_snapshot_within_the_same_call(engine: Engine, sidecar: ScriptedSidecar) -> None:
    assert engine.decide() is not None
    sidecar.will(resync)
    answer = engine.decide()
    assert answer is not None
    assert (answer.epoch, answer.step) == (1, 1)
    assert kinds(sidecar) == ["OpenSession", "Step", "Step", "Snapshot"]
    assert (engine.client.counters.resyncs, fallbacks(engine.client)) == (1, {})
    snapshot = sidecar.received[-1]
    assert isinstance(snapshot, Snapshot)
    assert 0 < snapshot.iteration.answer_within_seconds < LONG


def test_epochs_grow_with_every_snapshot(engine: Engine, sidecar: ScriptedSidecar) -> None:
    for epoch in range(1, 4):
        sidecar.will(resync)
        answer = engine.decide()
        assert answer is not None
        assert answer.epoch == epoch


def test_a_refused_step_is_a_fallback_and_a_snapshot_follows(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(error)
    assert engine.decide() is None
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "Snapshot"]
    assert fallbacks(engine.client) == {"session_error": 1}


def test_an_error_without_numbers_is_the_answer(engine: Engine, sidecar: ScriptedSidecar) -> None:
    assert engine.decide() is not None
    sidecar.will(lambda iteration: error(iteration)._replace(epoch=0, step=0))
    assert engine.decide() is None
    assert fallbacks(engine.client) == {"session_error": 1}
    assert engine.client.counters.reconnects == 0


@pytest.mark.parametrize(
    "script",
    [
        lambda iteration: allocation(iteration, tokens=np.array([16], np.int64)),
        lambda iteration: allocation(iteration, tokens=np.array([16, 0], np.int64)),
        lambda iteration: allocation(iteration, predicted_seconds=float("nan")),
        lambda iteration: allocation(iteration, predicted_seconds=float("inf")),
        lambda iteration: allocation(iteration, predicted_seconds=-1.0),
    ],
)
def test_useless_allocations_are_not_returned(engine: Engine, sidecar: ScriptedSidecar, script: Any) -> None:
    sidecar.will(script)
    assert engine.decide() is None
    assert fallbacks(engine.client) == {"invalid_answer": 1}
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "Snapshot"]


@pytest.mark.parametrize(
    "script",
    [
        lambda iteration: allocation(iteration, step=iteration.step + 1),
        lambda iteration: allocation(iteration, epoch=iteration.epoch + 1),
        lambda iteration: OPENED,
        lambda iteration: pb.ScheduleResponse(),
    ],
)
def test_an_answer_to_something_else_starts_a_new_stream(engine: Engine, sidecar: ScriptedSidecar, script: Any) -> None:
    sidecar.will(script)
    assert engine.decide() is None
    assert fallbacks(engine.client) == {"invalid_answer": 1}
    assert engine.client.wait_connected(LONG)
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "OpenSession", "Snapshot"]


def test_answers_that_nobody_asked_for_do_not_pile_up(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(lambda iteration: [allocation(iteration)] * 200)
    assert engine.decide() is not None
    end = time.monotonic() + 10
    while engine.client.counters.reconnects == 0 and time.monotonic() < end:
        time.sleep(0.001)
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "OpenSession", "Snapshot"]


def test_a_second_resync_in_one_call_is_not_answered(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(resync, resync)
    assert engine.decide() is None
    assert fallbacks(engine.client) == {"invalid_answer": 1}
    assert engine.decide() is not None


def test_an_empty_allocation_is_an_allocation(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(lambda iteration: allocation(iteration, handles=NO_INTS, tokens=NO_INTS))
    answer = engine.decide()
    assert answer is not None
    assert len(answer.handles) == 0


def test_the_engines_mistakes_are_counted_and_never_raised(engine: Engine, sidecar: ScriptedSidecar) -> None:
    assert engine.decide(free_kv_blocks=-1) is None

    def broken() -> Snapshot:
        raise ZeroDivisionError

    assert engine.client.decide(Step(IterationState(0, 9, 0.0, 0)), broken) is None
    assert fallbacks(engine.client) == {FallbackReason.CLIENT_ERROR: 2}
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Snapshot"]


def test_a_callback_that_raises_does_not_reach_the_engine(sidecar: ScriptedSidecar) -> None:
    def fails(seconds: float) -> None:
        raise ZeroDivisionError

    client = SchedulerClient(ClientSettings(sidecar.address), on_round_trip=fails)
    client.open(OPEN)
    assert Engine(client).decide() is None
    assert fallbacks(client) == {FallbackReason.CLIENT_ERROR: 1}
    assert client.counters.decisions == 0
    client.close()


def test_round_trips_are_a_fair_sample_in_bounded_memory() -> None:
    trips = RoundTrips(size=1000)
    for number in range(50_000):
        trips.add(float(number))
    assert len(trips) == 50_000
    assert trips.seconds().shape == (1000,)
    assert abs(np.median(trips.seconds()) - 25_000) < 2500
