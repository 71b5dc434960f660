"""One session on one stream, as the engine's thread uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from engine_adapter.client.counters import ClientCounters
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import (
    BatchAllocation,
    Response,
    ResyncRequired,
    SessionError,
    SessionOpened,
    Snapshot,
    Step,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

Answer: TypeAlias = BatchAllocation | ResyncRequired | SessionError


class DeadlineMissed(Exception):
    """The answer did not come in time; it will be dropped when it does."""


class StreamEnded(Exception):
    """The stream is gone."""


class InvalidAnswer(Exception):
    """The sidecar said something that makes no sense."""


class SessionStream:
    """An open session: sends a message and waits for its answer.

    Every message is answered once, in order. So an answer that does not carry the numbers of the awaited message is a
    late one as long as earlier messages are unanswered, and wrong otherwise. All but `answers` and `end` belongs to the
    engine's thread.
    """

    def __init__(
        self,
        opened: SessionOpened,
        requests: SimpleQueue[pb.ScheduleRequest | None],
        cancel: Callable[[], object],
        counters: ClientCounters,
    ) -> None:
        self.opened = opened
        self.answers: SimpleQueue[pb.ScheduleResponse | None] = SimpleQueue()
        """What the reader has received; None: no more will come."""
        self.next_step: int | None = 0
        """The step that the sidecar expects; None: it needs a snapshot. A new session starts empty, at step 0."""
        self.epoch = 0
        """The epoch that the last snapshot brought."""
        self.retired = False
        """Given up; nothing is to be asked any more."""
        self._requests = requests
        self._cancel = cancel
        self._counters = counters
        self._owed = 0
        self._owing_since_seconds = 0.0
        self._awaited = (0, 0)
        self._asked = ""

    def ask(self, message: Step | Snapshot, wait_seconds: float | None) -> Answer:
        """Sends ``message`` and returns its answer.

        ``wait_seconds`` None waits until the answer or the end of the stream. Raises `DeadlineMissed`, `StreamEnded`,
        `InvalidAnswer`, and `ContractError` before anything is sent.
        """
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        self.send(message)
        return self._answer(deadline)

    def send(self, message: Step | Snapshot) -> None:
        """Sends ``message`` without waiting; `receive` returns its answer. Raises `ContractError`."""
        # Until the answer has come, nobody knows whether the mirror is in step.
        self.next_step = None
        self._requests.put(encode_request(message))
        if self._owed == 0:
            self._owing_since_seconds = time.monotonic()
        self._owed += 1
        self._awaited = (message.iteration.epoch, message.iteration.step)
        self._asked = type(message).__name__

    def receive(self, wait_seconds: float | None) -> Answer:
        """Returns the answer to the message sent last; raises as `ask`."""
        return self._answer(None if wait_seconds is None else time.monotonic() + wait_seconds)

    def _answer(self, deadline: float | None) -> Answer:
        awaited = self._awaited
        while True:
            answer = self._receive(deadline)
            self._owed -= 1
            if not isinstance(answer, BatchAllocation | ResyncRequired | SessionError):
                raise self._lost_count(f"{type(answer).__name__} in answer to {self._asked}")
            if (answer.epoch, answer.step) == awaited:
                self._owed = 0
                return answer
            if self._owed > 0:
                self._drop_late()
            elif isinstance(answer, SessionError):
                # It may have been refused before its numbers could be read.
                return answer
            else:
                raise self._lost_count(f"epoch and step {(answer.epoch, answer.step)} in answer to {awaited}")

    def owes_answers(self) -> bool:
        """Whether the sidecar has not yet answered all messages; drops the answers that have come meanwhile."""
        while self._owed:
            try:
                answer = self.answers.get_nowait()
            except Empty:
                return True
            if answer is None:
                # For the next `ask` to find.
                self.answers.put(None)
                return False
            self._owed -= 1
            self._drop_late()
        return False

    def owing_seconds(self) -> float:
        """How long the sidecar has not answered all messages."""
        return time.monotonic() - self._owing_since_seconds if self._owed else 0.0

    def retire(self) -> None:
        """Gives the stream up; the keeper opens another."""
        self.retired = True
        self._cancel()

    def end(self) -> None:
        """Tells the engine's thread that no more will come."""
        self.answers.put(None)

    def _lost_count(self, what: str) -> InvalidAnswer:
        """Gives the stream up, because messages and answers can no longer be matched."""
        self.retire()
        return InvalidAnswer(what)

    def _drop_late(self) -> None:
        self._counters.late_answers += 1
        self._owing_since_seconds = time.monotonic()

    def _receive(self, deadline: float | None) -> Response | None:
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            answer = self.answers.get(timeout=timeout)
        except Empty:
            raise DeadlineMissed from None
        if answer is None:
            # It stays ended, however often it is asked.
            self.answers.put(None)
            raise StreamEnded
        return decode_response(answer)
