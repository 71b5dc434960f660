"""Makes workloads of recorded traffic."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from evaluation.workloads.checks import (
    WorkloadError,
    check_requests,
    check_seed,
    check_slo_overrides,
)
from evaluation.workloads.slos import SloColumns, absolute_slos
from evaluation.workloads.tracefiles import TraceRows
from evaluation.workloads.values import Workload
from slidingserve.contract.values import Floats, Ints

Part = Literal["all", "first-half", "second-half"]

SHORTEST_SPAN_SECONDS = 1e-6
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it lie evenly spread modulo 2^64."""


def trace_workload(
    rows: TraceRows,
    *,
    name: str,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    ttft_seconds: float | None = None,
    tbt_seconds: float | None = None,
) -> Workload:
    """Makes a workload of the first ``requests`` rows (all where there are fewer).

    ``rate`` is the wanted mean rate in requests/s, reached by scaling the arrival times; None keeps them as recorded.
    Quantised stamps are spread (``spread_stamps``). SLOs are absolute (`absolute_slos`); ``ttft_seconds`` and
    ``tbt_seconds`` replace them for every request. Raises WorkloadError.
    """
    if requests is not None:
        check_requests(requests)
    check_seed(seed)
    check_slo_overrides(ttft_seconds, tbt_seconds)
    rows = first_rows(spread_rows(rows, seed), requests)
    slos = absolute_slos(rows.prompt_tokens, np.ones(len(rows), np.int64), (name,))
    return recorded_workload(rows, name, slos.overridden(ttft_seconds, tbt_seconds), rate)


def recorded_workload(rows: TraceRows, name: str, slos: SloColumns, rate: float | None) -> Workload:
    """Makes a workload of all rows, at a mean of ``rate`` requests/s or as recorded. O(n). Raises WorkloadError."""
    arrival = rows.arrival_seconds
    span = float(arrival[-1])
    recorded = (len(rows) - 1) / span if span > SHORTEST_SPAN_SECONDS else 0.0
    workload = Workload(
        name=name,
        arrival_seconds=arrival,
        prompt_tokens=rows.prompt_tokens,
        output_tokens=rows.output_tokens,
        ttft_slo_seconds=slos.ttft_slo_seconds,
        tbt_slo_seconds=slos.tbt_slo_seconds,
        ttlt_slo_seconds=slos.ttlt_slo_seconds,
        class_index=slos.class_index,
        class_names=slos.class_names,
        rate=recorded,
    )
    return workload if rate is None else workload.at_rate(rate)


def first_rows(rows: TraceRows, requests: int | None) -> TraceRows:
    """Returns the first rows, all where there are fewer or ``requests`` is None."""
    return _shifted(rows, slice(0, requests))


def spread_rows(rows: TraceRows, seed: int) -> TraceRows:
    """Returns the rows with their stamps spread by `spread_stamps`."""
    return TraceRows(spread_stamps(rows.arrival_seconds, seed), rows.prompt_tokens, rows.output_tokens, rows.skipped)


def part_of(rows: TraceRows, part: Part) -> TraceRows:
    """Returns one half of the requests, or all: to tune on one and test on the other. Raises WorkloadError."""
    if part == "all":
        return rows
    if len(rows) < 2:
        raise WorkloadError(f"part={part}: a trace of one request has no halves; leave the part out")
    half = (len(rows) + 1) // 2
    return _shifted(rows, slice(0, half) if part == "first-half" else slice(half, None))


def turned(rows: TraceRows, seed: int) -> TraceRows:
    """Returns the rows from another place on, and those before it behind the last: other requests for another seed.

    Seed 0 begins at the first row; the other places are spread evenly over the trace. Between the last row and the
    first lies a mean gap. O(n).
    """
    start = (seed * _GOLDEN_RATIO_64 % 2**64) * len(rows) >> 64
    if start == 0:
        return rows
    arrival = rows.arrival_seconds
    again = arrival[-1] + arrival[-1] / (len(rows) - 1)

    def turn(column: Ints) -> Ints:
        return np.concatenate([column[start:], column[:start]])

    times = np.concatenate([arrival[start:], arrival[:start] + again]) - arrival[start]
    return TraceRows(times, turn(rows.prompt_tokens), turn(rows.output_tokens), rows.skipped)


def _shifted(rows: TraceRows, chosen: slice) -> TraceRows:
    """Returns some of the rows, the first of them at 0 s."""
    arrival = rows.arrival_seconds[chosen]
    return TraceRows(arrival - arrival[0], rows.prompt_tokens[chosen], rows.output_tokens[chosen], rows.skipped)


def spread_stamps(arrival_seconds: Floats, seed: int) -> Floats:
    """Spreads quantised stamps uniformly inside their bucket; float64[n] ascending in and out, deterministic by seed.

    Mooncake's stamps lie on a grid of 3 s with ten requests each. A bucket lasts until the next stamp, at most the
    median distance of stamps. Traces with fewer than 10 stamps, or fewer than 2 requests per stamp, come back as they
    are: their equal stamps are bursts. O(n log n).
    """
    stamps, bucket = np.unique(arrival_seconds, return_inverse=True)
    if stamps.size < 10 or arrival_seconds.size < 2 * stamps.size:
        return arrival_seconds
    distance = np.diff(stamps)
    width = np.minimum(np.append(distance, math.inf), np.median(distance))
    inside = np.random.default_rng(seed).random(arrival_seconds.size)
    return np.sort(arrival_seconds + width[bucket] * inside)
