"""`SchedulerService`: one session for each stream, and single decisions.

The stream is answered message by message on the server's one event loop: a decision takes tens of microseconds, so
engines do not get in each other's way. Whatever can wait (journal, log) is done after the answer has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.rpc import code_pb2

from sidecar.answering import answer_request
from sidecar.journal import JournalWriter
from sidecar.logs import logger
from sidecar.services.aborting import abort
from sidecar.session.machine import Session, SessionDefaults, State, one_decision
from sidecar.session.refusal import Refusal, shortened
from sidecar.warming import PolicyCannotDecide, warm_up
from slidingserve.contract.codec import decode_decide_request, encode_decide_response, encode_response
from slidingserve.contract.values import (
    BatchAllocation,
    EngineInfo,
    ErrorReason,
    Mode,
    Response,
    ResyncRequired,
    SessionError,
    SessionOpened,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1 import scheduler_pb2_grpc

FIRST_MESSAGE_SECONDS = 30.0
MOST_WARM_POLICIES = 256
_NEW = State.NEW


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the contract.

    Args:
        defaults: what sessions get where they leave it open.
        max_sessions: most streams at once.
        journal_dir: folder for journals; None: nothing is recorded.
    """

    def __init__(self, defaults: SessionDefaults, max_sessions: int, journal_dir: Path | None = None) -> None:
        self._defaults, self._max_sessions, self._journal_dir = defaults, max_sessions, journal_dir
        self._sessions: set[Session] = set()
        self._opened_seconds: dict[Session, float] = {}  # in the order of their opening
        self._numbers = itertools.count(1)
        self._draining = False
        self._warm: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_sessions(self) -> int:
        """Streams that are open now."""
        return len(self._sessions)

    def sessions(self) -> list[tuple[Session, float]]:
        """Returns each session whose engine has opened it and the seconds since then, the oldest first."""
        now = time.monotonic()
        return [(session, now - opened) for session, opened in self._opened_seconds.items()]

    def switch_all(self, mode: Mode) -> list[tuple[Session, Mode]]:
        """Switches every open session, and makes those that will open do so in this mode.

        An engine that connects again is to stay what its operator has made it. Returns each open session with the mode
        that it had.
        """
        self._defaults = replace(self._defaults, mode=mode)
        for session in self._sessions - self._opened_seconds.keys():
            session.switch_mode(mode)
        return [(session, session.switch_mode(mode)) for session in self._opened_seconds]

    def drain(self) -> None:
        """Tells every engine with its next answer that this sidecar is going away, and takes no new sessions."""
        self._draining = True
        for session in self._sessions:
            session.draining = True

    async def wait_until_idle(self, seconds: float) -> None:
        """Returns once no stream is open, after ``seconds`` at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def Schedule(  # noqa: N802 - the name is the contract's
        self,
        request_iterator: AsyncIterator[pb.ScheduleRequest],
        context: grpc.aio.ServicerContext[pb.ScheduleRequest, pb.ScheduleResponse],
    ) -> AsyncIterator[pb.ScheduleResponse]:
        """Answers one engine until it leaves."""
        if self._draining or len(self._sessions) >= self._max_sessions:
            yield encode_response(self._no_room())
            return
        session = Session(f"{next(self._numbers)}", self._defaults)
        log = logger().bind(session=session.name, peer=context.peer())
        journal = self._journal(session.name)
        self._sessions.add(session)
        self._idle.clear()
        answer: Response | None = None
        try:
            requests = aiter(request_iterator)
            request = await _first_in_time(requests)
            while request is not None:
                if session.state is _NEW:
                    opening = request.open_session
                    await self._warm_up(opening.policy, opening.policy_parameters, opening.profile)
                answer, message = answer_request(session, request)
                yield message
                if journal is not None and not _recorded(journal, request, message, log):
                    journal = None
                if isinstance(answer, SessionOpened):
                    self._opened_seconds[session] = time.monotonic()
                    log = log.bind(**engine_names(request.open_session.engine))
                if not isinstance(answer, BatchAllocation):
                    _log_answer(log, session, answer)
                elif answer.draining:
                    log.info("session drained", step=answer.step)
                    return
                request = await anext(requests, None)
        finally:
            self._sessions.discard(session)
            self._opened_seconds.pop(session, None)
            if not self._sessions:
                self._idle.set()
            if journal is not None:
                journal.close()
            step = answer.step if isinstance(answer, BatchAllocation) else None
            log.info("session closed", last_step=step, guarded=session.guarded, **_prediction_errors(session))

    async def Decide(  # noqa: N802 - the name is the contract's
        self, request: pb.DecideRequest, context: grpc.aio.ServicerContext[pb.DecideRequest, pb.DecideResponse]
    ) -> pb.DecideResponse:
        """Answers one full state."""
        try:
            opening, snapshot = decode_decide_request(request)
            if snapshot is None:
                raise Refusal(ErrorReason.INVALID_FIELD, "snapshot", "nothing", "send the engine's state")
            await self._warm_up(opening.policy, opening.policy_parameters, opening.profile)
            return encode_decide_response(one_decision(snapshot, opening, self._defaults))
        except Refusal as refusal:
            if refusal.reason is ErrorReason.INTERNAL:
                logger().error("no decision", error=str(refusal), exc_info=refusal.__cause__)
            await _abort(context, refusal)
        except Exception as error:
            logger().exception("no decision")
            await _abort(context, Refusal(ErrorReason.INTERNAL, "", "", f"the sidecar failed ({error!r}); report it"))

    async def _warm_up(self, policy: str, parameters: Mapping[str, str], profile: str) -> None:
        """Compiles what a policy with these parameters needs, in a thread: other engines do not wait for it.

        The default policy is warm; of the others the latest are remembered, for nobody is to fill the memory.
        """
        wanted = (policy, frozenset(parameters.items()))
        if not (policy or parameters) or wanted in self._warm:
            return
        defaults = self._defaults
        if policy:
            defaults = replace(defaults, policy=policy, policy_parameters=dict(parameters))
        else:
            defaults = replace(defaults, policy_parameters={**defaults.policy_parameters, **parameters})
        with contextlib.suppress(PolicyCannotDecide):  # the session will be refused, with the reason
            await asyncio.to_thread(warm_up, replace(defaults, profile=profile or defaults.profile))
            if len(self._warm) >= MOST_WARM_POLICIES:
                self._warm.clear()
            self._warm.add(wanted)

    def _no_room(self) -> SessionError:
        if self._draining:
            remedy = "this sidecar is going away; connect again, to the next one"
        else:
            remedy = f"{self._max_sessions} sessions are open; raise max_sessions or start another sidecar"
        return Refusal(ErrorReason.UNAVAILABLE, "", "", remedy).as_error()

    def _journal(self, session: str) -> JournalWriter | None:
        if self._journal_dir is None:
            return None
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self._journal_dir / f"{stamp}-{os.getpid()}-{session}.journal"
        try:
            return JournalWriter(open(path, "xb", opener=_for_owner_only), session, self._defaults)
        except OSError as error:
            logger().warning("the session is not recorded", file=str(path), error=str(error))
            return None


async def _first_in_time(requests: AsyncIterator[pb.ScheduleRequest]) -> pb.ScheduleRequest | None:
    """Returns the first request; None if it does not come in time, so that silent peers keep nobody out."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            return await anext(requests, None)
    return None


def _recorded(journal: JournalWriter, request: pb.ScheduleRequest, response: pb.ScheduleResponse, log: Any) -> bool:
    """Writes an exchange; a journal that cannot go on is closed, and the session goes on without."""
    try:
        journal.write(request, response)
    except OSError as error:
        log.warning("the journal ends here", error=str(error))
        journal.close()
        return False
    return True


def _for_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def engine_names(engine: pb.EngineInfo | EngineInfo) -> dict[str, str]:
    """Returns what tells one engine's log lines from another's: behind a Unix socket all peers look alike."""
    names = {"engine": engine.name, "instance": engine.instance, "model": engine.model}
    return {key: shortened(name) for key, name in names.items() if name}


def _prediction_errors(session: Session) -> dict[str, float | int]:
    """Returns how far the session's policy was off, if it predicts."""
    errors = session.prediction_errors
    summary = errors.summary() if errors is not None else None
    if summary is None or summary.iterations == 0:
        return {}
    return {
        "predictions_measured": summary.iterations,
        "prediction_error_percent": round(100 * summary.mape, 2),
        "prediction_bias_ms": round(1e3 * summary.bias_seconds, 3),
    }


def _log_answer(log: Any, session: Session, answer: Response) -> None:
    """Logs what is not an everyday answer; structlog's loggers have no common type."""
    if isinstance(answer, SessionOpened):
        log.info(
            "session opened",
            policy=answer.policy_version,
            predictor=answer.model_version or None,
            mode=answer.mode.name.lower(),
        )
    elif isinstance(answer, SessionError):
        failure = session.failure if answer.reason is ErrorReason.INTERNAL else None
        log.warning("message refused", reason=answer.reason.name.lower(), error=answer.message, exc_info=failure)
    elif isinstance(answer, ResyncRequired):
        log.info("resync required", got=answer.step, expected=answer.expected_step, reason=answer.reason.name.lower())


async def _abort(context: grpc.aio.ServicerContext[pb.DecideRequest, pb.DecideResponse], refusal: Refusal) -> NoReturn:
    """Ends a unary call. The core names a session's fields; those of OpenSession are DecideRequest's own."""
    code = code_pb2.INTERNAL if refusal.reason is ErrorReason.INTERNAL else code_pb2.INVALID_ARGUMENT
    field = refusal.field.removeprefix("open_session.")
    await abort(context, code, refusal.reason.name, field, refusal.value, refusal.remedy)
