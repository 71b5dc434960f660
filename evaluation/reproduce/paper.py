"""The published figures of SlidingServe (arXiv 2606.05933v1), as data.

All were measured on two RTX 3090 (tensor parallel 2) with vLLM; neither the authors' machine nor their code is public,
so order and ratios are compared, not rates. Llama-3-8B is the model of our profiles; what was only published for
Qwen2.5-7B (transient load, ablation, predictor) stands for itself, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from evaluation.goodput.points import base_policy
from evaluation.workloads import WorkloadError, parse_workload
from sidecar.policies import registry

SOURCE = "SlidingServe, arXiv 2606.05933v1"
HARDWARE = "rtx3090-tp2"
"""The profile of the paper's machine."""

EDF, QOSERVE, SLIDINGSERVE = POLICIES = ("sarathi-edf", "qoserve", "slidingserve")
QOSERVE_SETTINGS = ("alpha_seconds_per_token", "alpha_of_service", "relegation")
"""Parameters of QoServe that are tuned to a workload, as its authors do; the rest is the policy itself."""

WORKLOADS = ("sharegpt", "arxiv-v1", "arxiv-v2", "mixed-v1", "mixed-v2")
LLAMA, QWEN = "Llama3-8B", "Qwen2.5-7B"

_GOODPUT = {
    LLAMA: {
        EDF: (2.30, 0.45, 0.25, 1.25, 1.10),
        QOSERVE: (3.00, 0.80, 0.40, 1.55, 1.35),
        SLIDINGSERVE: (3.30, 0.95, 0.50, 1.85, 1.55),
    },
    QWEN: {
        EDF: (2.80, 0.60, 0.35, 1.50, 1.30),
        QOSERVE: (3.20, 0.85, 0.50, 1.70, 1.50),
        SLIDINGSERVE: (3.50, 1.00, 0.65, 1.95, 1.70),
    },
}
GOODPUT = {
    model: {policy: dict(zip(WORKLOADS, rates, strict=True)) for policy, rates in by_policy.items()}
    for model, by_policy in _GOODPUT.items()
}
"""Figure 4: the highest rate in requests/s with at most 1 % of requests in violation, by model, policy and workload."""

GOODPUT_STEP = (0.05, 0.1)
"""Requests/s between the rates of the published goodputs; a difference of one step is within their resolution."""


@dataclass(frozen=True, slots=True)
class Transient:
    """Section 5.3: mixed-v1 under a load that switches; violations are shares of all requests (Qwen2.5-7B)."""

    low: float
    high: float
    period_seconds: float
    minutes: float
    violations: dict[str, float]


TRANSIENT = Transient(1.0, 2.5, 120.0, 20.0, {EDF: 0.5778, QOSERVE: 0.5130, SLIDINGSERVE: 0.2756})


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ablation: its name, our policy for it, goodput in requests/s, violations at `OVERLOAD_RATE`."""

    name: str
    policy: str
    goodput: float
    violations: float


LADDER = (
    Rung("EDF", EDF, 1.50, 1.000),
    Rung("+ SlidingChunker", f"{SLIDINGSERVE}:order=deadline,constructor=false", 1.75, 0.815),
    Rung("+ MLPS", f"{SLIDINGSERVE}:constructor=false", 1.85, 0.586),
    Rung("+ BatchConstructor", SLIDINGSERVE, 1.95, 0.505),
)
"""Table 4: mixed-v1, Qwen2.5-7B. Each rung has all of the one before it."""

ABLATION_WORKLOAD = "mixed-v1"
OVERLOAD_RATE = 3.0
"""Requests/s of the ablation's violations."""

OVERLOAD_FACTOR = OVERLOAD_RATE / GOODPUT[QWEN][SLIDINGSERVE][ABLATION_WORKLOAD]
"""The same as a multiple of SlidingServe's goodput, for hardware that is not the paper's."""

OVERLOAD_VIOLATIONS = {LADDER[0].policy: LADDER[0].violations, LADDER[-1].policy: LADDER[-1].violations}
"""What the paper says of mixed-v1 under overload; of QoServe it gives no figure."""


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """Table 5, Qwen2.5-7B."""

    mae_seconds: float
    rmse_seconds: float
    r2: float


PREDICTOR = {
    HARDWARE: PredictorErrors(2.64e-3, 4.33e-3, 0.9956),
    "a6000-tp2": PredictorErrors(2.52e-3, 4.12e-3, 0.9923),
    "a100-tp1": PredictorErrors(2.72e-3, 4.254e-3, 0.9929),
}
"""By profile; there is none of ours for the A6000."""

OVERHEAD_LIMIT = 0.05
"""The share of an iteration that deciding may take. The paper gives no CPU time; the limit is this project's own."""


def paper_goodput(profile: str, workload: str, policy: str) -> float | None:
    """Returns the published goodput of Llama-3-8B in requests/s; None where the paper has none.

    It has one for its own hardware, its three policies and its five workloads, whatever the floor of their TTFT SLOs.
    A cap, and alpha and relegation of QoServe, are part of each policy's best settings; with other parameters a policy
    is another.
    """
    if profile != HARDWARE:
        return None
    try:
        spec = parse_workload(workload)
        name, parameters = registry.parse_spec(base_policy(policy)[0])
    except (WorkloadError, registry.PolicySpecError, ValueError):
        return None
    if spec.is_recorded or replace(spec, floor_ms=0.0) != parse_workload(spec.name):
        return None
    if any(name != QOSERVE or key not in QOSERVE_SETTINGS for key in parameters):
        return None
    return GOODPUT[LLAMA].get(name, {}).get(spec.name)


def paper_ratio(workload: str, policy: str, against: str, model: str = LLAMA) -> float:
    """Returns the ratio of two published goodputs on a workload by its name."""
    rates = GOODPUT[model]
    return rates[policy][workload] / rates[against][workload]
