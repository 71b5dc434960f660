"""`ControlService`: an operator looks at the sessions and switches their modes."""

from __future__ import annotations

from typing import cast

import grpc
from google.rpc import code_pb2

from sidecar.logs import logger
from sidecar.services.aborting import abort
from sidecar.services.scheduler import SchedulerService, engine_names
from sidecar.session.machine import Session
from sidecar.session.refusal import shortened
from slidingserve.contract.codec import encode_request
from slidingserve.contract.values import Mode
from slidingserve.control.v1 import control_pb2 as pb
from slidingserve.control.v1 import control_pb2_grpc
from slidingserve.scheduler.v1 import scheduler_pb2

_MODES = {int(mode): mode for mode in Mode if mode is not Mode.UNSPECIFIED}


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """See the contract.

    Args:
        scheduler: whose sessions these are; both run on one event loop.
    """

    def __init__(self, scheduler: SchedulerService) -> None:
        self._scheduler = scheduler

    async def SetMode(  # noqa: N802 - the name is the contract's
        self, request: pb.SetModeRequest, context: grpc.aio.ServicerContext[pb.SetModeRequest, pb.SetModeResponse]
    ) -> pb.SetModeResponse:
        """Switches one session or all."""
        mode = _MODES.get(request.mode)
        if mode is None:
            known = ", ".join(f"{member.value} ({member.name})" for member in _MODES.values())
            await abort(
                context, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "mode", str(request.mode), f"give one of {known}"
            )
        if request.session:
            session = self._named(request.session)
            if session is None:
                names = ", ".join(session.name for session, _ in self._scheduler.sessions()[:20])
                remedy = f"no such session is open; open are: {names}" if names else "no session is open"
                await abort(
                    context, code_pb2.NOT_FOUND, "UNKNOWN_SESSION", "session", shortened(request.session), remedy
                )
            switched = [(session, session.switch_mode(mode))]
        else:
            switched = self._scheduler.switch_all(mode)
            logger().info("mode of new sessions", mode=mode.name.lower(), by=context.peer())
        for session, old in switched:
            if old is not mode:
                _log_switch(session, old, context.peer())
        return pb.SetModeResponse(
            sessions=[
                pb.SwitchedSession(session=session.name, old_mode=_mode(old), new_mode=_mode(mode))
                for session, old in switched
            ]
        )

    async def ListSessions(  # noqa: N802 - the name is the contract's
        self,
        request: pb.ListSessionsRequest,
        context: grpc.aio.ServicerContext[pb.ListSessionsRequest, pb.ListSessionsResponse],
    ) -> pb.ListSessionsResponse:
        """Returns the open sessions."""
        return pb.ListSessionsResponse(sessions=[_status(*entry) for entry in self._scheduler.sessions()])

    def _named(self, name: str) -> Session | None:
        return next((session for session, _ in self._scheduler.sessions() if session.name == name), None)


def _status(session: Session, open_seconds: float) -> pb.SessionStatus:
    """Returns what is known of an open session. O(1) but for its paths."""
    assert session.opening is not None
    assert session.opened is not None
    queues = session.mirror.queues
    return pb.SessionStatus(
        session=session.name,
        engine=encode_request(session.opening).open_session.engine,
        policy=session.opened.policy,
        policy_version=session.opened.policy_version,
        model_version=session.opened.model_version,
        mode=_mode(session.mode),
        open_seconds=open_seconds,
        answered_steps=session.answered,
        last_step=session.last_step,
        live_requests=len(queues),
        running_requests=len(queues.running_slots),
        waiting_requests=len(queues.waiting_slots),
        guarded_rows=session.guarded,
        decision_paths=session.paths,
    )


def _mode(mode: Mode) -> scheduler_pb2.Mode.ValueType:
    return cast("scheduler_pb2.Mode.ValueType", mode.value)


def _log_switch(session: Session, old: Mode, peer: str) -> None:
    names = engine_names(session.opening.engine) if session.opening is not None else {}
    logger().info(
        "mode switched",
        session=session.name,
        **names,
        old=old.name.lower(),
        new=session.mode.name.lower(),
        step=session.last_step,
        by=peer,
    )
