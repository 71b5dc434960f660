"""Opening, losing, finding again and closing a session, against a small real gRPC server over a Unix socket."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_adapter.client import BreakerState, ClientSettings, SchedulerClient, SessionRefused, SidecarUnavailable
from engine_adapter.source import DecisionSource
from slidingserve.contract.codec import ContractError
from slidingserve.contract.values import EngineLimits, ErrorReason, IterationState, OpenSession, SessionError
from tests.adapter.engine import LONG, OPEN, SHORT, Clock, Engine, breaker, error, fallbacks, hang_up, kinds
from tests.adapter.scripted_sidecar import OPENED, ScriptedSidecar, allocation


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
    before = set(threading.enumerate())
    words = "policy = nope: not installed; choose one of vllm"
    sidecar.opening = SessionError(ErrorReason.UNKNOWN_POLICY, "policy", "nope", "choose one of vllm", words)
    with pytest.raises(SessionRefused, match=words) as caught:
        client.open(OPEN)
    assert caught.value.error.reason is ErrorReason.UNKNOWN_POLICY
    assert_no_thread_left(before)
    sidecar.opening = OPENED
    assert client.open(OPEN) == OPENED


def test_a_sidecar_that_never_opens_is_given_up(sidecar: ScriptedSidecar) -> None:
    class Silent(ScriptedSidecar):
        def _reply(self, value: Any) -> Any:
            return self.held(IterationState(0, 0, 0.0, 0))

    sidecar.stop()
    silent = Silent(sidecar.address)
    silent.start()
    before = set(threading.enumerate())
    client = SchedulerClient(ClientSettings(sidecar.address, open_timeout_seconds=0.05))
    with pytest.raises(SidecarUnavailable):
        client.open(OPEN, wait_seconds=0.3)
    assert kinds(silent).count("OpenSession") >= 2
    silent.gate.set()
    assert_no_thread_left(before)
    silent.stop()


def test_a_failure_of_the_background_thread_does_not_end_it(
    sidecar: ScriptedSidecar, client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [RuntimeError("can't start new thread")] * 3

    class NoThreads(threading.Timer):
        def start(self) -> None:
            if left:
                raise left.pop()
            super().start()

    monkeypatch.setattr(threading, "Timer", NoThreads)
    assert client.open(OPEN) == OPENED
    assert not left
    assert Engine(client).decide() is not None


def test_mistakes_in_opening_are_raised(client: SchedulerClient) -> None:
    with pytest.raises(ContractError, match="max_sequences"):
        client.open(OpenSession(EngineLimits(1, -1, 1, 1)))
    client.open(OPEN)
    with pytest.raises(RuntimeError, match="open already"):
        client.open(OPEN)


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
            thread.join(2)
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


def test_the_client_needs_only_grpcio_protobuf_and_numpy() -> None:
    code = "import sys, engine_adapter.client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"grpc", "google", "numpy"} <= loaded
    assert not loaded & {"numba", "pydantic", "structlog", "typer", "rich", "sklearn", "scipy", "sidecar", "evaluation"}
