"""What the tests of the running sidecar share: waiting, raw streams, engines at work, a sidecar in this process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # the tests cause the troubles that gRPC would tell of

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_adapter.client import BreakerSettings, ClientSettings, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.source import DecisionSource
from evaluation.inprocess import InProcessSource
from evaluation.sidecar_process import SidecarProcess
from evaluation.simulate import open_client
from sidecar.services.scheduler import SchedulerService
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import OpenSession, Request, Response
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1 import scheduler_pb2_grpc
from tests.strategies import LIMITS, Feed, LinearTimer

SERVICE = "slidingserve.scheduler.v1.SchedulerService"
OPEN = OpenSession(LIMITS)
LONG_SECONDS = 60.0
"""Bounds every wait; reached only by a test that fails."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = LONG_SECONDS) -> None:
    """Returns as soon as the condition holds; fails with ``what`` otherwise."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.002)


def free_address() -> str:
    """A TCP address that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def health_status(channel: grpc.Channel, name: str) -> str:
    """The health of one name, or the status code of the failed call."""
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=name), timeout=LONG_SECONDS
        )
    except grpc.RpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def wait_ready(sidecar: SidecarProcess, address: str = "") -> None:
    """Returns when the sidecar says that it is ready; fails with its words if it has ended."""
    with channel_to(address or sidecar.address) as channel:

        def ready() -> bool:
            sidecar.check()
            return health_status(channel, "readiness") == "SERVING"

        wait_until(ready, "the sidecar is ready")


class RawStream:
    """A `Schedule` stream, message by message; bytes go out as they are."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        call = channel.stream_stream(
            f"/{SERVICE}/Schedule",
            request_serializer=bytes,
            response_deserializer=pb.ScheduleResponse.FromString,
        )
        self.call = call(iter(self._requests.get, None), timeout=LONG_SECONDS)

    def __enter__(self) -> RawStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._requests.put(None)
        self.call.cancel()

    def ask(self, message: Request | pb.ScheduleRequest | bytes) -> Response:
        """Sends a message and returns its answer."""
        self.send(message)
        answer = decode_response(next(self.call))
        assert answer is not None
        return answer

    def send(self, message: Request | pb.ScheduleRequest | bytes) -> None:
        if not isinstance(message, bytes | pb.ScheduleRequest):
            message = encode_request(message)
        self._requests.put(message if isinstance(message, bytes) else message.SerializeToString())

    def ends_with(self) -> str:
        """Waits for the end of the stream; returns the name of its status."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return str(self.call.code().name)


def engine_for(feed: Feed, source: DecisionSource | None) -> SimulatedEngine:
    return SimulatedEngine(feed, LIMITS, LinearTimer(), source)


def outcome_in_process(feed: Feed) -> Outcome:
    """The run without any wire."""
    source = InProcessSource()
    source.open(OPEN)
    return engine_for(feed, source).run()


@contextmanager
def client_of(
    sidecar: SidecarProcess, deadline_seconds: float | None = None, breaker: BreakerSettings | None = None
) -> Iterator[SchedulerClient]:
    """A client with an open session."""
    settings = ClientSettings(sidecar.address, deadline_seconds, breaker=breaker or BreakerSettings())
    client = SchedulerClient(settings)
    try:
        open_client(client, OPEN, sidecar)
        yield client
    finally:
        client.close()


ITERATION_SECONDS = 0.001
"""Least real time of an iteration in `run_until`, so that an engine does not finish before anything can happen."""


def run_until(
    engine: SimulatedEngine, condition: Callable[[], object], what: str, seconds: float = LONG_SECONDS
) -> None:
    """Lets the engine run until the condition holds; fails with ``what`` when it ends before or takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        started = time.monotonic()
        assert started < end, f"not within {seconds:g} s: {what}"
        assert engine.step(), f"the engine has finished before: {what}"
        time.sleep(max(0.0, ITERATION_SECONDS - (time.monotonic() - started)))


def assert_same_run(outcome: Outcome, expected: Outcome) -> None:
    """Every request got the same tokens at the same times."""
    assert outcome.finished.all()
    for name in ("first_token_seconds", "last_token_seconds", "output_tokens"):
        assert np.array_equal(getattr(outcome, name), getattr(expected, name)), name


class ServerThread:
    """A scheduler service in this process, on an event loop of its own; for services that a process does not have."""

    def __init__(self, address: str, make_service: Callable[[], SchedulerService]) -> None:
        self.address = address
        self._make_service = make_service
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._started.wait(LONG_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG_SECONDS)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = self._make_service()
        server = grpc.aio.server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.service, server)
        port = server.add_insecure_port(self.address)
        if self.address.endswith(":0"):
            self.address = self.address.removesuffix("0") + str(port)
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(0.1)
