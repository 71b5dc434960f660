"""`slidingserve demo vllm`: vLLM's own policy and those of a sidecar on the same requests, on a real engine.

One server runs throughout: a tiny model of random weights, with the adapter as its scheduler. What changes is the
sidecar at the other end of the socket. During the warm-up it records what iterations hold and how long they take, which
gives this machine's latency model. Then it is switched ``off``, so that vLLM decides by itself, and on again with each
policy.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from evaluation.engines.demo_load import (
    CHUNK_TOKENS,
    DemoSlos,
    demo_rate,
    demo_slos,
    demo_workload,
    slo_headers,
    warm_up_workload,
)
from evaluation.engines.http_load import RequestRecord, outcome_of, random_prompts, send_load
from evaluation.engines.measured_iterations import fit_measured_model, measured_iterations
from evaluation.engines.tiny_model import FIRST_WORD_TOKEN, NAME, VOCABULARY
from evaluation.engines.vllm_process import VllmInstallation, VllmServer, allowed_cpus, find_vllm, vllm_environment
from evaluation.scores import Scores, score
from evaluation.sidecar_process import SidecarProcess
from evaluation.workloads import MAX_RATE, Workload, check_number, check_requests, check_seed
from predictor.files import write_model
from predictor.model import LatencyModel
from sidecar.journal import read_journal
from sidecar.policies import registry
from sidecar.policies.base import COMMON_LIMITS, PolicyContext
from slidingserve.control.v1 import control_pb2
from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

OWN_POLICY = "vLLM's own"
DEFAULT_POLICIES = ("slidingserve",)
PROFILE = "this-machine"
_ANY_PROFILE = "h100-tp1"  # to check policies with, before this machine's is known

_CONNECT_SECONDS = 60.0
_LIMIT_SECONDS = 180.0
# Ten times what is usual: engine, sidecar and load share the cores of one machine, and may have to wait for each other.
_DEADLINE_MS = 30
_WARM_UP_REQUESTS, _WARM_UP_RATE = 40, 4.0
_SMALL_CHUNKS = "vllm:max_tokens=192"
_SERVER = (
    *("--served-model-name", NAME, "--load-format", "dummy", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "64"),
    "--no-enable-prefix-caching",  # every policy gets the same prompts
    *("--scheduler-cls", "engine_adapter.vllm.build_scheduler"),
    *("--middleware", "engine_adapter.vllm.middleware.SLOHeaders"),
)

Tell = Callable[[str], None]
"""Told in a line what happens next."""


class DemoFailed(RuntimeError):
    """The demonstration cannot run, or what it ran gave no result; says why."""


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What to show; see `slidingserve demo vllm --help`. rate in requests/s; None: as this machine bears."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    rate: float | None = None
    requests: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run.

    Attributes:
        policy: name:key=value,... or `OWN_POLICY`.
        scores: over all requests.
        met_by_class: share of the class's requests that met their SLOs by the deadline rule, by name; NaN: none came.
        planned_share: share of the iterations that carried out the sidecar's plan; NaN where it made none.
        failed_requests: requests that ended with an error.
        wall_seconds: from the first request to the last token.
    """

    policy: str
    scores: Scores
    met_by_class: dict[str, float]
    planned_share: float
    failed_requests: int
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All runs, and what they have in common. Seconds and requests/s; prediction_error is relative, on unseen ones."""

    runs: tuple[DemoRun, ...]
    slos: DemoSlos
    rate: float
    requests: int
    seed: int
    vllm_version: str
    tensor_parallel: int
    on_cpu: bool
    measured_iterations: int
    prediction_error: float


def run_demo(request: DemoRequest, tell: Tell = lambda line: None) -> DemoResult:
    """Runs vLLM's own policy and each of the request's; about two minutes, plus half a minute for each policy.

    Raises:
        VllmMissing, VllmFailed, SidecarFailed, DemoFailed, TooFewIterations, LoadClientMissing: as they say.
        WorkloadError, PolicySpecError, PolicyParameterError, UnknownPolicyError: a value of the request.
    """
    _check(request)
    installation = find_vllm()
    _check_packages()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slidingserve-demo-")))
        stage = _Stage(folder, installation, tell)
        stage.start(stack)
        model = stage.warm_up(request.seed)
        slos, rate = demo_slos(model), request.rate or float(f"{demo_rate(model):.2g}")
        workload = demo_workload(slos, rate, request.requests, request.seed)
        stage.tell(
            f"{len(workload)} requests, {rate:g} a second, one in five a document; a chat is due after "
            f"{1e3 * slos.chat_ttft:.0f} ms, then a token every {1e3 * slos.chat_tbt:.0f} ms"
        )
        runs = [stage.run(OWN_POLICY, ("--mode", "off"), workload, request.seed)]
        for policy in request.policies:
            arguments = ("--policy", policy, "--profile", str(stage.model_file))
            runs.append(stage.run(policy, arguments, workload, request.seed))
    return DemoResult(
        runs=tuple(runs),
        slos=slos,
        rate=rate,
        requests=len(workload),
        seed=request.seed,
        vllm_version=installation.version,
        tensor_parallel=stage.tensor_parallel,
        on_cpu=installation.on_cpu,
        measured_iterations=stage.measured,
        prediction_error=model.errors["all"]["mape_percent"] / 100.0,
    )


def planned_share(journals: Sequence[Path]) -> float:
    """Returns the share of an engine's iterations that carried out a plan; NaN if it told of none.

    Where a plan was asked for ahead, what ended meanwhile is missing from the batch; that is carried out too. A plan
    that was not used because a request came meanwhile is no iteration. Where a snapshot came instead of a step, the
    iterations since the last one ran without a plan.
    """
    planned = alone = 0
    for path in journals:
        asked: pb.BatchAllocation | None = None  # the last question that was answered with a plan
        for request, response in read_journal(path).exchanges:
            if asked is not None and request.HasField("snapshot"):
                alone += request.snapshot.iteration.step - asked.step
            elif asked is not None and request.HasField("step"):
                done = _carried_out(asked, request.step)
                planned += done is True
                alone += done is False
            plan = None if response is None else response.batch_allocation
            asked = plan if plan is not None and plan.handles else None
    return planned / (planned + alone) if planned + alone else float("nan")


def _carried_out(plan: pb.BatchAllocation, told: pb.Step) -> bool | None:
    """Returns whether the step says that the plan was carried out; None: nothing was."""
    if told.applied_exactly:
        return True
    if not told.applied.handles:
        return None
    ended = set(told.finished_handles)
    wanted = {handle: tokens for handle, tokens in zip(plan.handles, plan.tokens, strict=True) if handle not in ended}
    return wanted == dict(zip(told.applied.handles, told.applied.tokens, strict=True))


class _Stage:
    """The server, and the sidecar of the moment."""

    def __init__(self, folder: Path, installation: VllmInstallation, tell: Tell) -> None:
        self._folder, self._installation, self.tell = folder, installation, tell
        self._address = f"unix:{folder}/scheduler.sock"
        self.model_file = folder / "model.json"
        self.tensor_parallel = 2 if installation.on_cpu and len(allowed_cpus()) > 1 else 1
        self.measured = 0
        self._sidecars = 0

    def start(self, stack: ExitStack) -> None:
        """Makes the model and starts the server, whose adapter looks for a sidecar from then on."""
        model = self._folder / "model"
        model.mkdir()
        self._make_model(model)
        settings = {"target": self._address, "mode": "active", "deadline_ms": _DEADLINE_MS, "report_seconds": 10}
        on_cpu = self._installation.on_cpu
        # A CPU without instructions for bfloat16 takes ten times as long with it.
        dtype = "float32" if on_cpu else "bfloat16"
        where = f"{self.tensor_parallel} CPU ranks" if on_cpu else "one GPU"
        self.tell(f"starting vLLM {self._installation.version} with a tiny random model on {where}, usually 20 to 60 s")
        self._server = stack.enter_context(
            VllmServer(
                model,
                (*_SERVER, "--dtype", dtype, "--additional-config", json.dumps({"slidingserve": settings})),
                tensor_parallel=self.tensor_parallel,
                installation=self._installation,
            )
        )

    def _make_model(self, folder: Path) -> None:
        """Makes the model in vLLM's Python, which has the package that it takes."""
        made = subprocess.run(  # noqa: S603
            [self._installation.python, "-P", "-m", "evaluation.engines.tiny_model", str(folder)],
            capture_output=True,
            text=True,
            env=vllm_environment(self._installation, self._folder),
        )
        if made.returncode:
            raise DemoFailed(f"the tiny model could not be made in {self._installation.python}:\n{made.stderr.strip()}")

    def warm_up(self, seed: int) -> LatencyModel:
        """Serves requests of all sizes, in small chunks and in large ones; returns the latency model of the engine."""
        self.tell("warming up: kernels are compiled on first use, and iterations are measured; about 40 s")
        journals = []
        for number, policy in enumerate((_SMALL_CHUNKS, "vllm")):
            workload = warm_up_workload(_WARM_UP_REQUESTS, _WARM_UP_RATE, seed + number)
            with self._sidecar("--policy", policy) as journal_folder:
                self._send(workload, seed + number)
            journals += sorted(journal_folder.glob("*.journal"))
        measured = measured_iterations(journals)
        self.measured = len(measured)
        said = f"The demonstration's tiny model on vLLM {self._installation.version}."
        return write_model(fit_measured_model(measured, PROFILE, said), self.model_file)

    def run(self, policy: str, sidecar: Sequence[str], workload: Workload, seed: int) -> DemoRun:
        """Sends the workload while a sidecar with these arguments decides, or does not."""
        last = float(workload.arrival_seconds[-1])
        self.tell(f"{policy}: requests arrive for {last:.0f} s")
        with self._sidecar(*sidecar) as journal_folder:
            records = self._send(workload, seed)
        journals = sorted(journal_folder.glob("*.journal"))
        outcome = outcome_of(workload, records)
        if not outcome.finished.any():
            first = next((record.error for record in records if record.error), "no tokens came")
            raise DemoFailed(f"{policy}: not one of {len(workload)} requests finished; the first said: {first}")
        met = ~outcome.deadline_missed & outcome.finished
        return DemoRun(
            policy=policy,
            scores=score(workload, outcome),
            met_by_class={
                name: _share(met[workload.class_index == kind]) for kind, name in enumerate(workload.class_names, 1)
            },
            planned_share=planned_share(journals),
            failed_requests=sum(bool(record.error) for record in records),
            wall_seconds=outcome.makespan_seconds - float(workload.arrival_seconds[0]),
        )

    def _send(self, workload: Workload, seed: int) -> list[RequestRecord]:
        prompts = random_prompts(workload, FIRST_WORD_TOKEN, VOCABULARY, seed)
        limit = float(workload.arrival_seconds[-1]) + _LIMIT_SECONDS
        records = send_load(self._server.url, NAME, workload, prompts, slo_headers(workload), limit_seconds=limit)
        self._server.check()
        return records

    @contextmanager
    def _sidecar(self, *arguments: str) -> Iterator[Path]:
        """Runs a sidecar that the engine has connected to; yields its folder of journals."""
        self._sidecars += 1
        journals = self._folder / f"journals-{self._sidecars}"
        with SidecarProcess((*arguments, "--journal-dir", str(journals)), self._address) as sidecar:
            self._wait_for_engine(sidecar)
            yield journals
            sidecar.check()

    def _wait_for_engine(self, sidecar: SidecarProcess) -> None:
        """Waits until the engine has opened a session; it tries again every few seconds at most."""
        end = time.monotonic() + _CONNECT_SECONDS
        with grpc.insecure_channel(self._address) as channel:
            control = ControlServiceStub(channel)
            while True:
                sidecar.check()
                self._server.check()
                try:
                    if control.ListSessions(control_pb2.ListSessionsRequest(), timeout=2.0).sessions:
                        return
                except grpc.RpcError:
                    pass  # it is not listening yet
                if time.monotonic() > end:
                    raise DemoFailed(
                        f"vLLM did not connect to the sidecar within {_CONNECT_SECONDS:g} s; the sidecar said:\n"
                        f"{sidecar.log.strip()}\nvLLM said:\n{self._server.last_words}"
                    )
                time.sleep(0.1)


def _share(met: NDArray[np.bool_]) -> float:
    return float(met.mean()) if met.size else float("nan")


def _check(request: DemoRequest) -> None:
    """Looks at the request before anything is started."""
    check_seed(request.seed)
    if request.rate is not None:
        check_number("rate", request.rate, 0.0, MAX_RATE, "requests/s", above=True)
    if request.requests is not None:
        check_requests(request.requests)
    for text in request.policies:
        name, parameters = registry.parse_spec(text)
        registry.build(name, parameters, PolicyContext(COMMON_LIMITS, "" if "model" in parameters else _ANY_PROFILE))


def _check_packages() -> None:
    for package, extra in (("aiohttp", "aiohttp"), ("sklearn", "slidingserve[fit]")):
        if find_spec(package) is None:
            raise DemoFailed(f"the package {package} is missing; pip install {extra}")
