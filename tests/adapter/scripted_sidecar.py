"""A small real gRPC server that plays a sidecar as a test tells it to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import numpy as np

from slidingserve.contract.codec import decode_request, encode_response
from slidingserve.contract.values import (
    BatchAllocation,
    EngineLimits,
    IterationState,
    Mode,
    OpenSession,
    Response,
    SessionOpened,
    SloDefaults,
    Snapshot,
    Step,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

LIMITS = EngineLimits(64, 8, 100, 16)
OPENED = SessionOpened("s-1", 1, "0.1.0", "vllm", "1", "", LIMITS, SloDefaults(), Mode.ACTIVE)


class HangUp(Exception):
    """Ends the stream with an error."""


Reply: TypeAlias = Response | pb.ScheduleResponse | list[Response]
Script: TypeAlias = Callable[[IterationState], Reply]


def allocation(iteration: IterationState, **changes: Any) -> BatchAllocation:
    """A right answer, or one that is wrong in a chosen way."""
    right = BatchAllocation(
        iteration.epoch, iteration.step, np.array([1, 2], np.int64), np.array([16, 1], np.int64), predicted_seconds=0.01
    )
    return right._replace(**changes)


class ScriptedSidecar(SchedulerServiceServicer):
    """Answers each message by the next function of ``script``, and rightly when the script is over.

    Attributes:
        script: what to answer to the next Steps and Snapshots.
        opening: what to answer to OpenSession.
        received: all messages of all streams, in order.
        gate: what `held` waits for; opened at the end of the test at the latest.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.script: queue.SimpleQueue[Script] = queue.SimpleQueue()
        self.opening: Response = OPENED
        self.received: list[OpenSession | Snapshot | Step] = []
        self.gate = threading.Event()
        self._server: grpc.Server | None = None

    def held(self, iteration: IterationState) -> BatchAllocation:
        """A right answer that waits for the gate."""
        assert self.gate.wait(20), "the test never opened the gate"
        return allocation(iteration)

    def will(self, *scripts: Script) -> None:
        for script in scripts:
            self.script.put(script)

    def start(self, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listens; returns the port, if the address has one."""
        self._server = grpc.server(ThreadPoolExecutor(8))
        add_SchedulerServiceServicer_to_server(self, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(self.address)
        else:
            port = self._server.add_secure_port(self.address, credentials)
        self._server.start()
        return port

    def stop(self) -> None:
        """Dies: streams break at once."""
        self.gate.set()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def Schedule(  # noqa: N802
        self, request_iterator: Iterator[pb.ScheduleRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ScheduleResponse]:
        for message in request_iterator:
            value = decode_request(message)
            assert value is not None
            self.received.append(value)
            try:
                reply = self._reply(value)
            except HangUp:
                context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")
            for answer in reply if isinstance(reply, list) else [reply]:
                yield answer if isinstance(answer, pb.ScheduleResponse) else encode_response(answer)

    def Decide(self, request: pb.DecideRequest, context: grpc.ServicerContext) -> pb.DecideResponse:  # noqa: N802
        raise NotImplementedError

    def _reply(self, value: OpenSession | Snapshot | Step) -> Reply:
        if isinstance(value, OpenSession):
            return self.opening
        try:
            script = self.script.get_nowait()
        except queue.Empty:
            script = allocation
        return script(value.iteration)
