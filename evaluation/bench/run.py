"""All measurements of one ``slidingserve bench``."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from engine_adapter.simulated.profiles import HardwareProfile, load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bench.codec import CodecCost, measure_codec
from evaluation.bench.core import DecisionCost, measure_core
from evaluation.bench.engine import EngineSpeed, measure_engine
from evaluation.bench.kernels import KernelCost, measure_kernels
from evaluation.bench.states import BenchFailed, engine_limits
from evaluation.bench.transport import RoundTripCost, measure_round_trips
from evaluation.simulate import warm_up_engine
from predictor.files import ModelError, load_model
from sidecar.policies import registry
from sidecar.policies.base import Policy, PolicyContext
from slidingserve import __version__
from slidingserve.contract.values import EngineInfo, OpenSession

Section = Literal["roundtrip", "core", "codec", "engine"]
SECTIONS: tuple[Section, ...] = ("roundtrip", "core", "codec", "engine")
BASELINE = "vllm"
_PACKAGES = ("numpy", "numba", "grpcio", "protobuf")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: sizes in live requests, how often in messages, decisions, blocks or iterations."""

    round_trip_sizes: tuple[int, ...] = (32, 256, 1024)
    round_trips: int = 1500
    core_sizes: tuple[int, ...] = (32, 256, 1000)
    decisions: int = 1000
    kernel_blocks: int = 200
    codec_sizes: tuple[int, ...] = (32, 256, 1024)
    codec_repeats: int = 2000
    engine_requests: int = 100
    engine_iterations: int = 5000
    engine_rounds: int = 5


FULL = Effort()
QUICK = Effort(
    round_trips=150, decisions=150, kernel_blocks=20, codec_repeats=200, engine_iterations=1000, engine_rounds=3
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to measure; see ``slidingserve bench --help``."""

    policy: str = "slidingserve"
    profile: str = "h100-tp1"
    sections: tuple[Section, ...] = SECTIONS
    effort: Effort = FULL


@dataclass(frozen=True, slots=True)
class Facts:
    """Where and with what it was measured.

    Attributes:
        cpu: the processor's name, as far as the system tells it.
        cpus: how many of them this process may use.
        load_average: runnable processes in the last minute, at the beginning.
        python: its version.
        packages: versions of ours and those that matter for speed, by name.
        policy: as on the command line.
        policy_version: as decisions carry it.
        model_version: as decisions carry it; empty where the policy asks no model.
        profile: hardware profile.
    """

    cpu: str
    cpus: int
    load_average: float
    python: str
    packages: dict[str, str]
    policy: str
    policy_version: str
    model_version: str
    profile: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything measured; a section that was not asked for is empty (the kernels: None)."""

    facts: Facts
    round_trips: tuple[RoundTripCost, ...] = ()
    decisions: tuple[DecisionCost, ...] = ()
    kernels: KernelCost | None = None
    codec: tuple[CodecCost, ...] = ()
    engine: tuple[EngineSpeed, ...] = ()


def run_bench(request: BenchRequest, progress: Callable[[str], None] = lambda what: None) -> BenchResult:
    """Measures what was asked for; ``progress`` is told what is being measured.

    Raises:
        ProfileError, UnknownProfileError: the hardware profile.
        PolicySpecError, UnknownPolicyError, PolicyParameterError: the policy or its parameters.
        BenchFailed, SidecarFailed, ClientError, DecisionRefused: a measurement could not be made.
    """
    effort = request.effort
    profile = load_profile(request.profile)
    name, parameters = registry.parse_spec(request.policy)
    policy = registry.build(name, parameters, PolicyContext(engine_limits(effort.engine_requests), profile.name))
    facts = _facts(request, policy, profile)
    opening = _opening(name, parameters, profile, effort.engine_requests)
    timer = ProfileTimer(profile)
    progress("compiling the simulated engine")
    warm_up_engine(profile)
    wanted = request.sections
    return BenchResult(
        facts,
        tuple(measure_round_trips(opening, timer, effort.round_trip_sizes, effort.round_trips, progress))
        if "roundtrip" in wanted
        else (),
        tuple(measure_core(name, parameters, profile.name, effort.core_sizes, effort.decisions, progress))
        if "core" in wanted
        else (),
        _kernels(policy, parameters, profile, effort.kernel_blocks, progress) if "core" in wanted else None,
        tuple(measure_codec(effort.codec_sizes, effort.codec_repeats, progress)) if "codec" in wanted else (),
        tuple(
            measure_engine(
                _with_baseline(opening, profile), timer, effort.engine_iterations, effort.engine_rounds, progress
            )
        )
        if "engine" in wanted
        else (),
    )


def _opening(name: str, parameters: dict[str, str], profile: HardwareProfile, requests: int) -> OpenSession:
    return OpenSession(
        engine_limits(requests),
        engine=EngineInfo("simulated", instance=profile.name, model=profile.model),
        policy=name,
        policy_parameters=parameters,
        profile=profile.name,
    )


def _with_baseline(opening: OpenSession, profile: HardwareProfile) -> tuple[OpenSession, ...]:
    if opening.policy == BASELINE:
        return (opening,)
    return opening, _opening(BASELINE, {}, profile, opening.limits.max_sequences)


def _kernels(
    policy: Policy, parameters: dict[str, str], profile: HardwareProfile, blocks: int, progress: Callable[[str], None]
) -> KernelCost | None:
    """Times the predictor with the policy's model; None if the policy asks none."""
    if not policy.model_version:
        return None
    progress("predictor")
    try:
        return measure_kernels(load_model(parameters.get("model") or profile.name), blocks)
    except ModelError as error:
        raise BenchFailed(str(error)) from error


def _facts(request: BenchRequest, policy: Policy, profile: HardwareProfile) -> Facts:
    affinity = getattr(os, "sched_getaffinity", None)
    return Facts(
        cpu=cpu_name(),
        cpus=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        packages={"slidingserve": __version__, **{name: _version(name) for name in _PACKAGES}},
        policy=request.policy,
        policy_version=policy.version,
        model_version=policy.model_version,
        profile=profile.name,
    )


def cpu_name() -> str:
    """Returns what this machine's processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
