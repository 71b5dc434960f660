"""Results of runs, as values and as JSON (schema 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.scores import Percentiles, Scores
from slidingserve.contract.values import Floats

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Tail:
    """Median and 99th percentile of a time in seconds; NaN where nothing was measured."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one policy; rate in requests/s, seconds, tokens.

    policy_parameters is text such as ``cap=256``, empty for the defaults. slos describes the SLOs for the reader.
    round_trip_seconds is None where no message left the process. mean_batch is in requests per iteration, wall_seconds
    the real time that the run took, prediction_error the mean relative error of predicted iteration times (NaN where a
    policy predicts none).
    """

    policy: str
    policy_parameters: str
    workload: str
    profile: str
    transport: str
    rate: float
    seed: int
    requests: int
    floor_seconds: float
    slos: str
    scores: Scores
    decision_seconds: Tail
    round_trip_seconds: Tail | None
    fallbacks: int
    allocation_digest: str
    iterations: int
    mean_batch: float
    wall_seconds: float
    prediction_error: float = math.nan

    @property
    def label(self) -> str:
        """The policy as it is written on the command line."""
        return f"{self.policy}:{self.policy_parameters}" if self.policy_parameters else self.policy


def tail(seconds: Floats) -> Tail:
    """Returns p50 and p99 of the samples, float64[n] in any order."""
    if seconds.size == 0:
        return Tail(math.nan, math.nan)
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return Tail(p50, p99)


def to_json(results: Sequence[RunResult]) -> dict[str, Any]:
    """Returns the results as JSON values in a fixed order of keys; what is not finite becomes null."""
    return {"schema": SCHEMA, "runs": [_run(result) for result in results]}


def _run(result: RunResult) -> dict[str, Any]:
    scores = result.scores
    return {
        "policy": result.policy,
        "workload": result.workload,
        "profile": result.profile,
        "rate": _finite(result.rate),
        "seed": int(result.seed),
        "requests": int(result.requests),
        "violations": {
            "deadline": _finite(scores.violations.deadline),
            "gap": _finite(scores.violations.gap),
            "tpot": _finite(scores.violations.tpot),
        },
        "ttft_seconds": _percentiles(scores.ttft_seconds),
        "tbt_seconds": _percentiles(scores.tbt_seconds),
        "decision_seconds": _tail(result.decision_seconds),
        "round_trip_seconds": _tail(result.round_trip_seconds),
        "tokens_per_second": _finite(scores.tokens_per_second),
        "fallbacks": int(result.fallbacks),
        "allocation_digest": result.allocation_digest,
        # Above is the promised schema; what follows may grow.
        "policy_parameters": result.policy_parameters,
        "transport": result.transport,
        "floor_seconds": _finite(result.floor_seconds),
        "slos": result.slos,
        "met_requests_per_second": _finite(scores.met_requests_per_second),
        "iterations": int(result.iterations),
        "mean_batch": _finite(result.mean_batch),
        "wall_seconds": _finite(result.wall_seconds),
        "prediction_error": _finite(result.prediction_error),
    }


def _percentiles(values: Percentiles) -> dict[str, float | None]:
    return {"p50": _finite(values.p50), "p90": _finite(values.p90), "p99": _finite(values.p99)}


def _tail(values: Tail | None) -> dict[str, float | None]:
    """The keys are there even where nothing was measured, so that readers need no special case."""
    return {"p50": None, "p99": None} if values is None else {"p50": _finite(values.p50), "p99": _finite(values.p99)}


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity; numpy's numbers become plain ones."""
    return float(value) if math.isfinite(value) else None
