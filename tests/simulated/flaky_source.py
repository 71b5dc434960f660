"""A source between engine and session that loses answers, falls out of step and mangles allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

import numpy as np

from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import (
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    EngineLimits,
    Ints,
    OpenSession,
    ProgressColumns,
    ResyncReason,
    ResyncRequired,
    SessionError,
    SessionOpened,
    Snapshot,
    Step,
)
from tests.strategies import assert_mirrors, assert_within_limits, ints, mirror_rows


class Fault(Enum):
    """What goes wrong in one exchange."""

    NONE = auto()
    SKIP = auto()  # no answer, and the session never saw the step
    DROP = auto()  # no answer, but the session has decided
    WRONG_STEP = auto()
    WRONG_EPOCH = auto()
    REFUSED = auto()  # a message that is wrong comes first
    SPARE_SNAPSHOT = auto()  # a snapshot although nobody asked for one
    TELL_PROGRESS = auto()  # the step tells absolute progress that follows anyway
    STRANGERS = auto()  # the others mangle the allocation on its way to the engine
    TWICE = auto()
    TOO_MANY = auto()
    TOO_FEW = auto()
    NO_TOKENS = auto()
    REVERSED = auto()
    EMPTY = auto()
    FALSE_VICTIMS = auto()
    ALL_VICTIMS = auto()
    VICTIMS_FOR_NOTHING = auto()


class FlakySource:
    """Wraps an in-process source; after each accepted exchange mirror and engine are compared.

    A source that changes an allocation is the one that knows, so it reports what it told the engine to do as applied.
    """

    def __init__(self, limits: EngineLimits, faults: Iterable[Fault]) -> None:
        self._inner = InProcessSource()
        self._limits = limits
        self._faults = iter(faults)
        self._told: AppliedBatch | None = None
        self.session = self._inner.session
        self.exact = 0  # steps in which the engine had executed an unchanged allocation to the letter
        self._unchanged = False

    def open(self, message: OpenSession) -> SessionOpened:
        return self._inner.open(message)

    def close(self) -> None:
        self._inner.close()

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        fault = next(self._faults, Fault.NONE)
        if self._unchanged:
            assert step.applied_exactly, "the guard lets through only what the engine can execute"
            self.exact += 1
        self._unchanged = False
        step, self._told = self._with_truth(step), None
        if fault is Fault.SKIP:
            return None
        self._disturb(fault, step, snapshot)
        if fault is Fault.TELL_PROGRESS:
            step = step._replace(progress=known_progress(step, snapshot()))
        if fault is Fault.SPARE_SNAPSHOT:
            full = snapshot()
            epoch = 1000 + 2 * full.iteration.step
            answer = self.session.handle(full._replace(iteration=full.iteration._replace(epoch=epoch)))
            assert isinstance(answer, BatchAllocation), answer
            allocation = answer
        else:
            allocation = self._inner.decide(step, snapshot)
        full = snapshot()
        assert_mirrors(self.session, full, self._limits)
        assert_within_limits(allocation, full, self._limits)
        if fault is Fault.DROP:
            return None
        mangled = mangle(fault, allocation, full)
        if mangled is not allocation:
            self._told = AppliedBatch(mangled.handles, mangled.tokens, mangled.preempted_handles)
        else:
            self._unchanged = len(allocation.handles) > 0
        return mangled

    def _with_truth(self, step: Step) -> Step:
        if self._told is not None and step.applied_exactly:
            return step._replace(applied_exactly=False, applied=self._told)
        return step

    def _disturb(self, fault: Fault, step: Step, snapshot: Callable[[], Snapshot]) -> None:
        """Sends a message that must not be accepted; it may change nothing."""
        session, iteration = self.session, step.iteration
        before = mirror_rows(session)
        if fault is Fault.WRONG_STEP:
            answer = session.handle(step._replace(iteration=iteration._replace(step=iteration.step + 7)))
            assert isinstance(answer, ResyncRequired)
        elif fault is Fault.WRONG_EPOCH:
            answer = session.handle(step._replace(iteration=iteration._replace(epoch=10**9)))
            assert isinstance(answer, ResyncRequired)
            assert answer.reason in (ResyncReason.EPOCH_MISMATCH, ResyncReason.AFTER_ERROR)
        elif fault is Fault.REFUSED:
            full = snapshot()
            answer = session.handle(
                full._replace(iteration=full.iteration._replace(epoch=10**9, now_seconds=float("nan")))
            )
            assert isinstance(answer, SessionError)
        assert mirror_rows(session) == before


def known_progress(step: Step, full: Snapshot) -> ProgressColumns:
    """Absolute progress, as it is now, of the requests that were known before the step and are not gone."""
    arrived = NO_INTS if step.arrived is None else step.arrived.handles
    known = np.flatnonzero(~np.isin(full.requests.handles, arrived))
    return ProgressColumns(
        full.requests.handles[known],
        full.progress.computed_tokens[known],
        full.progress.output_tokens[known],
    )


def mangle(fault: Fault, allocation: BatchAllocation, full: Snapshot) -> BatchAllocation:
    """The allocation as a careless source would hand it on; the same object where nothing is changed."""
    handles, tokens, victims = allocation.handles, allocation.tokens, allocation.preempted_handles
    running, waiting = full.requests.handles[: full.running_count], full.requests.handles[full.running_count :]
    strangers: Ints = ints(-1, 10**6, 2**40)
    changed: dict[Fault, tuple[Ints, Ints, Ints]] = {
        Fault.STRANGERS: (np.append(strangers, handles), np.append(strangers * 0 + 5, tokens), victims),
        Fault.TWICE: (np.append(handles, handles), np.append(tokens, tokens), np.append(victims, victims)),
        Fault.TOO_MANY: (handles, tokens + 10**6, victims),
        Fault.TOO_FEW: (handles, np.maximum(1, tokens // 2), victims),
        Fault.NO_TOKENS: (handles, tokens * 0, victims),
        Fault.REVERSED: (handles[::-1].copy(), tokens[::-1].copy(), victims),
        Fault.EMPTY: (NO_INTS, NO_INTS, victims),
        Fault.FALSE_VICTIMS: (handles, tokens, np.concatenate([waiting, strangers, victims])),
        Fault.ALL_VICTIMS: (handles, tokens, running),
        Fault.VICTIMS_FOR_NOTHING: (strangers, strangers * 0 + 5, running),
    }
    if fault not in changed:
        return allocation
    handles, tokens, victims = changed[fault]
    return allocation._replace(handles=handles, tokens=tokens, preempted_handles=victims)
