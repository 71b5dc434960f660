"""Scores of one run: which requests met their SLOs, under three rules, and the usual latencies.

The rules differ in what they ask of the tokens after the first:

- deadline (the papers' rule): token k is due at arrival + TTFT + (k - 1) TBT, so time saved early may be spent later;
- gap: no gap between consecutive tokens is longer than TBT;
- mean TPOT: (last - first token) / (tokens - 1) is at most TBT, 0 for a single token, as ``vllm bench serve --goodput
  ttft:.. tpot:.. e2el:..`` counts.

A first token that is late, a last token later than arrival + TTLT where there is such an SLO, and a request that did
not finish are misses under each. All requests count, those of ramp-up and drain too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.outcome import Outcome
from evaluation.workloads import Workload
from slidingserve.contract.values import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Violations:
    """Fractions of all requests that missed their SLOs, by rule."""

    deadline: float
    gap: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Three percentiles, linear between neighbours; NaN where nothing was measured."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one run.

    TTFT over the requests that got a first token, TBT over all gaps, in seconds. met_requests_per_second counts by the
    deadline rule, tokens_per_second what was generated, both over the makespan.
    """

    violations: Violations
    ttft_seconds: Percentiles
    tbt_seconds: Percentiles
    met_requests_per_second: float
    tokens_per_second: float


def score(workload: Workload, outcome: Outcome) -> Scores:
    """Scores a run. O(n + m) for n requests and m gaps. Raises ValueError if the columns do not fit the workload."""
    _check_columns(workload, outcome)
    common = _misses_by_any_rule(workload, outcome)
    missed = common | outcome.deadline_missed
    met = int(np.count_nonzero(~missed))
    return Scores(
        violations=Violations(
            deadline=float(missed.mean()),
            gap=float((common | outcome.gap_missed).mean()),
            tpot=float((common | _is_slow(workload, outcome)).mean()),
        ),
        ttft_seconds=percentiles(outcome.first_token_seconds - outcome.arrival_seconds),
        tbt_seconds=percentiles(outcome.token_gaps),
        met_requests_per_second=met / outcome.makespan_seconds,
        tokens_per_second=float(outcome.output_tokens.sum()) / outcome.makespan_seconds,
    )


def missed_deadlines(workload: Workload, outcome: Outcome) -> Bools:
    """Returns for each request whether it missed by the deadline rule. O(n)."""
    missed: Bools = _misses_by_any_rule(workload, outcome) | outcome.deadline_missed
    return missed


def _misses_by_any_rule(workload: Workload, outcome: Outcome) -> Bools:
    return ~outcome.finished | _is_late_first(workload, outcome) | _is_late_last(workload, outcome)


def percentiles(seconds: Floats) -> Percentiles:
    """Returns p50, p90 and p99 of the values that are not NaN."""
    known = seconds[~np.isnan(seconds)]
    if known.size == 0:
        return Percentiles(np.nan, np.nan, np.nan)
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Percentiles(p50, p90, p99)


def _is_late_first(workload: Workload, outcome: Outcome) -> Bools:
    """Misses of TTFT; no first token is one (comparisons with NaN are false)."""
    in_time: Bools = outcome.first_token_seconds <= outcome.arrival_seconds + workload.ttft_slo_seconds
    return ~in_time & (workload.ttft_slo_seconds > 0)


def _is_late_last(workload: Workload, outcome: Outcome) -> Bools:
    in_time: Bools = outcome.last_token_seconds <= outcome.arrival_seconds + workload.ttlt_slo_seconds
    return ~in_time & (workload.ttlt_slo_seconds > 0)


def _is_slow(workload: Workload, outcome: Outcome) -> Bools:
    """Requests of two or more tokens whose mean time per output token after the first is above their TBT SLO."""
    later_tokens = outcome.output_tokens - 1
    tpot = (outcome.last_token_seconds - outcome.first_token_seconds) / np.maximum(later_tokens, 1)
    return (later_tokens > 0) & (tpot > workload.tbt_slo_seconds) & (workload.tbt_slo_seconds > 0)


def _check_columns(workload: Workload, outcome: Outcome) -> None:
    """Raises ValueError unless every column has one value per request and time has passed."""
    requests = len(workload)
    columns = ("arrival_seconds", "first_token_seconds", "last_token_seconds", "output_tokens")
    for name in (*columns, "deadline_missed", "gap_missed", "finished"):
        size = getattr(outcome, name).size
        if size != requests:
            raise ValueError(f"{name} has {size} values; it needs one for each of the {requests} requests")
    if requests == 0:
        raise ValueError("a workload of 0 requests has no scores; run at least one")
    if not outcome.makespan_seconds > 0:
        raise ValueError(f"makespan {outcome.makespan_seconds} s; it must be above 0")
