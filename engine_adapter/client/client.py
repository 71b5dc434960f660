"""The client that an engine's loop calls."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from engine_adapter.client.breaker import BreakerState, CircuitBreaker
from engine_adapter.client.counters import ClientCounters, FallbackReason
from engine_adapter.client.errors import SessionRefused, SidecarUnavailable
from engine_adapter.client.keeper import SessionKeeper
from engine_adapter.client.settings import ClientSettings
from engine_adapter.client.stream import Answer, DeadlineMissed, InvalidAnswer, SessionStream, StreamEnded
from slidingserve.contract.values import (
    BatchAllocation,
    ErrorReason,
    OpenSession,
    ResyncRequired,
    SessionError,
    SessionOpened,
    Snapshot,
    Step,
)

_log = logging.getLogger(__name__)


class SchedulerClient:
    """A `DecisionSource` that asks a sidecar over gRPC; for one thread, that of the engine's loop.

    Nothing is connected, and no thread started, before `open` or `start`: make it after any fork. ``clock`` (seconds,
    monotonic) times the breaker only. ``on_round_trip`` gets the seconds of every decision, on the engine's thread;
    where it raises, there is no decision.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_round_trip: Callable[[float], None] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_round_trip = on_round_trip
        self._counters = ClientCounters()
        self._breaker = CircuitBreaker(settings.breaker)
        self._keeper: SessionKeeper | None = None
        self._epoch = 0
        self._error_logged = False
        self._asked: SessionStream | None = None  # of a decision that was asked for and not taken
        self._asking_seconds = 0.0

    @property
    def counters(self) -> ClientCounters:
        """What happened so far."""
        return self._counters

    @property
    def breaker_state(self) -> BreakerState:
        """Whether the sidecar is being asked."""
        return self._breaker.state

    @property
    def session(self) -> SessionOpened | None:
        """What the sidecar agreed to, if a session is open now."""
        stream = self._keeper.stream if self._keeper is not None else None
        return stream.opened if stream is not None else None

    def open(self, message: OpenSession, wait_seconds: float | None = None) -> SessionOpened:
        """Opens the session and waits for it, ``wait_seconds`` (default: the settings') at most.

        Raises `SessionRefused`, `SidecarUnavailable`, `ContractError` (``message`` cannot be encoded) and RuntimeError
        (called twice); after any of them nothing is left running and it may be called again.
        """
        self.start(message)
        keeper = self._keeper
        assert keeper is not None
        wait_seconds = self._settings.connect_wait_seconds if wait_seconds is None else wait_seconds
        keeper.wait(wait_seconds)
        stream, refusal, trouble = keeper.stream, keeper.refusal, keeper.trouble
        if stream is not None:
            return stream.opened
        self.close()
        if refusal is not None:
            raise SessionRefused(refusal)
        raise SidecarUnavailable(
            f"no sidecar at {self._settings.target} within {wait_seconds:g} s ({trouble}): start one with "
            f"`slidingserve serve`, or correct the address"
        )

    def start(self, message: OpenSession) -> None:
        """Opens the session in the background; until it is open `decide` returns None.

        For an engine that starts without waiting for its sidecar. Raises `ContractError` and RuntimeError as `open`.
        """
        if self._keeper is not None:
            raise RuntimeError("the client is open already: close it first")
        self._keeper = SessionKeeper(self._settings, message, self._counters)

    def wait_connected(self, seconds: float) -> bool:
        """Waits until a session is open, or refused, or ``seconds`` are over; returns whether one is open."""
        return self._keeper is not None and self._keeper.wait(seconds)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """Returns the sidecar's allocation, or None: use the engine's own policy for this iteration. Never raises.

        Waits for ``step.iteration.answer_within_seconds`` if that is positive, else for the settings' deadline; making
        a snapshot comes on top. Cost: that of the codec, linear in the rows of the message, plus the round trip; a few
        microseconds while the sidecar is left alone.
        """
        started_seconds = time.perf_counter()
        try:
            outcome = self._decide(step, snapshot)
            if not isinstance(outcome, FallbackReason):
                seconds = time.perf_counter() - started_seconds
                if self._on_round_trip is not None:
                    self._on_round_trip(seconds)
                self._counters.decisions += 1
                self._counters.round_trips.add(seconds)
                return outcome
        except Exception:
            # Whatever goes wrong here must not end the engine's loop.
            outcome = self._broken(step)
        self._counters.fallbacks[outcome] += 1
        return None

    def send(self, step: Step, snapshot: Callable[[], Snapshot]) -> bool:
        """Asks for a decision and does not wait for it: `take` returns it. Never raises.

        For an engine that asks for its next iteration as soon as it has launched one. Returns whether anything was
        asked; if not, there is nothing to take. A decision that was asked for and is not taken is lost, and the next
        one is asked for with a snapshot.
        """
        started_seconds = time.perf_counter()
        self._asked = None
        stream = self._keeper.stream if self._keeper is not None else None
        try:
            if stream is None:
                outcome = FallbackReason.DISCONNECTED
            elif not self._may_ask(stream):
                outcome = FallbackReason.BREAKER_OPEN
            else:
                wait_seconds = step.iteration.answer_within_seconds or self._settings.deadline_seconds
                stream.send(self._message(stream, step, snapshot, wait_seconds))
                self._asked = stream
                self._asking_seconds = time.perf_counter() - started_seconds
                return True
        except Exception:
            outcome = self._broken(step)
        self._counters.fallbacks[outcome] += 1
        return False

    def take(self, wait_seconds: float) -> BatchAllocation | None:
        """Returns the decision that was asked for by `send`, or None as `decide`; waits so long at most. Never raises.

        None as well if nothing was asked; that is not counted, `send` has said so.
        """
        started_seconds = time.perf_counter()
        stream, self._asked = self._asked, None
        if stream is None:
            return None
        try:
            outcome = self._outcome(stream, lambda: stream.receive(max(0.0, wait_seconds)))
            if not isinstance(outcome, FallbackReason):
                self._counters.decisions += 1
                self._counters.round_trips.add(self._asking_seconds + time.perf_counter() - started_seconds)
                return outcome
        except Exception:
            outcome = self._broken(None)
        self._counters.fallbacks[outcome] += 1
        return None

    def close(self) -> None:
        """Ends the session, the background thread and the channel; may be called twice."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None

    def _decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | FallbackReason:
        stream = self._keeper.stream if self._keeper is not None else None
        if stream is None:
            return FallbackReason.DISCONNECTED
        if not self._may_ask(stream):
            return FallbackReason.BREAKER_OPEN
        return self._outcome(stream, lambda: self._exchange(stream, step, snapshot))

    def _outcome(self, stream: SessionStream, exchange: Callable[[], Answer]) -> BatchAllocation | FallbackReason:
        """Returns the allocation that ``exchange`` brings, or what became of it; keeps breaker and stream informed."""
        try:
            answer = exchange()
            if isinstance(answer, SessionError):
                return self._refused(stream, answer)
            allocation = _checked(answer)
        except DeadlineMissed:
            return self._miss(FallbackReason.DEADLINE)
        except InvalidAnswer as error:
            _log.warning("useless answer from the sidecar at %s: %s", self._settings.target, error)
            return self._miss(FallbackReason.INVALID_ANSWER)
        except StreamEnded:
            self._breaker.failed(self._clock())
            return FallbackReason.RPC_ERROR
        self._breaker.succeeded()
        stream.next_step = allocation.step + 1
        if allocation.draining:
            stream.retire()
        return allocation

    def _may_ask(self, stream: SessionStream) -> bool:
        """Whether to spend a deadline on the sidecar.

        After an incident the trial waits until the sidecar has answered what it still owes: a stalled one is found out
        without a single further wait on the engine's thread.
        """
        if not self._breaker.allows(self._clock()):
            return False
        if self._breaker.state is not BreakerState.HALF_OPEN:
            return True
        owes = stream.owes_answers()
        if owes and stream.owing_seconds() > self._settings.stall_seconds:
            stream.retire()
        return not owes

    def _exchange(self, stream: SessionStream, step: Step, snapshot: Callable[[], Snapshot]) -> Answer:
        """Asks with the step if the sidecar is in step, else with a snapshot; both within one deadline."""
        own_seconds = step.iteration.answer_within_seconds
        wait_seconds = own_seconds if own_seconds > 0 else self._settings.deadline_seconds
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        message = self._message(stream, step, snapshot, wait_seconds)
        answer = stream.ask(message, wait_seconds)
        if isinstance(message, Snapshot) or not isinstance(answer, ResyncRequired):
            return answer
        left_seconds = None if deadline is None else deadline - time.monotonic()
        if left_seconds is not None and left_seconds <= 0:
            raise DeadlineMissed
        return stream.ask(self._snapshot(stream, snapshot, left_seconds), left_seconds)

    def _message(
        self, stream: SessionStream, step: Step, snapshot: Callable[[], Snapshot], wait_seconds: float | None
    ) -> Step | Snapshot:
        """Returns the step if the sidecar is in step, else a snapshot, with its epoch."""
        if stream.next_step != step.iteration.step:
            return self._snapshot(stream, snapshot, wait_seconds)
        iteration = step.iteration._replace(epoch=stream.epoch, answer_within_seconds=wait_seconds or 0.0)
        return step._replace(iteration=iteration)

    def _snapshot(
        self, stream: SessionStream, snapshot: Callable[[], Snapshot], wait_seconds: float | None
    ) -> Snapshot:
        self._epoch += 1
        stream.epoch = self._epoch
        self._counters.resyncs += 1
        message = snapshot()
        iteration = message.iteration._replace(epoch=self._epoch, answer_within_seconds=wait_seconds or 0.0)
        return message._replace(iteration=iteration)

    def _refused(self, stream: SessionStream, error: SessionError) -> FallbackReason:
        _log.warning("the sidecar at %s refused a message: %s", self._settings.target, error.message)
        if error.reason is ErrorReason.UNAVAILABLE:
            stream.retire()
        return self._miss(FallbackReason.SESSION_ERROR)

    def _broken(self, step: Step | None) -> FallbackReason:
        if not self._error_logged:
            self._error_logged = True
            of = f" for {step.iteration}" if step is not None else ""
            _log.exception("no decision%s; further errors of this kind are only counted", of)
        return self._miss(FallbackReason.CLIENT_ERROR)

    def _miss(self, reason: FallbackReason) -> FallbackReason:
        self._breaker.missed(self._clock())
        return reason


def _checked(answer: Answer) -> BatchAllocation:
    """Returns the allocation if an engine can use it; raises `InvalidAnswer`."""
    if not isinstance(answer, BatchAllocation):  # a second ResyncRequired, or one that comes too late for a snapshot
        raise InvalidAnswer(f"{type(answer).__name__} instead of an allocation")
    if len(answer.handles) != len(answer.tokens):
        raise InvalidAnswer(f"{len(answer.handles)} handles and {len(answer.tokens)} token counts")
    if len(answer.tokens) and answer.tokens.min() < 1:
        raise InvalidAnswer(f"{answer.tokens.min()} tokens for a request")
    if not math.isfinite(answer.predicted_seconds) or answer.predicted_seconds < 0:
        raise InvalidAnswer(f"predicted_seconds = {answer.predicted_seconds}")
    return answer
