"""The client against a small real gRPC server over a Unix socket."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engine_adapter.client import (
    BreakerState,
    ClientSettings,
    FallbackReason,
    RoundTrips,
    SchedulerClient,
    SessionRefused,
    SidecarUnavailable,
)
from engine_adapter.source import DecisionSource
from slidingserve.contract.codec import ContractError
from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    BatchAllocation,
    EngineLimits,
    ErrorReason,
    IterationState,
    OpenSession,
    ProgressColumns,
    RequestColumns,
    ResyncReason,
    ResyncRequired,
    SessionError,
    Snapshot,
    Step,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.adapter.scripted_sidecar import LIMITS, OPENED, HangUp, ScriptedSidecar, allocation

OPEN = OpenSession(LIMITS)
SHORT = 0.02
"""A deadline that is meant to be missed."""
LONG = 10.0
"""A deadline that is not."""


class Clock:
    """The breaker's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Engine:
    """Counts steps and asks, as an engine's loop does."""

    def __init__(self, client: SchedulerClient) -> None:
        self.client = client
        self.step = -1
        self.snapshots = 0

    def decide(self, within: float = LONG, **changes: Any) -> BatchAllocation | None:
        self.step += 1
        state = IterationState(0, self.step, float(self.step), 100, answer_within_seconds=within)._replace(**changes)

        def snapshot() -> Snapshot:
            self.snapshots += 1
            return Snapshot(
                state, RequestColumns(NO_INTS, NO_FLOATS, NO_INTS), 0, ProgressColumns(NO_INTS, NO_INTS, NO_INTS)
            )

        return self.client.decide(Step(state), snapshot)

    def decide_until(self, done: Callable[[BatchAllocation | None], bool]) -> BatchAllocation | None:
        """Goes on as an engine does while something comes to pass in another thread, 10 s at most."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            answer = self.decide()
            if done(answer):
                return answer
            time.sleep(0.001)
        raise AssertionError(f"it never came to pass: {self.client.counters}")


def error(iteration: IterationState, reason: ErrorReason = ErrorReason.UNKNOWN_HANDLE) -> SessionError:
    return SessionError(
        reason, "step.finished_handles[0]", "7", "send known handles", "no", iteration.epoch, iteration.step
    )


def resync(iteration: IterationState) -> ResyncRequired:
    return ResyncRequired(iteration.epoch, iteration.step, ResyncReason.STEP_MISMATCH, 0, 0, "send a Snapshot")


def hang_up(iteration: IterationState) -> BatchAllocation:
    raise HangUp


def kinds(sidecar: ScriptedSidecar) -> list[str]:
    return [type(message).__name__ for message in sidecar.received]


def fallbacks(client: SchedulerClient) -> dict[str, int]:
    return {reason.value: count for reason, count in client.counters.fallbacks.items() if count}


def breaker(client: SchedulerClient) -> BreakerState:
    return client.breaker_state


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    sidecar = ScriptedSidecar(f"unix:{tmp_path}/s.sock")
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(sidecar: ScriptedSidecar, clock: Clock) -> Iterator[SchedulerClient]:
    client = SchedulerClient(ClientSettings(sidecar.address), clock=clock)
    yield client
    client.close()


@pytest.fixture
def engine(client: SchedulerClient) -> Engine:
    assert client.open(OPEN) == OPENED
    return Engine(client)


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


def test_a_sidecar_that_owes_answers_too_long_gets_a_new_stream(sidecar: ScriptedSidecar, clock: Clock) -> None:
    client = SchedulerClient(ClientSettings(sidecar.address, stall_seconds=0.001), clock=clock)
    client.open(OPEN)
    engine = Engine(client)
    sidecar.will(sidecar.held)
    for _ in range(3):
        engine.decide(SHORT)
    clock.seconds = 1.0
    assert engine.decide_until(lambda answer: answer is not None) is not None
    assert client.counters.reconnects == 1
    sidecar.gate.set()
    client.close()


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


def test_a_broken_stream_does_not_hang_a_call_without_deadline(sidecar: ScriptedSidecar, clock: Clock) -> None:
    client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None), clock=clock)
    client.open(OPEN)
    engine = Engine(client)
    assert engine.decide(within=0.0) is not None
    sidecar.will(hang_up)
    assert engine.decide(within=0.0) is None
    assert fallbacks(client) == {"rpc_error": 1}
    assert breaker(client) is BreakerState.OPEN
    assert client.wait_connected(LONG)
    assert engine.decide(within=0.0) is None
    clock.seconds = 0.25
    assert engine.decide(within=0.0) is not None
    assert breaker(client) is BreakerState.CLOSED
    assert fallbacks(client) == {"rpc_error": 1, "breaker_open": 1}
    assert client.counters.reconnects == 1
    client.close()


def test_a_sidecar_that_dies_and_comes_back_is_used_again(
    engine: Engine, sidecar: ScriptedSidecar, clock: Clock
) -> None:
    assert engine.decide() is not None
    sidecar.stop()
    for _ in range(5):
        assert engine.decide() is None
    assert set(fallbacks(engine.client)) <= {"rpc_error", "disconnected", "breaker_open"}
    assert engine.client.session is None
    successor = ScriptedSidecar(sidecar.address)
    successor.start()
    assert engine.client.wait_connected(LONG)
    clock.seconds = 10.0
    answer = engine.decide()
    assert answer is not None
    assert answer.step == 6
    assert kinds(successor) == ["OpenSession", "Snapshot"]
    assert engine.client.counters.reconnects == 1
    engine.client.close()
    successor.stop()


def test_a_draining_sidecar_gets_no_further_message(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(lambda iteration: allocation(iteration, draining=True))
    answer = engine.decide()
    assert answer is not None
    assert answer.draining
    assert engine.client.wait_connected(LONG)
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Step", "OpenSession", "Snapshot"]
    assert breaker(engine.client) is BreakerState.CLOSED
    assert fallbacks(engine.client) == {}


def test_a_session_that_is_sent_away_is_opened_again(engine: Engine, sidecar: ScriptedSidecar) -> None:
    sidecar.will(lambda iteration: error(iteration, ErrorReason.UNAVAILABLE))
    assert engine.decide() is None
    assert engine.client.wait_connected(LONG)
    assert engine.decide() is not None
    assert engine.client.counters.reconnects == 1


def test_an_engine_may_start_without_its_sidecar(sidecar: ScriptedSidecar, client: SchedulerClient) -> None:
    sidecar.stop()
    client.start(OPEN)
    engine = Engine(client)
    assert engine.decide() is None
    assert fallbacks(client) == {"disconnected": 1}
    assert not client.wait_connected(0.01)
    sidecar.start()
    assert client.wait_connected(LONG)
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Snapshot"]


def test_without_sidecar_open_says_so(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    client = SchedulerClient(ClientSettings(f"unix:{tmp_path}/none.sock"))
    with pytest.raises(SidecarUnavailable, match=r"none\.sock within 0\.1 s .*slidingserve serve"):
        client.open(OPEN, wait_seconds=0.1)
    assert_no_thread_left(before)


def test_a_refusal_is_raised_with_its_words(client: SchedulerClient, sidecar: ScriptedSidecar) -> None:
    words = "policy = nope: not installed; choose one of vllm"
    sidecar.opening = SessionError(ErrorReason.UNKNOWN_POLICY, "policy", "nope", "choose one of vllm", words)
    with pytest.raises(SessionRefused, match=words) as caught:
        client.open(OPEN)
    assert caught.value.error.reason is ErrorReason.UNKNOWN_POLICY
    sidecar.opening = OPENED
    assert client.open(OPEN) == OPENED


def test_a_sidecar_that_never_opens_is_given_up(sidecar: ScriptedSidecar) -> None:
    class Silent(ScriptedSidecar):
        def _reply(self, value: Any) -> Any:
            return self.held(IterationState(0, 0, 0.0, 0))

    sidecar.stop()
    silent = Silent(sidecar.address)
    silent.start()
    client = SchedulerClient(ClientSettings(sidecar.address, open_timeout_seconds=0.05))
    with pytest.raises(SidecarUnavailable):
        client.open(OPEN, wait_seconds=0.3)
    assert kinds(silent).count("OpenSession") >= 2
    silent.stop()


def test_mistakes_in_opening_are_raised(client: SchedulerClient) -> None:
    with pytest.raises(ContractError, match="max_sequences"):
        client.open(OpenSession(EngineLimits(1, -1, 1, 1)))
    client.open(OPEN)
    with pytest.raises(RuntimeError, match="open already"):
        client.open(OPEN)


def test_the_engines_mistakes_are_counted_and_never_raised(engine: Engine, sidecar: ScriptedSidecar) -> None:
    assert engine.decide(free_kv_blocks=-1) is None

    def broken() -> Snapshot:
        raise ZeroDivisionError

    assert engine.client.decide(Step(IterationState(0, 9, 0.0, 0)), broken) is None
    assert fallbacks(engine.client) == {FallbackReason.CLIENT_ERROR: 2}
    assert engine.decide() is not None
    assert kinds(sidecar) == ["OpenSession", "Snapshot"]


def test_decide_after_close_is_a_fallback(engine: Engine) -> None:
    engine.client.close()
    engine.client.close()
    assert engine.decide() is None
    assert fallbacks(engine.client) == {"disconnected": 1}


def test_close_leaves_no_thread_and_no_file_open(sidecar: ScriptedSidecar) -> None:
    def one_life() -> None:
        client = SchedulerClient(ClientSettings(sidecar.address))
        client.open(OPEN)
        engine = Engine(client)
        assert engine.decide() is not None
        sidecar.will(hang_up)
        engine.decide()
        assert client.wait_connected(LONG)
        client.close()

    one_life()
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        one_life()
    assert_no_thread_left(before)
    gc.collect()
    end = time.monotonic() + 10
    # gRPC closes its sockets in threads of its own, on both sides.
    while len(os.listdir("/proc/self/fd")) > files and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= files


def assert_no_thread_left(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        if "ThreadPoolExecutor" not in thread.name:
            thread.join(10)
            assert not thread.is_alive(), thread


@pytest.mark.parametrize("secure", [False, True])
def test_tcp_with_and_without_credentials(secure: bool) -> None:
    sidecar = ScriptedSidecar("127.0.0.1:0")
    port = sidecar.start(grpc.local_server_credentials() if secure else None)
    credentials = grpc.local_channel_credentials() if secure else None
    client = SchedulerClient(ClientSettings(f"127.0.0.1:{port}", credentials=credentials))
    client.open(OPEN)
    assert Engine(client).decide() is not None
    client.close()
    sidecar.stop()


def test_it_is_a_decision_source(sidecar: ScriptedSidecar) -> None:
    seen: list[float] = []
    client = SchedulerClient(ClientSettings(sidecar.address), on_round_trip=seen.append)
    source: DecisionSource = client
    source.open(OPEN)
    assert Engine(client).decide() is not None
    source.close()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target": "localhost"}, "target = 'localhost'"),
        ({"target": "unix:"}, "target"),
        ({"target": "host:0"}, "target"),
        ({"deadline_seconds": 0.0}, "deadline_seconds"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds"),
        ({"stall_seconds": -1.0}, "stall_seconds"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ClientSettings(**{"target": "unix:/s", **changes})


def test_round_trips_are_a_fair_sample_in_bounded_memory() -> None:
    trips = RoundTrips(size=1000)
    for number in range(50_000):
        trips.add(float(number))
    assert len(trips) == 50_000
    assert trips.seconds().shape == (1000,)
    assert abs(np.median(trips.seconds()) - 25_000) < 2500


def test_the_client_needs_only_grpcio_protobuf_and_numpy() -> None:
    code = "import sys, engine_adapter.client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"grpc", "google", "numpy"} <= loaded
    assert not loaded & {"numba", "pydantic", "structlog", "typer", "rich", "sklearn", "scipy", "sidecar", "evaluation"}
