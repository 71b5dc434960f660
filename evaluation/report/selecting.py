"""Chooses what a report shows of the results: the runs behind each figure, one common rate, one window of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.goodput import intervals
from evaluation.report.reading import Cell, Difference, Results, Run, Timeline
from slidingserve.contract.values import Floats

NEAR = 1.1
"""A run stands for a rate if its own is off by at most this factor."""

WINDOW_SECONDS = 20.0
"""The longest stretch of a timeline that is shown."""

Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Level:
    """The violations (shares) of all seeds at one rate; without ``complete`` they are lower bounds."""

    rate: float
    mean: float
    low: float
    high: float
    seeds: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Distribution:
    """TTFT and TBT in seconds at 0, 1, .. 100 % of a policy's runs at one rate, the mean over the seeds."""

    policy: str
    rate: float
    ttft_seconds: Floats
    tbt_seconds: Floats


@dataclass(frozen=True, slots=True)
class Cost:
    """Decision times of a policy: the middle of its runs' p50, the worst p99 and share, and where that share is."""

    policy: str
    p50_seconds: float
    p99_seconds: float
    share: float
    workload: str


def cells_by_place(results: Results) -> dict[Place, list[Cell]]:
    """Returns the cells of each profile and workload, in the order of the file."""
    places: dict[Place, list[Cell]] = {}
    for cell in results.summary.cells:
        places.setdefault(cell.place, []).append(cell)
    return places


def policies(results: Results) -> list[str]:
    """Returns the policies without their caps, in the order of the file; those of timelines behind them."""
    named = [cell.policy for cell in results.summary.cells]
    return list(dict.fromkeys([*named, *(base(results, timeline) for timeline in results.timelines)]))


def base(results: Results, timeline: Timeline) -> str:
    """Returns a timeline's policy without its cap, where its runs tell."""
    known = {run.policy: run.base_policy for run in results.runs}
    return known.get(timeline.policy, timeline.policy)


def best_runs(results: Results, cell: Cell) -> list[Run]:
    """Returns the runs of a cell with its best cap. O(runs)."""
    wanted = (cell.profile, cell.workload, cell.policy, cell.cap)
    return [run for run in results.runs if (run.profile, run.workload, run.base_policy, run.cap) == wanted]


def levels(runs: Iterable[Run]) -> list[Level]:
    """Returns the violations by rate, ascending. O(runs log runs)."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run.violations is not None:
            by_rate.setdefault(run.rate, []).append(run)
    found = []
    for rate, same in sorted(by_rate.items()):
        shares = [run.violations for run in same if run.violations is not None]
        mean = sum(shares) / len(shares)
        complete = all(run.complete for run in same)
        found.append(Level(rate, mean, min(shares), max(shares), len(shares), complete))
    return found


def distributions(results: Results, cells: Sequence[Cell]) -> list[Distribution]:
    """Returns the distributions of the policies of one place, at one rate as far as there are runs.

    It is the rate that most policies have runs near to (`NEAR`), most of them exactly, nearest to the highest goodput.
    A policy without a run near it is left out. O(rates^2 x policies).
    """
    known = {
        cell.policy: rates for cell in cells if (rates := _complete_rates(best_runs(results, cell)))
    }  # rate -> runs with quantiles
    if not known:
        return []
    rate = _common_rate(known, max(cell.goodput for cell in cells))
    found = []
    for policy, rates in known.items():
        nearest = _nearest(rates, rate)
        if nearest is not None:
            ttft, tbt = (
                np.mean([getattr(run, name) for run in rates[nearest]], axis=0)
                for name in ("ttft_quantiles", "tbt_quantiles")
            )
            found.append(Distribution(policy, nearest, ttft, tbt))
    return found


def _complete_rates(runs: Iterable[Run]) -> dict[float, list[Run]]:
    rates: dict[float, list[Run]] = {}
    for run in runs:
        if run.complete and len(run.ttft_quantiles) == len(run.tbt_quantiles) == 101:
            rates.setdefault(run.rate, []).append(run)
    return rates


def _common_rate(known: Mapping[str, Mapping[float, object]], goodput: float) -> float:
    """Returns the rate described at `distributions`."""

    def worth(rate: float) -> tuple[int, int, float]:
        nearest = [_nearest(rates, rate) for rates in known.values()]
        near, exact = sum(other is not None for other in nearest), nearest.count(rate)
        return near, exact, -abs(math.log(rate / goodput)) if goodput > 0 else -rate

    return max(sorted({rate for rates in known.values() for rate in rates}), key=worth)


def _nearest(rates: Iterable[float], rate: float) -> float | None:
    """Returns the rate nearest to another; None if it is too far."""
    nearest = min(sorted(rates), key=lambda other: abs(math.log(other / rate)))
    return nearest if 1 / NEAR <= nearest / rate <= NEAR else None


def costs(results: Results, profile: str) -> list[Cost]:
    """Returns what decisions cost on a profile, by policy: over all complete runs with the best caps."""
    runs: dict[str, list[Run]] = {}
    for cell in results.summary.cells:
        if cell.profile == profile:
            runs.setdefault(cell.policy, []).extend(best_runs(results, cell))
    found = []
    for policy, mine in runs.items():
        known = [
            (run.decision_p50, run.decision_p99, run.decision_share, run.workload)
            for run in mine
            if run.complete and run.decision_p50 and run.decision_p99 and run.decision_share is not None
        ]
        if known:
            halves, tails, shares, workloads = zip(*known, strict=True)
            share = max(shares)
            found.append(Cost(policy, float(np.median(halves)), max(tails), share, workloads[shares.index(share)]))
    return found


def compared(results: Results) -> list[Difference]:
    """Returns each compared pair once, the better policy first."""
    kept: dict[tuple[str, str, frozenset[str]], Difference] = {}
    for difference in results.summary.differences:
        if difference.ratio is None:
            continue
        pair = (difference.profile, difference.workload, frozenset((difference.policy, difference.against)))
        if pair not in kept or (kept[pair].ratio or 0.0) < 1.0 <= difference.ratio:
            kept[pair] = difference
    return list(kept.values())


def is_clear(difference: Difference) -> bool | None:
    """Says whether the interval leaves out 1 and the difference is one that is claimed; None without an interval."""
    if difference.ratio is None or difference.low is None or difference.high is None:
        return None
    return intervals.is_clear(difference.ratio, difference.low, difference.high)


def timelines_by_run(results: Results) -> list[list[Timeline]]:
    """Returns the timelines that belong together: same profile, workload, rate and seed, another policy each."""
    groups: dict[tuple[object, ...], list[Timeline]] = {}
    for timeline in results.timelines:
        key = (timeline.profile, timeline.workload, timeline.rate, timeline.seed)
        groups.setdefault(key, []).append(timeline)
    return list(groups.values())


def window(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """Returns (start, end) in seconds of what is shown of timelines: all, or where most deadlines are missed.

    Time: O(iterations log iterations).
    """
    rows = sorted(row for timeline in timelines for row in timeline.iterations)
    if not rows:
        return 0.0, 0.0
    start, end = rows[0][0], max(row[0] + row[1] for row in rows)
    if end - start <= WINDOW_SECONDS:
        return start, end
    starts = np.array([row[0] for row in rows])
    missed = np.concatenate([[0.0], np.cumsum([row[4] for row in rows])])
    candidates = starts[starts <= end - WINDOW_SECONDS]
    stops = np.searchsorted(starts, candidates + WINDOW_SECONDS)
    best = int(np.argmax(missed[stops] - missed[: len(candidates)]))
    return float(candidates[best]), float(candidates[best]) + WINDOW_SECONDS
