"""The sidecar as a process: gRPC server, health, reflection, life cycle.

Health names: ``""`` and the two services follow readiness; ``readiness`` goes NOT_SERVING as soon as the sidecar
drains, while ``liveness`` stays SERVING, so that nobody kills it in the middle of that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sidecar.addresses import AddressError, check_listenable, is_reachable_from_outside
from sidecar.config import SidecarSettings
from sidecar.logs import configure_logs, logger
from sidecar.services.control import ControlService
from sidecar.services.scheduler import SchedulerService
from sidecar.session.machine import SessionDefaults
from sidecar.warming import PolicyCannotDecide, warm_up
from slidingserve import __version__
from slidingserve.control.v1 import control_pb2, control_pb2_grpc
from slidingserve.jit import kernels_are_kept
from slidingserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

SCHEDULER_SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
READINESS = ("", SCHEDULER_SERVICE, CONTROL_SERVICE, "readiness")

# How long calls may take that are still open when the servers stop.
LAST_CALLS_SECONDS = 0.2


class ServeError(RuntimeError):
    """The sidecar cannot serve; the message names the address, folder or policy and the remedy."""


class Sidecar:
    """One sidecar: `start` it, and `drain` it once, in the end.

    Args:
        settings: checked settings.

    Attributes:
        service: the scheduler's service.
        address: where it listens; a port given as 0 has become a real one.
    """

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self.address = settings.listen
        self.service = SchedulerService(settings.session_defaults(), settings.max_sessions, settings.journal_dir)
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Listens, compiles the default policy, then reports ready.

        Raises:
            ServeError: an address is taken, or the journal folder cannot be used, or the default policy cannot decide.
        """
        settings = self._settings
        if settings.journal_dir is not None:
            _prepare_folder(settings.journal_dir)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._set_readiness(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            _check_address(settings.listen)  # before the seconds that compiling may take
            if settings.health_listen:
                await self._serve(settings.health_listen, schedule=False)
            # In a thread, so that liveness is answered meanwhile.
            await asyncio.to_thread(_warm_up_default, settings.session_defaults())
            self.address = await self._serve(settings.listen, schedule=True)
        except ServeError:
            await self._stop(0.0)
            raise
        await self._set_readiness(health_pb2.HealthCheckResponse.SERVING)
        if not kernels_are_kept():
            logger().warning(
                "compiled kernels cannot be kept: each start takes seconds longer; point NUMBA_CACHE_DIR at a folder "
                "that can be written to"
            )
        if is_reachable_from_outside(self.address):
            logger().warning(
                "anybody who reaches this address may ask, there is no TLS yet; prefer a Unix socket or loopback",
                listen=self.address,
            )
        mode = {"mode": settings.mode} if settings.mode else {}
        logger().info("serving", listen=self.address, policy=settings.policy, version=__version__, **mode)

    async def drain(self) -> None:
        """Turns readiness off, lets every engine take its last answer, and stops.

        The servers stop last: until then liveness is answered, and engines that come are told to go elsewhere.
        """
        seconds = self._settings.drain_seconds
        logger().info("draining", sessions=self.service.open_sessions, seconds=seconds)
        await self._set_readiness(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.service.drain()
        last_calls = min(LAST_CALLS_SECONDS, seconds)
        await self.service.wait_until_idle(seconds - last_calls)
        cut = self.service.open_sessions
        await self._stop(last_calls)
        logger().info("stopped", sessions_cut=cut)

    async def _stop(self, grace_seconds: float) -> None:
        await asyncio.gather(*(server.stop(grace_seconds) for server in self._servers))

    async def _set_readiness(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in READINESS:
            await self._health.set(name, status)

    async def _serve(self, address: str, *, schedule: bool) -> str:
        """Listens at an address; returns it with its real port."""
        _check_address(address)
        size = self._settings.max_message_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),
                # Clients ping each 10 s; gRPC's own limit of 5 minutes would cut them off.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
                # The session of an engine whose machine vanished ends within a minute, not within gRPC's 2 hours.
                ("grpc.keepalive_time_ms", 40_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ]
        )
        names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if schedule:
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.service, server)
            control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(self.service), server)
            names += [SCHEDULER_SERVICE, CONTROL_SERVICE]
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(address)
            await server.start()
        except (RuntimeError, OSError) as error:
            await server.stop(None)
            raise ServeError(f"cannot listen at {address} ({error}); give another address or free this one") from error
        self._servers.append(server)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _warm_up_default(defaults: SessionDefaults) -> None:
    try:
        warm_up(defaults)
    except PolicyCannotDecide as error:
        raise ServeError(str(error)) from error


def run(settings: SidecarSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        ServeError: see `Sidecar.start`.
    """
    configure_logs(settings.log_format, settings.log_level)
    asyncio.run(_run(settings))


async def _run(settings: SidecarSettings) -> None:
    told_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    sidecar = Sidecar(settings)
    await sidecar.start()
    await told_to_end.wait()
    await sidecar.drain()


def _check_address(address: str) -> None:
    try:
        check_listenable(address)
    except AddressError as error:
        raise ServeError(str(error)) from error


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(
            f"journal_dir {folder} cannot be made ({error.strerror}); give a folder to write to"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ServeError(f"journal_dir {folder} cannot be written to; give another folder or change its mode")
