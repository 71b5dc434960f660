"""Workloads: when requests arrive, how long they are and which SLOs they carry.

`parse_workload` reads the name of one, `make_workload` makes its requests. Synthetic ones follow the evaluation of
SlidingServe: the published facts are mean and 90th percentile of the lengths, the distributions are solved from them.
Recorded ones are published traces.
"""

from __future__ import annotations

from evaluation.workloads.arrivals import Arrivals, Gamma, Poisson, Recorded, Switching
from evaluation.workloads.checks import (
    MAX_FLOOR_SECONDS,
    MAX_RATE,
    MAX_REQUESTS,
    MAX_SLO_SECONDS,
    InfeasibleWorkload,
    WorkloadError,
    check_number,
    check_rate,
    check_requests,
    check_seed,
    check_slo_overrides,
)
from evaluation.workloads.classes import ARXIV_V1, ARXIV_V2, MIXES, SHAREGPT, RequestClass
from evaluation.workloads.feasibility import check_feasible
from evaluation.workloads.lengths import LengthTarget, Lognormal, sample_lengths, solve_lengths
from evaluation.workloads.making import make_workload
from evaluation.workloads.solo import SOLO_CHUNK_TOKENS, SoloTtft, solo_ttft
from evaluation.workloads.spec import WorkloadSpec, known_workloads, parse_workload
from evaluation.workloads.values import Workload

__all__ = [
    "ARXIV_V1",
    "ARXIV_V2",
    "MAX_FLOOR_SECONDS",
    "MAX_RATE",
    "MAX_REQUESTS",
    "MAX_SLO_SECONDS",
    "MIXES",
    "SHAREGPT",
    "SOLO_CHUNK_TOKENS",
    "Arrivals",
    "Gamma",
    "InfeasibleWorkload",
    "LengthTarget",
    "Lognormal",
    "Poisson",
    "Recorded",
    "RequestClass",
    "SoloTtft",
    "Switching",
    "Workload",
    "WorkloadError",
    "WorkloadSpec",
    "check_feasible",
    "check_number",
    "check_rate",
    "check_requests",
    "check_seed",
    "check_slo_overrides",
    "known_workloads",
    "make_workload",
    "parse_workload",
    "sample_lengths",
    "solo_ttft",
    "solve_lengths",
]
