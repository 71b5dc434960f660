"""One simulation: a workload, a hardware profile and a policy, in one process or over a sidecar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from engine_adapter.client import ClientSettings, SchedulerClient, SidecarUnavailable
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import HardwareProfile, load_profile
from engine_adapter.simulated.timing import ProfileTimer
from engine_adapter.source import DecisionSource
from evaluation.inprocess import NO_SLOS, InProcessSource
from evaluation.recording import RecordingSource
from evaluation.results import RunResult, tail
from evaluation.scores import score
from evaluation.screen import slo_summary
from evaluation.sidecar_process import SidecarProcess
from evaluation.traces import read_trace, trace_workload
from evaluation.workloads import Workload, WorkloadSpec, parse_workload, solo_ttft
from evaluation.workloads import make_workload as make_requests
from sidecar.policies import registry
from sidecar.policies.base import PolicyContext
from sidecar.session.machine import SessionDefaults
from sidecar.warming import warm_up
from slidingserve.contract.values import EngineInfo, EngineLimits, Floats, OpenSession

Transport = Literal["grpc", "inprocess"]
CONNECT_SECONDS = 60.0
DEFAULT_REQUESTS = 300
_NO_DEFAULT_SLOS = ("--default-ttft-seconds", "0", "--default-tbt-seconds", "0")
DEFAULT_POLICIES = ("vllm", "slidingserve")


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """What to simulate; see `slidingserve simulate --help`. Rates in requests/s, times in seconds.

    Floor, TTFT and TBT hold where the text of the workload does not say them; ``rate`` None is the usual one of the
    workload or the recorded one of the trace, ``requests`` None all of a trace. ``data`` is the folder of traces.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    workload: str = "mixed-v1"
    trace: Path | None = None
    rate: float | None = None
    requests: int | None = DEFAULT_REQUESTS
    profile: str = "rtx3090-tp2"
    seed: int = 0
    floor_seconds: float = 0.2
    ttft_seconds: float | None = None
    tbt_seconds: float | None = None
    transport: Transport = "grpc"
    data: Path | None = None

    @property
    def spec(self) -> WorkloadSpec:
        """The workload with the SLOs of the request; raises WorkloadError."""
        return parse_workload(
            self.workload,
            floor_ms=1e3 * self.floor_seconds,
            ttft_ms=None if self.ttft_seconds is None else 1e3 * self.ttft_seconds,
            tbt_ms=None if self.tbt_seconds is None else 1e3 * self.tbt_seconds,
        )

    @property
    def applied_floor_seconds(self) -> float:
        """The floor of the TTFT SLOs, 0 where they have none."""
        return 0.0 if self.trace is not None else self.spec.floor_ms / 1e3


class NoDecision(RuntimeError):
    """The sidecar left iterations to the engine's own policy, whose results would be shown as those of another."""


Progress = Callable[[str, int, int], None]
"""Told (policy, finished requests, all requests) now and then."""


def simulate(request: SimulationRequest, progress: Progress = lambda policy, done, total: None) -> list[RunResult]:
    """Runs every policy on the same requests; returns their results in the order of the policies.

    Raises:
        ProfileError, WorkloadError, TraceError: what they say.
        UnknownPolicyError, PolicyParameterError, ValueError: a policy or its parameters.
        SidecarFailed, ClientError, NoDecision: the sidecar process did not serve, or not to the end.
        DecisionRefused, PolicyCannotDecide: as NoDecision, in one process.
    """
    profile = load_profile(request.profile)
    limits = engine_limits(profile)
    for text in request.policies:
        name, parameters = registry.parse_spec(text)
        registry.build(name, parameters, PolicyContext(limits, profile.name))
    with ExitStack() as stack:
        sidecars = _sidecars(request, profile, stack)
        warm_up_engine(profile)
        workload = make_workload(request, profile)
        return [
            _run(request, text, workload, profile, sidecar, progress)
            for text, sidecar in zip(request.policies, sidecars, strict=True)
        ]


def _sidecars(
    request: SimulationRequest, profile: HardwareProfile, stack: ExitStack
) -> Iterator[SidecarProcess | None]:
    """Returns a sidecar for each policy, None where no message leaves the process; the stack ends them.

    The first two start at once and each of the others when the one before it is taken into use, so that a policy is
    compiled while other work goes on.
    """
    if request.transport != "grpc":
        return repeat(None, len(request.policies))

    def start(text: str) -> SidecarProcess:
        ours = registry.parse_spec(text)[0] in registry.BUILT_IN  # another's may fail, and that is for its run to tell
        own = ("--policy", text, "--profile", profile.name) if ours else ()
        return stack.enter_context(SidecarProcess((*own, *_NO_DEFAULT_SLOS)))

    started = deque(start(text) for text in request.policies[:2])

    def in_turn() -> Iterator[SidecarProcess]:
        for following in (*request.policies[2:], None, None)[: len(request.policies)]:
            sidecar = started.popleft()
            yield sidecar
            sidecar.close()
            if following is not None:
                started.append(start(following))

    return in_turn()


def engine_limits(profile: HardwareProfile) -> EngineLimits:
    """Returns the limits of an engine on this hardware."""
    return EngineLimits(
        profile.max_tokens_per_iteration, profile.max_sequences, profile.kv_blocks, profile.kv_block_tokens
    )


def warm_up_engine(profile: HardwareProfile) -> None:
    """Compiles the simulated engine's kernels, so that no run's time holds it."""
    one, seconds, tokens = np.ones(1), np.zeros(1), np.ones(1, np.int64)
    workload = Workload("warm-up", seconds, tokens, 2 * tokens, one, one, seconds, 0 * tokens, (), 0.0)
    SimulatedEngine(workload, engine_limits(profile), ProfileTimer(profile)).run()


def make_workload(request: SimulationRequest, profile: HardwareProfile) -> Workload:
    """Returns the requests: of a trace, or of a workload under the name that it was asked for."""
    if request.trace is not None:
        return trace_workload(
            read_trace(request.trace),
            name=request.trace.name,
            requests=request.requests,
            rate=request.rate,
            seed=request.seed,
            ttft_seconds=request.ttft_seconds,
            tbt_seconds=request.tbt_seconds,
        )
    solo = partial(solo_ttft, ProfileTimer(profile))
    spec = request.spec
    workload = make_requests(
        spec,
        rate=request.rate,
        requests=DEFAULT_REQUESTS if request.requests is None and not spec.is_recorded else request.requests,
        seed=request.seed,
        solo_ttft_seconds=solo,
        data=request.data,
    )
    return replace(workload, name=str(parse_workload(request.workload)))


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open source, whether it still decides (`check` raises), and where its times are found after the run."""

    source: DecisionSource
    check: Callable[[], None]
    decision_seconds: Callable[[], Floats]
    prediction_error: Callable[[], float]
    round_trip_seconds: Callable[[], Floats | None]


@contextmanager
def _opened(opening: OpenSession, sidecar: SidecarProcess | None) -> Iterator[_Opened]:
    if sidecar is None:
        warm_up(SessionDefaults(opening.policy, dict(opening.policy_parameters), profile=opening.profile))
        core = RecordingSource(InProcessSource(SessionDefaults(slos=NO_SLOS)))
        core.open(opening)
        yield _Opened(core, lambda: None, core.decision_seconds, core.mean_relative_error, lambda: None)
        return
    client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None))
    recorder = RecordingSource(client)

    def check() -> None:
        sidecar.check()
        lost = {reason.value: count for reason, count in client.counters.fallbacks.items() if count}
        if lost:
            said = ", ".join(f"{count} x {reason}" for reason, count in lost.items())
            raise NoDecision(f"policy {opening.policy!r} left iterations undecided ({said}); see the warnings above")

    try:
        open_client(client, opening, sidecar)
        yield _Opened(
            recorder,
            check,
            recorder.decision_seconds,
            recorder.mean_relative_error,
            lambda: client.counters.round_trips.seconds(),
        )
    finally:
        client.close()


def open_client(client: SchedulerClient, opening: OpenSession, sidecar: SidecarProcess) -> None:
    """Opens the session as soon as the sidecar's process serves; does not wait for one that has ended."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        sidecar.check()
        try:
            client.open(opening, wait_seconds=1.0)
            return
        except SidecarUnavailable:
            if time.monotonic() > deadline:
                raise


def _run(
    request: SimulationRequest,
    policy: str,
    workload: Workload,
    profile: HardwareProfile,
    sidecar: SidecarProcess | None,
    progress: Progress,
) -> RunResult:
    name, parameters = registry.parse_spec(policy)
    limits = engine_limits(profile)
    engine_info = EngineInfo(
        "simulated", instance=profile.name, model=profile.model, tensor_parallel=profile.tensor_parallel
    )
    opening = OpenSession(limits, engine=engine_info, policy=name, policy_parameters=parameters, profile=profile.name)

    with _opened(opening, sidecar) as opened:

        def watched(done: int, total: int) -> None:
            opened.check()
            progress(policy, done, total)

        engine = SimulatedEngine(workload, limits, ProfileTimer(profile), opened.source)
        started = time.perf_counter()
        outcome = drive(engine, len(workload), watched)
        wall = time.perf_counter() - started
    round_trips = opened.round_trip_seconds()
    return RunResult(
        policy=name,
        policy_parameters=policy.partition(":")[2],
        workload=workload.name,
        profile=profile.name,
        transport=request.transport,
        rate=workload.rate,
        seed=request.seed,
        requests=len(workload),
        floor_seconds=request.applied_floor_seconds,
        slos=slo_summary(workload),
        scores=score(workload, outcome),
        decision_seconds=tail(opened.decision_seconds()),
        round_trip_seconds=None if round_trips is None else tail(round_trips),
        fallbacks=outcome.fallbacks,
        allocation_digest=outcome.allocation_digest,
        iterations=outcome.iterations,
        mean_batch=outcome.scheduled_requests / max(1, outcome.iterations),
        wall_seconds=wall,
        prediction_error=opened.prediction_error(),
    )


def drive(engine: SimulatedEngine, total: int, progress: Callable[[int, int], None]) -> Outcome:
    """Runs the engine to its end, telling progress every 200 iterations."""
    while engine.step():
        if engine.iterations % 200 == 0:
            progress(engine.finished, total)
    progress(total, total)
    return engine.outcome()
