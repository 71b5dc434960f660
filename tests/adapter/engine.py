"""An engine's loop reduced to asking, and what the tests look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine_adapter.client import BreakerState, SchedulerClient
from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    BatchAllocation,
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
from tests.adapter.scripted_sidecar import LIMITS, HangUp, ScriptedSidecar

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
