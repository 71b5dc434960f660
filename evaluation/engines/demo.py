"""`slidingserve demo vllm`: vLLM's own policy and those of a sidecar on the same requests, on a real engine.

One server runs throughout: a tiny model of random weights, with the adapter as its scheduler. What changes is the
sidecar at the other end of the socket. During the warm-up it records what iterations hold and how long they take, which
gives this machine's latency model. Then it is switched ``off``, so that vLLM decides by itself, and on again with each
policy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.engines.demo_load import DemoSlos, demo_rate, demo_slos, demo_workload
from evaluation.engines.http_load import outcome_of
from evaluation.engines.stage import MOST_RANKS, OWN_POLICY, Stage, StageFailed, Tell
from evaluation.engines.vllm_process import find_vllm
from evaluation.scores import Scores, score
from evaluation.workloads import MAX_RATE, Workload, check_number, check_requests, check_seed
from sidecar.journal import read_journal
from sidecar.policies import registry
from sidecar.policies.base import COMMON_LIMITS, PolicyContext
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

DEFAULT_POLICIES = ("slidingserve",)
_ANY_PROFILE = "h100-tp1"  # to check policies with, before this machine's is known


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What to show; see `slidingserve demo vllm --help`. rate in requests/s; None: as this machine bears.

    tensor_parallel is a number of ranks; None: two on CPUs, where there are as many, and one on GPUs.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    rate: float | None = None
    requests: int | None = None
    seed: int = 0
    tensor_parallel: int | None = None


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
        VllmMissing, VllmFailed, SidecarFailed, StageFailed, TooFewIterations, LoadClientMissing: as they say.
        WorkloadError, PolicySpecError, PolicyParameterError, UnknownPolicyError: a value of the request.
    """
    _check(request)
    installation = find_vllm()
    _check_packages()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slidingserve-demo-")))
        stage = Stage(folder, installation, tell, request.tensor_parallel)
        stage.start(stack)
        model = stage.warm_up(request.seed)
        slos, rate = demo_slos(model), request.rate or float(f"{demo_rate(model):.2g}")
        workload = demo_workload(slos, rate, request.requests, request.seed)
        stage.tell(
            f"{len(workload)} requests, {rate:g} a second, one in five a document; a chat is due after "
            f"{1e3 * slos.chat_ttft:.0f} ms, then a token every {1e3 * slos.chat_tbt:.0f} ms"
        )
        runs = [_run(stage, OWN_POLICY, ("--mode", "off"), workload, request.seed)]
        for policy in request.policies:
            arguments = ("--policy", policy, "--profile", str(stage.model_file))
            runs.append(_run(stage, policy, arguments, workload, request.seed))
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


def _run(stage: Stage, policy: str, sidecar: Sequence[str], workload: Workload, seed: int) -> DemoRun:
    """Sends the workload while a sidecar with these arguments decides, or does not."""
    last = float(workload.arrival_seconds[-1])
    stage.tell(f"{policy}: requests arrive for {last:.0f} s")
    with stage.sidecar(*sidecar) as journal_folder:
        records = stage.send(workload, seed)
    journals = sorted(journal_folder.glob("*.journal"))
    outcome = outcome_of(workload, records)
    if not outcome.finished.any():
        first = next((record.error for record in records if record.error), "no tokens came")
        raise StageFailed(f"{policy}: not one of {len(workload)} requests finished; the first said: {first}")
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


def _share(met: NDArray[np.bool_]) -> float:
    return float(met.mean()) if met.size else float("nan")


def _check(request: DemoRequest) -> None:
    """Looks at the request before anything is started."""
    check_seed(request.seed)
    if request.tensor_parallel is not None and not 1 <= request.tensor_parallel <= MOST_RANKS:
        raise StageFailed(f"{request.tensor_parallel} ranks are out of range; give 1 or {MOST_RANKS}")
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
            raise StageFailed(f"the package {package} is missing; pip install {extra}")
