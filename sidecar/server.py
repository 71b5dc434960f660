"""The sidecar as a process: gRPC server, health, reflection, life cycle.

Health names: ``""`` and the scheduler service follow readiness; ``readiness`` goes NOT_SERVING as soon as the sidecar
drains, while ``liveness`` stays SERVING, so that nobody kills it in the middle of that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sidecar.config import SidecarSettings
from sidecar.logs import configure_logs, logger
from sidecar.services.scheduler import SchedulerService
from sidecar.session.machine import Session, SessionDefaults
from slidingserve import __version__
from slidingserve.contract.values import EngineLimits, IterationState, OpenSession, RequestColumns, Step
from slidingserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

SCHEDULER_SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
READINESS = ("", SCHEDULER_SERVICE, "readiness")


class ServeError(RuntimeError):
    """The sidecar cannot serve; the message names the address or folder and the remedy."""


class Sidecar:
    """One sidecar process: `start`, then `wait` until it was told to `drain`.

    Args:
        settings: checked settings.
    """

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self._stopped = asyncio.Event()
        self.service = SchedulerService(settings.session_defaults(), settings.max_sessions, settings.journal_dir)
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Listens, compiles the default policy, then reports ready.

        Raises:
            ServeError: an address is taken or not usable, or the journal folder is.
        """
        settings = self._settings
        if settings.journal_dir is not None:
            _prepare_folder(settings.journal_dir)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._set_readiness(health_pb2.HealthCheckResponse.NOT_SERVING)
        if settings.health_listen:
            await self._serve(settings.health_listen, schedule=False)
        warm_up(settings.session_defaults())
        await self._serve(settings.listen, schedule=True)
        await self._set_readiness(health_pb2.HealthCheckResponse.SERVING)
        logger().info("serving", listen=settings.listen, policy=settings.policy, version=__version__)

    async def wait(self) -> None:
        """Returns once the sidecar has drained."""
        await self._stopped.wait()

    async def drain(self) -> None:
        """Turns readiness off, lets every engine take its last answer, and stops."""
        logger().info("draining", sessions=self.service.open_sessions, seconds=self._settings.drain_seconds)
        await self._set_readiness(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.service.drain()
        main = self._servers[-1]
        await main.stop(self._settings.drain_seconds)
        for server in self._servers[:-1]:
            await server.stop(0)
        _remove_socket(self._settings.listen)
        logger().info("stopped")
        self._stopped.set()

    async def _set_readiness(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in READINESS:
            await self._health.set(name, status)

    async def _serve(self, address: str, *, schedule: bool) -> None:
        refuse_taken_socket(address)
        size = self._settings.max_message_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),
            ]
        )
        names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if schedule:
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.service, server)
            names.append(SCHEDULER_SERVICE)
        reflection.enable_server_reflection(names, server)
        try:
            server.add_insecure_port(address)
            await server.start()
        except (RuntimeError, OSError) as error:
            raise ServeError(f"cannot listen at {address} ({error}); give another address or free this one") from error
        self._servers.append(server)


def warm_up(defaults: SessionDefaults) -> None:
    """Compiles every kernel that the default policy needs (seconds when cold, milliseconds from the cache)."""
    import numpy as np

    session = Session("warm-up", defaults)
    session.handle(OpenSession(EngineLimits(2048, 256, 10000, 16)))
    arrived = RequestColumns(np.arange(2), np.zeros(2), np.array([16, 32]))
    session.handle(Step(IterationState(0, 0, 0.0, 10000), arrived=arrived))
    session.handle(Step(IterationState(0, 1, 0.1, 9000, 0.1), finished_handles=np.array([0])))


def run(settings: SidecarSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        ServeError: see `Sidecar.start`.
    """
    configure_logs(settings.log_format, settings.log_level)
    asyncio.run(_run(settings))


async def _run(settings: SidecarSettings) -> None:
    sidecar = Sidecar(settings)
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def drain() -> None:
        if not tasks:
            tasks.add(loop.create_task(sidecar.drain()))

    await sidecar.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    await sidecar.wait()


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(
            f"journal_dir {folder} cannot be made ({error.strerror}); give a folder to write to"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ServeError(f"journal_dir {folder} cannot be written to; give another folder or change its mode")


def refuse_taken_socket(address: str) -> None:
    """Looks whether somebody listens at a Unix socket: gRPC would silently take it over.

    Raises:
        ServeError: somebody does, or the folder of the socket is not there.
    """
    path = _socket_path(address)
    if path is None:
        return
    if not path.parent.is_dir():
        raise ServeError(f"cannot listen at {address}: there is no folder {path.parent}; make it or give another path")
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return  # left over from a process that is gone
    raise ServeError(f"another process listens at {address}; stop it or give another address")


def _remove_socket(address: str) -> None:
    path = _socket_path(address)
    if path is not None:
        path.unlink(missing_ok=True)


def _socket_path(address: str) -> Path | None:
    return Path(address.removeprefix("unix:").removeprefix("//")) if address.startswith("unix:") else None
