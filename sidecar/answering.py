"""One wire message in, one answer out, whatever happens in between: what the live service and a replay share."""

from __future__ import annotations

import time

from sidecar.session.machine import Session
from slidingserve.contract.codec import decode_request
from slidingserve.contract.values import BatchAllocation, ErrorReason, Response, SessionError
from slidingserve.scheduler.v1 import scheduler_pb2 as pb


def answer_request(session: Session, request: pb.ScheduleRequest) -> Response:
    """Returns the session's answer; never raises.

    A mistake of ours becomes an error for this session alone: the engine goes on by its own policy and comes back with
    a snapshot. What went wrong is left in ``session.failure``.
    """
    started = time.perf_counter()
    try:
        message = decode_request(request)
        decoded = time.perf_counter() - started
        answer = session.handle(message)
    except Exception as error:
        session.failure = error
        session.lose()
        remedy = f"the sidecar failed on this message ({error!r}); report it, and send a Snapshot to go on"
        return SessionError(ErrorReason.INTERNAL, "", "", remedy, remedy)
    if isinstance(answer, BatchAllocation) and answer.phase_timings is not None:
        answer = answer._replace(phase_timings=answer.phase_timings._replace(decode_seconds=decoded))
    return answer
