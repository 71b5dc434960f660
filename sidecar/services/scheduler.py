"""`SchedulerService`: one session for each stream, and single decisions.

The stream is answered message by message on the server's one event loop: a decision takes tens of microseconds, so
engines do not get in each other's way. Whatever can wait (journal, log) is done after the answer has left.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from sidecar.journal import JournalWriter
from sidecar.logs import logger
from sidecar.session.machine import Session, SessionDefaults, State, one_decision
from sidecar.session.refusal import Refusal
from slidingserve.contract.codec import decode_decide_request, decode_request, encode_decide_response, encode_response
from slidingserve.contract.values import BatchAllocation, ErrorReason, Response, SessionError, SessionOpened
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1 import scheduler_pb2_grpc

ERROR_DOMAIN = "slidingserve.dev"


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
        self._numbers = itertools.count(1)
        self._draining = False

    @property
    def open_sessions(self) -> int:
        """Streams that are open now."""
        return len(self._sessions)

    def drain(self) -> None:
        """Tells every engine with its next answer that this sidecar is going away, and takes no new sessions."""
        self._draining = True
        for session in self._sessions:
            session.draining = True

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
        answer: Response | None = None
        try:
            async for request in request_iterator:
                answer = self._answer(session, request)
                yield encode_response(answer)
                if journal is not None:
                    journal.write(request, answer)
                if not isinstance(answer, BatchAllocation):
                    _log_answer(log, session, answer)
                elif answer.draining:
                    log.info("session drained", step=answer.step)
                    return
        finally:
            self._sessions.discard(session)
            if journal is not None:
                journal.close()
            step = answer.step if isinstance(answer, BatchAllocation) else None
            log.info("session closed", last_step=step, guarded=session.guarded)

    async def Decide(  # noqa: N802 - the name is the contract's
        self, request: pb.DecideRequest, context: grpc.aio.ServicerContext[pb.DecideRequest, pb.DecideResponse]
    ) -> pb.DecideResponse:
        """Answers one full state."""
        opening, snapshot = decode_decide_request(request)
        try:
            if snapshot is None:
                raise Refusal(ErrorReason.INVALID_FIELD, "snapshot", "nothing", "send the engine's state")
            return encode_decide_response(one_decision(snapshot, opening, self._defaults))
        except Refusal as refusal:
            await _abort(context, refusal)

    def _answer(self, session: Session, request: pb.ScheduleRequest) -> Response:
        """Returns the session's answer; a mistake of ours becomes an error for this session alone."""
        started = time.perf_counter()
        try:
            message = decode_request(request)
            decoded = time.perf_counter() - started
            answer = session.handle(message)
        except Exception as error:
            logger().exception("the session failed", session=session.name)
            session.lose()
            remedy = f"the sidecar failed on this message ({error!r}); report it, and send a Snapshot to go on"
            return SessionError(ErrorReason.INTERNAL, "", "", remedy, remedy)
        if isinstance(answer, BatchAllocation) and answer.phase_timings is not None:
            answer = answer._replace(phase_timings=answer.phase_timings._replace(decode_seconds=decoded))
        return answer

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
        path = self._journal_dir / f"{stamp}-{session}.journal"
        try:
            return JournalWriter(path.open("xb"), session, self._defaults)
        except OSError as error:
            logger().warning("the session is not recorded", file=str(path), error=str(error))
            return None


def _log_answer(log: object, session: Session, answer: Response) -> None:
    """Logs what is not an everyday answer."""
    record = log  # structlog's loggers have no common type
    if isinstance(answer, SessionOpened):
        record.info(  # type: ignore[attr-defined]
            "session opened", policy=answer.policy_version, mode=answer.mode.name.lower()
        )
    elif isinstance(answer, SessionError):
        failure = session.failure
        record.warning(  # type: ignore[attr-defined]
            "message refused",
            reason=answer.reason.name.lower(),
            error=answer.message,
            exc_info=failure if answer.reason is ErrorReason.INTERNAL else None,
        )
    elif session.state is State.LOST:
        record.info("resync required", expected=getattr(answer, "expected_step", None))  # type: ignore[attr-defined]


async def _abort(context: grpc.aio.ServicerContext[pb.DecideRequest, pb.DecideResponse], refusal: Refusal) -> NoReturn:
    """Ends a unary call with google.rpc.ErrorInfo."""
    internal = refusal.reason is ErrorReason.INTERNAL
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=refusal.reason.name,
            domain=ERROR_DOMAIN,
            metadata={"field": refusal.field, "value": refusal.value, "remedy": refusal.remedy},
        )
    )
    status = status_pb2.Status(
        code=code_pb2.INTERNAL if internal else code_pb2.INVALID_ARGUMENT, message=str(refusal), details=[detail]
    )
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort raises")
