"""One wire message in, one answer out, whatever happens in between: what the live service and a replay share."""

from __future__ import annotations

import time

from sidecar.session.machine import Session
from slidingserve.contract.codec import decode_request, encode_response
from slidingserve.contract.values import BatchAllocation, ErrorReason, Response, SessionError
from slidingserve.scheduler.v1 import scheduler_pb2 as pb


def answer_request(session: Session, request: pb.ScheduleRequest) -> tuple[Response, pb.ScheduleResponse]:
    """Returns the session's answer, as a value and as the message that leaves; never raises.

    A mistake of ours, or of a policy, becomes an error for this session alone: the engine goes on by its own policy and
    comes back with a snapshot. What went wrong is left in ``session.failure``.
    """
    started = time.perf_counter()
    try:
        message = decode_request(request)
        decoded = time.perf_counter() - started
        answer = session.handle(message)
        response = encode_response(answer)
        if isinstance(answer, BatchAllocation) and answer.phase_timings is not None:
            response.batch_allocation.phase_timings.decode_seconds = decoded  # the session cannot know
        return answer, response
    except Exception as error:
        session.failure = error
        session.lose()
        remedy = f"the sidecar failed on this message ({error!r}); report it, and send a Snapshot to go on"
        answer = SessionError(ErrorReason.INTERNAL, "", "", remedy, remedy)
        return answer, encode_response(answer)
