"""How a unary call ends that cannot be answered: a google.rpc status with ErrorInfo."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "slidingserve.dev"


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], code: int, reason: str, field: str, value: str, remedy: str
) -> NoReturn:
    """Ends the call.

    Args:
        context: the call.
        code: one of google.rpc.Code.
        reason: kind of mistake, in capitals.
        field: path of the field in the request; empty: none is to blame.
        value: its value as text, not long (see `sidecar.session.refusal.shortened`).
        remedy: what to do.
    """
    detail = any_pb2.Any()
    detail.Pack(
        error_details_pb2.ErrorInfo(
            reason=reason, domain=ERROR_DOMAIN, metadata={"field": field, "value": value, "remedy": remedy}
        )
    )
    message = f"{field} = {value}: {remedy}" if field else remedy
    await context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code, message=message, details=[detail]))
    )
    raise AssertionError("abort raises")
