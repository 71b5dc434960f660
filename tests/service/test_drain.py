"""SIGTERM: readiness off, a last answer for everybody, and away."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from engine_adapter.client import FallbackReason
from evaluation.sidecar_process import SidecarProcess
from slidingserve.contract.values import BatchAllocation, ErrorReason, SessionError, SessionOpened
from tests.service.support import (
    OPEN,
    SERVICE,
    RawStream,
    assert_same_run,
    channel_to,
    client_of,
    engine_for,
    free_address,
    health_status,
    outcome_in_process,
    run_until,
    wait_ready,
    wait_until,
)
from tests.strategies import columns, random_feed, step


@pytest.mark.parametrize("where", ["unix socket", "tcp", "second address"])
def test_drain(where: str) -> None:
    probes = free_address() if where == "second address" else ""
    arguments = ("--drain-seconds", "20", *(("--health-listen", probes) if probes else ()))
    with SidecarProcess(arguments, address=free_address() if where == "tcp" else "") as sidecar:
        wait_ready(sidecar)
        with (
            channel_to(sidecar.address) as channel,
            channel_to(probes or sidecar.address) as health,
            RawStream(channel) as stream,
            RawStream(channel) as other,
        ):
            for opened in (stream, other):
                assert isinstance(opened.ask(OPEN), SessionOpened)
            sidecar.process.send_signal(signal.SIGTERM)
            wait_until(lambda: health_status(health, "readiness") == "NOT_SERVING", "readiness goes off")
            assert [health_status(health, name) for name in ("", SERVICE)] == ["NOT_SERVING"] * 2
            assert health_status(health, "liveness") == "SERVING"
            sidecar.process.send_signal(signal.SIGTERM)

            with RawStream(channel) as late:
                refusal = late.ask(OPEN)
                assert isinstance(refusal, SessionError)
                assert refusal.reason is ErrorReason.UNAVAILABLE
                assert "going away" in refusal.message

            last = stream.ask(step(0, arrived=columns([1], [9])))
            assert isinstance(last, BatchAllocation)
            assert last.draining
            assert last.handles.tolist() == [1], "the last answer is as good as any"
            assert stream.ends_with() == "OK"
            assert sidecar.process.poll() is None, "the other engine has not had its last answer"
            assert health_status(health, "liveness") == "SERVING"
            assert isinstance(other.ask(step(0)), BatchAllocation)
            assert other.ends_with() == "OK"
            assert sidecar.process.wait(10) == 0
        if where != "tcp":
            assert not Path(sidecar.address.removeprefix("unix:")).exists()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_idle_stream_does_not_hold_up_the_end(seconds: float) -> None:
    with SidecarProcess(("--drain-seconds", str(seconds))) as sidecar:
        wait_ready(sidecar)
        with channel_to(sidecar.address) as channel, RawStream(channel) as stream:
            assert isinstance(stream.ask(OPEN), SessionOpened)
            started = time.monotonic()
            sidecar.process.send_signal(signal.SIGTERM)
            assert sidecar.process.wait(10) == 0
            assert seconds - 0.1 <= time.monotonic() - started < seconds + 2, "the rest is the end of the interpreter"
            assert stream.ends_with() in ("UNAVAILABLE", "CANCELLED")
        assert "Traceback" not in sidecar.log


def test_without_engines_it_ends_at_once() -> None:
    with SidecarProcess(("--drain-seconds", "20")) as sidecar:
        wait_ready(sidecar)
        sidecar.process.send_signal(signal.SIGINT)
        assert sidecar.process.wait(5) == 0


def test_engine_goes_over_to_the_successor_at_the_same_address() -> None:
    requests = random_feed(seed=5, count=6000, prompt=30, output=6, gap_seconds=0.2)
    with SidecarProcess(("--drain-seconds", "20")) as sidecar:
        wait_ready(sidecar)
        with client_of(sidecar, deadline_seconds=0.02) as client:
            counters = client.counters
            engine = engine_for(requests, client)
            run_until(engine, lambda: counters.decisions >= 50, "the first sidecar decides")
            sidecar.process.send_signal(signal.SIGTERM)
            run_until(engine, lambda: sidecar.process.poll() is not None, "the first sidecar ends")
            assert sidecar.process.returncode == 0
            before = counters.decisions
            sidecar.restart()
            run_until(engine, lambda: counters.decisions >= before + 200, "the successor decides")
            assert counters.reconnects == 1
            assert counters.fallbacks[FallbackReason.DISCONNECTED] > 0
            assert counters.fallbacks[FallbackReason.SESSION_ERROR] == 0
            client.close()
            assert_same_run(engine.run(), outcome_in_process(requests))


def test_successor_started_in_mid_drain_is_refused_and_its_own_socket_stays() -> None:
    """gRPC takes a living sidecar's socket over, and an old sidecar might remove the new one's: neither may happen."""
    with SidecarProcess(("--drain-seconds", "20")) as sidecar:
        wait_ready(sidecar)
        with channel_to(sidecar.address) as channel, RawStream(channel) as stream:
            assert isinstance(stream.ask(OPEN), SessionOpened)
            sidecar.process.send_signal(signal.SIGTERM)
            wait_until(lambda: health_status(channel, "readiness") == "NOT_SERVING", "readiness goes off")
            with SidecarProcess(address=sidecar.address) as early:
                wait_until(lambda: early.process.poll() is not None, "the successor is refused")
                assert early.process.returncode == 2
            assert isinstance(stream.ask(step(0)), BatchAllocation)
            assert sidecar.process.wait(10) == 0
        with SidecarProcess(address=sidecar.address) as successor:
            wait_ready(successor)
