"""Where an engine gets its decisions from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slidingserve.contract.values import BatchAllocation, OpenSession, SessionOpened, Snapshot, Step


class DecisionSource(Protocol):
    """Decides for one engine core, one iteration after the other, on the engine's own thread.

    The engine numbers its iterations (``step`` from 0, where it holds no request yet); the source numbers the epochs
    and overwrites ``iteration.epoch`` in all that it is given.
    """

    def open(self, message: OpenSession) -> SessionOpened:
        """Opens the session; called once, before the first iteration. Raises when there will be no decisions."""
        ...

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """Returns the batch for this iteration, or None: the engine then uses its own policy, this once.

        Called for every iteration, whatever the last one returned. ``step`` holds what changed since the last call; an
        answer of None does not postpone any of it. After a None the sidecar's mirror no longer equals the engine, so
        the source asks for a snapshot instead of using the step: ``snapshot()`` returns everything that the engine
        holds at this very iteration, the changes in ``step`` included, with the same ``iteration``. It is called only
        when needed, within this call.
        """
        ...

    def close(self) -> None:
        """Ends the session and frees what it held; may be called twice."""
        ...


class PrefetchingSource(DecisionSource, Protocol):
    """A source that an engine can ask for its next iteration while this one runs."""

    def send(self, step: Step, snapshot: Callable[[], Snapshot]) -> bool:
        """Asks as `decide` does, without waiting; returns whether anything was asked. Never raises."""
        ...

    def take(self, wait_seconds: float) -> BatchAllocation | None:
        """Returns the answer to what was sent last, waiting so long at most; None as `decide`. Never raises."""
        ...
