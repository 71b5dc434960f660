"""SIGTERM: readiness off, a last answer for everybody, and away."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from engine_adapter.client import FallbackReason
from evaluation.sidecar_process import SidecarProcess
from sidecar.addresses import AddressError, check_listenable
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


@pytest.mark.parametrize("transport", ["unix socket", "tcp"])
def test_drain(transport: str) -> None:
    probes = free_address()
    arguments = ("--drain-seconds", "60", "--health-listen", probes)
    with SidecarProcess(arguments, address=free_address() if transport == "tcp" else "") as sidecar:
        wait_ready(sidecar)
        with (
            channel_to(sidecar.address) as channel,
            channel_to(probes) as probe,
            RawStream(channel) as stream,
            RawStream(channel) as other,
        ):
            for opened in (stream, other):
                assert isinstance(opened.ask(OPEN), SessionOpened)
            sidecar.process.send_signal(signal.SIGTERM)
            wait_until(lambda: health_status(channel, "readiness") == "NOT_SERVING", "readiness goes off")
            for health in (channel, probe):
                assert [health_status(health, name) for name in ("", SERVICE, "readiness")] == ["NOT_SERVING"] * 3
                assert health_status(health, "liveness") == "SERVING"
            sidecar.process.send_signal(signal.SIGTERM)
            # gRPC would let a successor take it over, and engines would wait for their last answer in vain.
            with pytest.raises(AddressError, match=r"another process listens|already in use"):
                check_listenable(sidecar.address)

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
            assert health_status(probe, "liveness") == "SERVING"
            assert isinstance(other.ask(step(0)), BatchAllocation)
            assert other.ends_with() == "OK"
            assert sidecar.process.wait(30) == 0
        check_listenable(sidecar.address)
        if transport == "unix socket":
            assert not Path(sidecar.address.removeprefix("unix:")).exists()


@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=pytest.mark.long), 0.5])
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


def test_engine_goes_over_to_the_successor_at_the_same_address() -> None:
    requests = random_feed(seed=5, count=3000, prompt=30, output=20, gap_seconds=0.3)
    with SidecarProcess(("--drain-seconds", "60")) as sidecar:
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
