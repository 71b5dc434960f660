"""`slidingserve profile`: measures the iterations of a real engine in batches of all kinds, and fits a latency model.

A sidecar with the policy ``explore`` decides what each iteration holds and records how long it took; a closed-loop load
keeps requests there to choose from. The engine is started for this, or is one that runs already and whose adapter looks
for a sidecar at the address where ours is started.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from evaluation.bench.run import cpu_name
from evaluation.engines import tiny_model
from evaluation.engines.closed_load import ClosedLoad, ServerFacts, Shapes, server_facts, shapes_for
from evaluation.engines.journal_following import JournalFollower
from evaluation.engines.profile_samples import (
    LEAST_SAMPLES,
    Coverage,
    EngineIdentity,
    Grid,
    SampleFile,
    SampleFit,
    SamplesError,
    fit_samples,
)
from evaluation.engines.vllm_process import VllmInstallation, VllmServer, allowed_cpus, find_vllm
from evaluation.sidecar_process import SidecarProcess
from predictor.files import write_model
from slidingserve.contract.values import EngineLimits, OpenSession

LOOK_SECONDS = 0.5
FIT_SECONDS = 8.0
"""Time between two looks at how well the samples so far are predicted."""
ENOUGH_SAMPLES = 2000
ENOUGH_COVERAGE = 0.95
STABLE_PERCENT = 0.25
"""The held-out error is stable if the last few, in percent, differ by no more."""
STABLE_FITS = 4
OWN_CONNECT_SECONDS = 60.0
RUNNING_CONNECT_SECONDS = 30.0
"""A running engine tries every quarter of a second, and after 5 s if it was refused."""

FIRST_SAMPLE_SECONDS = 180.0

SCHEDULER = "engine_adapter.vllm.build_scheduler"
_RESERVED = ("--scheduler-cls", "--additional-config", "--model", "--port", "--host", "--tensor-parallel-size", "-tp")
_WARM_UP_ITERATIONS = 64  # in the first ones kernels are compiled
_TINY_ARGUMENTS = (
    *("--served-model-name", tiny_model.NAME, "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
)


_NO_SAMPLES = (
    f"the engine has told of no measured iteration for {FIRST_SAMPLE_SECONDS:g} s; look into its log for why it serves "
    "nobody, and see that its setting warmup_iterations is small"
)


class ProfilingFailed(RuntimeError):
    """The engine cannot be profiled, or nothing came of it; says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to profile; see `slidingserve profile --help`.

    Attributes:
        out: files are this, with ``.json`` and ``.samples.csv`` behind it.
        model: of an engine of one's own: ``tiny``, a folder or a name.
        arguments: further ones for that engine.
        url: of a running engine; empty: start one.
        target: where the running engine's adapter looks for its sidecar.
        minutes: most time for measuring; 0: fit to the samples that are there.
        tensor_parallel: ranks of an engine of one's own.
        hardware: what the engine runs on; empty: this machine's GPU, or CPU.
        seed: of batches, lengths and prompts.
    """

    out: Path
    model: str = tiny_model.NAME
    arguments: tuple[str, ...] = ()
    url: str = ""
    target: str = ""
    minutes: float = 5.0
    tensor_parallel: int = 1
    hardware: str = ""
    seed: int = 0

    @property
    def model_file(self) -> Path:
        """Where the model goes."""
        return self.out.with_name(f"{self.out.name}.json")

    @property
    def samples_file(self) -> Path:
        """Where the samples go."""
        return self.out.with_name(f"{self.out.name}.samples.csv")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: samples and what they cover, seconds left, held-out error in percent (None: not known yet)."""

    samples: int
    coverage: Coverage
    seconds_left: float
    mape_percent: float | None


@dataclass(frozen=True, slots=True)
class Told:
    """Whom to tell: in a line what happens next, and now and then how far it is."""

    line: Callable[[str], None] = lambda line: None
    progress: Callable[[Progress], None] = lambda progress: None


class Load(Protocol):
    """Keeps requests coming."""

    def start(self) -> None:
        """Begins."""

    def check(self) -> None:
        """Raises if requests fail."""

    def close(self) -> None:
        """Ends."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What came of it: the model (also in its file), its errors, and what was covered (None: nothing was measured)."""

    fit: SampleFit
    file: Path
    coverage: Coverage | None


def profile(request: ProfileRequest, told: Told | None = None) -> Profiled:
    """Measures, fits, and writes the model. Samples are on disk as they come, also if this is interrupted.

    Raises:
        ProfilingFailed, SamplesError, TooFewSamples, LoadFailed, SidecarFailed, VllmMissing, VllmFailed,
        TokenizersMissing: as they say.
        ModelError: the fitted model cannot be written.
    """
    told = told or Told()
    _check(request)
    samples = SampleFile(request.samples_file)
    if len(samples):
        told.line(f"{request.samples_file} holds {len(samples)} samples of {samples.identity}; going on from there")
    coverage = None
    if request.minutes > 0.0:
        with ExitStack() as stack:
            coverage = _measure(request, samples, told, stack)
    return write_fit(samples, request.model_file, coverage)


def write_fit(samples: SampleFile, file: Path, coverage: Coverage | None = None) -> Profiled:
    """Fits a model to the samples and writes it. Raises `TooFewSamples`, `ModelError`, `SamplesError`."""
    fit = fit_samples(samples.measured, file.stem, str(samples.identity) if samples.identity else "")
    try:
        write_model(fit.model, file)
    except OSError as error:
        raise SamplesError(f"{file}: cannot be written ({error.strerror}); give another --out") from error
    return Profiled(fit, file, coverage)


def collect(
    samples: SampleFile,
    follower: JournalFollower,
    grid: Grid,
    *,
    seconds: float,
    check: Callable[[], None],
    told: Told,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Coverage:
    """Takes samples until there are enough of each kind and the held-out error is stable, or time is over.

    Time counts from the first sample, for engines compile kernels in their first iterations. ``check`` raises if
    engine, sidecar or load are gone.

    Raises:
        ProfilingFailed: no sample has come for `FIRST_SAMPLE_SECONDS`.
    """
    errors: deque[float] = deque(maxlen=STABLE_FITS)
    started = clock()
    while not (new := follower.read()):
        check()
        if clock() - started > FIRST_SAMPLE_SECONDS:
            raise ProfilingFailed(_NO_SAMPLES)
        pause(LOOK_SECONDS)
    end = clock() + seconds
    next_fit = clock() + FIT_SECONDS
    while True:
        check()
        samples.add(new)
        now = clock()
        coverage = grid.coverage(samples.measured.features)
        if now >= next_fit and len(samples) >= LEAST_SAMPLES:
            next_fit = now + FIT_SECONDS
            errors.append(fit_samples(samples.measured, "so far").mape_percent)
        told.progress(Progress(len(samples), coverage, max(0.0, end - now), errors[-1] if errors else None))
        stable = len(errors) == STABLE_FITS and max(errors) - min(errors) <= STABLE_PERCENT
        if now >= end or (stable and len(samples) >= ENOUGH_SAMPLES and coverage.share >= ENOUGH_COVERAGE):
            return coverage
        pause(min(LOOK_SECONDS, max(0.0, end - now)))
        new = follower.read()


def identity_of(opening: OpenSession, hardware: str) -> EngineIdentity:
    """Returns whose iterations a session tells of."""
    engine = opening.engine
    return EngineIdentity(
        engine.name, engine.version, engine.model, engine.tensor_parallel, engine.pipeline_parallel, hardware
    )


def hardware_name() -> str:
    """Returns this machine's GPUs, or its processor and how many of its CPUs may be used, such as ``2 x Some GPU``."""
    names: list[str] = []
    if shutil.which("nvidia-smi"):
        query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if not answer.returncode else []
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{len(allowed_cpus())} CPUs of {cpu_name()}"


def _check(request: ProfileRequest) -> None:
    """Looks at the request before anything is started."""
    if find_spec("sklearn") is None:
        raise ProfilingFailed("scikit-learn is missing: install the fitting tools with pip install 'slidingserve[fit]'")
    if not request.out.parent.is_dir():
        raise ProfilingFailed(f"--out {request.out}: there is no folder {request.out.parent}; make it, or give another")
    if request.url and request.arguments:
        raise ProfilingFailed(
            f"arguments for vLLM ({' '.join(request.arguments)}) and --url {request.url}: an engine that runs takes "
            "none; leave out one of the two"
        )
    given = [argument for argument in request.arguments if argument.partition("=")[0] in _RESERVED]
    if given:
        raise ProfilingFailed(
            f"argument {given[0]} for vLLM: that is set here; for another model or more ranks use --model and "
            "--tensor-parallel, for other settings start the engine yourself and give its --url and --target"
        )


def _measure(request: ProfileRequest, samples: SampleFile, told: Told, stack: ExitStack) -> Coverage:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slidingserve-profile-")))
    facts = None
    installation = None
    if request.url:
        facts = server_facts(request.url)
    else:
        installation = find_vllm()
    target = request.target if request.url else f"unix:{folder}/scheduler.sock"
    policy = f"explore:seed={request.seed + len(samples)}"  # a second run begins elsewhere
    arguments = ("--policy", policy, "--mode", "active", "--journal-dir", str(folder / "journals"))
    sidecar = stack.enter_context(SidecarProcess(arguments, target))
    server = None if installation is None else _own_engine(request, installation, target, folder, told, stack)
    url = request.url or (server.url if server else "")
    facts = facts or server_facts(url)
    follower = JournalFollower(folder / "journals")

    def check() -> None:
        sidecar.check()
        if server is not None:
            server.check()

    opening = _opening(request, follower, check, target, told)
    samples.bind(identity_of(opening, request.hardware or hardware_name()))
    shapes = _shapes(opening.limits, facts)
    load = ClosedLoad(url, facts.model, shapes, request.seed + len(samples))
    stack.callback(load.close)
    load.start()

    def check_all() -> None:
        check()
        load.check()

    told.line(
        f"measuring {samples.identity}: up to {shapes.requests} requests at once, prompts of up to "
        f"{shapes.longest_prompt} tokens, for {request.minutes:g} minutes at most"
    )
    grid = Grid(opening.limits, shapes.requests, shapes.longest_context)
    return collect(samples, follower, grid, seconds=60.0 * request.minutes, check=check_all, told=told)


def _shapes(limits: EngineLimits, facts: ServerFacts) -> Shapes:
    return shapes_for(limits, facts.longest_tokens)


def _own_engine(
    request: ProfileRequest, installation: VllmInstallation, target: str, folder: Path, told: Told, stack: ExitStack
) -> VllmServer:
    """Starts vLLM with the adapter; it is ended with the stack."""
    model, arguments = request.model, request.arguments
    if model == tiny_model.NAME:
        model_folder = folder / "model"
        model_folder.mkdir()
        tiny_model.make_tiny_model(model_folder)
        model, arguments = str(model_folder), (*_TINY_ARGUMENTS, *arguments)
    settings = {
        "target": target,
        "mode": "active",
        "policy": "",
        "profile": "",
        "deadline_ms": 100,  # nobody waits for this engine
        "starvation_seconds": 10,  # the policy sees to it
        "waiting_starvation_seconds": 600,
        "warmup_iterations": _WARM_UP_ITERATIONS,
    }
    told.line(f"starting vLLM {installation.version} with model {request.model}; usually 20 to 60 s")
    config = json.dumps({"slidingserve": settings})
    arguments = (*arguments, "--scheduler-cls", SCHEDULER, "--additional-config", config)
    server = VllmServer(model, arguments, tensor_parallel=request.tensor_parallel, installation=installation)
    return stack.enter_context(server)


def _opening(
    request: ProfileRequest, follower: JournalFollower, check: Callable[[], None], target: str, told: Told
) -> OpenSession:
    """Waits until the engine has opened a session; returns how."""
    seconds = RUNNING_CONNECT_SECONDS if request.url else OWN_CONNECT_SECONDS
    end = time.monotonic() + seconds
    while not follower.openings:
        check()
        if time.monotonic() > end:
            raise ProfilingFailed(_not_connected(request, target, seconds))
        time.sleep(0.1)
        follower.read()
    opening = follower.openings[0]
    if opening.policy not in ("", "explore"):
        told.line(
            f"the engine asks for policy {opening.policy!r} in its settings, so batches will be those of that policy, "
            "not of all kinds; for a better model start it without the setting `policy`"
        )
    return opening


def _not_connected(request: ProfileRequest, target: str, seconds: float) -> str:
    if not request.url:
        return f"vLLM did not connect to the sidecar at {target} within {seconds:g} s; see `slidingserve doctor --vllm`"
    return (
        f"the engine at {request.url} did not connect to {target} within {seconds:g} s; check that it was started with "
        f'--scheduler-cls {SCHEDULER} and --additional-config \'{{"slidingserve": {{"target": "{target}"}}}}\', that '
        "its log has no line `vLLM serves with its own policy`, and that both see the same socket (one machine, or one "
        "volume); or give the --target that it was started with"
    )
