"""Round trips of the real client to a real sidecar process, back to back, over a Unix socket and over TCP."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine_adapter.client import ClientSettings, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.timing import IterationTimer
from engine_adapter.source import DecisionSource
from evaluation.bench.loads import LOADS, Load, make_load
from evaluation.bench.states import BenchFailed, engine_limits
from evaluation.recording import RecordingSource
from evaluation.results import Tail, tail
from evaluation.sidecar_process import SidecarProcess
from evaluation.simulate import open_client
from evaluation.workloads import Workload
from slidingserve.contract.values import BatchAllocation, OpenSession, Snapshot, Step

Transport = Literal["unix", "tcp"]
TRANSPORTS: tuple[Transport, ...] = ("unix", "tcp")
WARM_UP = 300
_ANY_PORT = ("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class RoundTripCost:
    """Round trips of one load at one size over one transport; seconds.

    Attributes:
        load: see `loads`.
        transport: how the messages went.
        requests: seats of the engine.
        live: requests that it held on average, those that wait included.
        batch: requests that got tokens, on average.
        round_trips: how many were timed.
        round_trip: from the client's call to its return.
        core: of it in the sidecar's decision core, as its answers say.
        paths: how often the policy decided which way.
    """

    load: Load
    transport: Transport
    requests: int
    live: float
    batch: float
    round_trips: int
    round_trip: Tail
    core: Tail
    paths: dict[str, int]


class PathSource(RecordingSource):
    """Keeps the time of the core, the paths of the decisions, and how many requests they gave tokens."""

    def __init__(self, source: DecisionSource) -> None:
        super().__init__(source)
        self.paths: Counter[str] = Counter()
        self.entries = 0

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """See `DecisionSource.decide`."""
        allocation = super().decide(step, snapshot)
        if allocation is not None:
            self.paths[allocation.decision_path] += 1
            self.entries += len(allocation.handles)
        return allocation

    def forget(self) -> None:
        """Starts to count anew; times are kept."""
        self.paths.clear()
        self.entries = 0


def measure_round_trips(
    opening: OpenSession,
    timer: IterationTimer,
    sizes: tuple[int, ...],
    round_trips: int,
    progress: Callable[[str], None],
) -> Iterator[RoundTripCost]:
    """Yields the cost of each load and size, over each transport.

    ``opening`` names policy and profile; its limits are replaced.

    Raises:
        SidecarFailed, ClientError: the sidecar did not come up or refused the session.
        BenchFailed: it left iterations undecided, or there is no port, or no folder for a socket.
    """
    progress("round trips: starting two sidecars")
    with start_sidecar() as over_unix, start_sidecar(free_address()) as over_tcp:
        sidecars: dict[Transport, SidecarProcess] = {"unix": over_unix, "tcp": over_tcp}
        for load in LOADS:
            for requests in sizes:
                own = _opening_for(opening, requests)
                progress(f"round trips: {load}, {requests} requests")
                feed = make_load(load, requests, WARM_UP + round_trips, own, timer)
                for transport in TRANSPORTS:
                    progress(f"round trips: {load}, {requests} requests, {transport}")
                    yield measure_run(load, transport, feed, own, timer, sidecars[transport], round_trips)


def measure_run(
    load: Load,
    transport: Transport,
    feed: Workload,
    opening: OpenSession,
    timer: IterationTimer,
    sidecar: SidecarProcess,
    round_trips: int,
) -> RoundTripCost:
    """Times ``round_trips`` decisions of one engine, after WARM_UP others."""
    seconds: list[float] = []
    client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None), on_round_trip=seconds.append)
    try:
        open_client(client, opening, sidecar)
        source = PathSource(client)
        engine = SimulatedEngine(feed, opening.limits, timer, source)
        run_iterations(engine, WARM_UP)
        source.forget()
        before = len(seconds)
        live = run_iterations(engine, round_trips)
        undecided = client.counters.total_fallbacks
    finally:
        client.close()
    sidecar.check()
    if undecided:
        raise BenchFailed(f"policy {opening.policy!r} left {undecided} iterations undecided; see the warnings above")
    return RoundTripCost(
        load,
        transport,
        opening.limits.max_sequences,
        live,
        source.entries / round_trips,
        round_trips,
        tail(np.array(seconds[before:])),
        tail(source.decision_seconds()[before:]),
        dict(source.paths),
    )


def run_iterations(engine: SimulatedEngine, iterations: int) -> float:
    """Runs an engine on; returns how many requests it held on average.

    Raises:
        BenchFailed: its requests are used up.
    """
    live = 0
    target = engine.iterations + iterations
    while engine.iterations < target:
        if not engine.step():
            raise BenchFailed(f"the engine has run out of requests {target - engine.iterations} iterations too early")
        live += engine.live
    return live / iterations


def start_sidecar(address: str = "") -> SidecarProcess:
    """Starts a sidecar; an empty address stands for a Unix socket in a temporary folder.

    Raises:
        BenchFailed: there is no room for it.
    """
    try:
        return SidecarProcess(address=address)
    except OSError as error:
        raise BenchFailed(
            f"no sidecar can be started ({error}); set TMPDIR to a folder that can be written to, or use --only"
        ) from error


def free_address() -> str:
    """Returns an address on loopback where nobody listens.

    Raises:
        BenchFailed: there is none.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(_ANY_PORT)
            return f"127.0.0.1:{probe.getsockname()[1]}"
    except OSError as error:
        raise BenchFailed(f"no TCP port on 127.0.0.1 ({error.strerror}); allow one, or use --only") from error


def _opening_for(opening: OpenSession, requests: int) -> OpenSession:
    return OpenSession(
        engine_limits(requests),
        policy=opening.policy,
        policy_parameters=opening.policy_parameters,
        profile=opening.profile,
    )
