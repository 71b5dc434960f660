"""Journals of simulated engines, for the tests of the shadow report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.feed import RequestFeed
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.timing import IterationTimer
from sidecar.answering import answer_request
from sidecar.journal import JournalWriter
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.codec import encode_request
from slidingserve.contract.values import (
    BatchAllocation,
    Mode,
    OpenSession,
    Request,
    Response,
    SessionOpened,
    Snapshot,
    Step,
)


class RecordedSource:
    """A session in this process whose messages go over the codec and into a journal, as a sidecar writes it.

    Attributes:
        session: the session.
        lost: steps (by number) that never reach the sidecar, as if the engine had not waited for it.
        snapshots: steps (by number) in whose place a snapshot comes.
        switches: modes by the number of the step before which they are switched to.
    """

    def __init__(self, path: Path, defaults: SessionDefaults | None = None) -> None:
        defaults = defaults or SessionDefaults()
        self.session = Session("1", defaults)
        self.lost: set[int] = set()
        self.snapshots: set[int] = set()
        self.switches: dict[int, Mode] = {}
        self._journal = JournalWriter(path.open("wb"), "1", defaults)
        self._epoch = 0
        self._out_of_step = False

    def open(self, message: OpenSession) -> SessionOpened:
        answer = self._exchange(message)
        assert isinstance(answer, SessionOpened), answer
        return answer

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        number = step.iteration.step
        if number in self.switches:
            self.session.switch_mode(self.switches[number])
        if number in self.lost:
            self._out_of_step = True
            return None
        if self._out_of_step or number in self.snapshots:
            self._out_of_step = False
            self._epoch += 1
            full = snapshot()
            message: Request = full._replace(iteration=full.iteration._replace(epoch=self._epoch))
        else:
            message = step._replace(iteration=step.iteration._replace(epoch=self._epoch))
        answer = self._exchange(message)
        assert isinstance(answer, BatchAllocation), answer
        return answer

    def close(self) -> None:
        self._journal.close()

    def _exchange(self, message: Request) -> Response:
        request = encode_request(message)
        answer, response = answer_request(self.session, request)
        self._journal.write(request, response)
        return answer


def record(
    path: Path,
    feed: RequestFeed,
    timer: IterationTimer,
    opening: OpenSession,
    *,
    lost: frozenset[int] = frozenset(),
    switches: dict[int, Mode] | None = None,
    cpu_seconds: float = 0.0,
) -> Outcome:
    """Runs a simulated engine with a recorded session; returns what happened to it."""
    source = RecordedSource(path)
    source.lost, source.switches = set(lost), switches or {}
    source.open(opening)
    engine = SimulatedEngine(feed, opening.limits, timer, source, cpu_seconds_per_iteration=cpu_seconds)
    outcome = engine.run()
    source.close()
    return outcome
