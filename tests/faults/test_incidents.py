"""The sidecar killed, stopped and slowed in mid-run, with a deadline: the engine goes on, and decisions come back.

The policy is `vllm` on both sides, so a run in which the engine's own policy took over for a while must equal the
undisturbed one, request by request; it would not if the mirror were wrong after an incident.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from engine_adapter.client import BreakerState, ClientSettings, FallbackReason, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from evaluation.sidecar_process import SidecarProcess
from sidecar.services.scheduler import SchedulerService
from sidecar.session.machine import SessionDefaults
from slidingserve.contract.values import Mode
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.service.support import (
    OPEN,
    ServerThread,
    assert_same_run,
    client_of,
    engine_for,
    outcome_in_process,
    run_until,
    wait_ready,
)
from tests.strategies import random_feed

DEADLINE_SECONDS = 0.02
REQUESTS = random_feed(seed=11, count=5_000, prompt=30, output=20, gap_seconds=0.3)


@cache
def calm_run() -> Outcome:
    return outcome_in_process(REQUESTS)


@dataclass(frozen=True)
class Running:
    """An engine that is being served."""

    engine: SimulatedEngine
    client: SchedulerClient

    @property
    def fallbacks(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.client.counters.fallbacks.items() if count}

    def serve(self, decisions: int, what: str) -> None:
        """Runs until so many more decisions have come."""
        goal = self.client.counters.decisions + decisions
        run_until(self.engine, lambda: self.client.counters.decisions >= goal, what)

    def do_without(self, fallbacks: int, what: str) -> None:
        """Runs until the engine has decided so many more iterations itself."""
        goal = self.client.counters.total_fallbacks + fallbacks
        run_until(self.engine, lambda: self.client.counters.total_fallbacks >= goal, what)

    def assert_in_step(self) -> None:
        """Decisions come one after the other, without any resync or refusal (but for a stray miss of the deadline)."""
        counters = self.client.counters
        before, missed = counters.resyncs, counters.fallbacks[FallbackReason.DEADLINE]
        self.serve(300, "decisions come steadily")
        assert counters.resyncs - before <= counters.fallbacks[FallbackReason.DEADLINE] - missed

    def finish(self) -> None:
        """Runs to the end without the sidecar; every request has all its tokens, at the times of a calm run."""
        reasons = self.fallbacks
        for wrong in (FallbackReason.SESSION_ERROR, FallbackReason.INVALID_ANSWER, FallbackReason.CLIENT_ERROR):
            assert wrong.value not in reasons, reasons
        so_far, iterations = self.client.counters.total_fallbacks, self.engine.iterations
        assert self.engine.outcome().fallbacks == so_far
        assert so_far + self.client.counters.decisions == iterations
        self.client.close()
        outcome = self.engine.run()
        assert_same_run(outcome, calm_run())
        assert outcome.rejected == 0


@contextmanager
def running(sidecar: SidecarProcess) -> Iterator[Running]:
    wait_ready(sidecar)
    with client_of(sidecar, DEADLINE_SECONDS) as client:
        run = Running(engine_for(REQUESTS, client), client)
        run.serve(100, "the sidecar decides")
        yield run


def test_killed_and_restarted() -> None:
    with SidecarProcess() as sidecar, running(sidecar) as run:
        sidecar.process.send_signal(signal.SIGKILL)
        run.do_without(100, "the engine goes on by itself")
        assert run.fallbacks["disconnected"] > 0
        assert sidecar.process.poll() == -signal.SIGKILL
        sidecar.restart()
        run.serve(100, "the restarted sidecar decides")
        assert run.client.counters.reconnects >= 1
        run.assert_in_step()
        run.finish()


def test_stopped_and_continued() -> None:
    with SidecarProcess() as sidecar, running(sidecar) as run:
        before = run.fallbacks.get("deadline", 0)
        sidecar.process.send_signal(signal.SIGSTOP)
        run.do_without(300, "the engine goes on by itself")
        assert run.client.breaker_state is not BreakerState.CLOSED
        assert run.fallbacks["breaker_open"] > 0
        assert run.fallbacks["deadline"] - before <= 3, "after three misses the sidecar is left alone"
        sidecar.process.send_signal(signal.SIGCONT)
        run.serve(100, "the sidecar decides again")
        assert run.client.counters.late_answers > 0, "what came too late was dropped"
        run.assert_in_step()
        run.finish()


@pytest.mark.long
def test_killed_while_stopped() -> None:
    with SidecarProcess() as sidecar, running(sidecar) as run:
        sidecar.process.send_signal(signal.SIGSTOP)
        run.do_without(50, "the engine goes on by itself")
        sidecar.process.send_signal(signal.SIGKILL)
        run.do_without(50, "the engine goes on by itself")
        sidecar.restart()
        run.serve(100, "the restarted sidecar decides")
        run.assert_in_step()
        run.finish()


class SlowService(SchedulerService):
    """Answers late while `delay_seconds` is positive."""

    delay_seconds = 0.0

    async def Schedule(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ScheduleRequest], context: Any
    ) -> AsyncIterator[pb.ScheduleResponse]:
        async for answer in super().Schedule(request_iterator, context):
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            yield answer


def test_slowed_and_quick_again() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ss-") as folder,
        ServerThread(f"unix:{folder}/s.sock", lambda: SlowService(SessionDefaults(), 4)) as server,
    ):
        client = SchedulerClient(ClientSettings(server.address, DEADLINE_SECONDS))
        try:
            assert client.open(OPEN).mode is Mode.ACTIVE
            run = Running(engine_for(REQUESTS, client), client)
            run.serve(100, "the sidecar decides")
            before = run.fallbacks.get("deadline", 0)
            SlowService.delay_seconds = 3 * DEADLINE_SECONDS
            run.do_without(300, "the engine goes on by itself")
            assert 1 <= run.fallbacks["deadline"] - before <= 10
            assert run.fallbacks["breaker_open"] > 100
            SlowService.delay_seconds = 0.0
            run.serve(100, "decisions come in time again")
            run.assert_in_step()
            run.finish()
        finally:
            SlowService.delay_seconds = 0.0
            client.close()
