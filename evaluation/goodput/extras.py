"""What is run beside the searches, once every policy has its best cap: overload, one rate for all, timelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import groupby
from typing import Any

from engine_adapter.simulated.timing import ProfileTimer
from evaluation.goodput.points import RunKey
from evaluation.goodput.rates import rounded
from evaluation.goodput.runner import base_workload, hardware, opened_source
from evaluation.goodput.sweep import Cell, Sweep
from evaluation.goodput.task import Place, run_keys
from evaluation.simulate import engine_limits
from evaluation.timelines import record_timeline

TIMELINE_SECONDS = 60.0
_TIMELINE_REQUESTS = 600


def run_extras(sweep: Sweep, cells: Sequence[Cell], place: Place, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """Runs the best cap of each cell, with the first seed, beyond its own goodput and at the best policy's goodput.

    Returns a timeline of each policy on the first workload of each profile, at the best policy's goodput.
    """
    runs: list[Future[Any]] = []
    timelines: list[Future[dict[str, Any]]] = []
    for group, rate in common_rates(cells):
        for cell in group:
            runs.append(pool.submit(run_keys, _keys(sweep, cell, rate), place))
            if cell.workload == sweep.workloads[0] and rate > 0.0:
                key = RunKey(cell.profile, cell.workload, cell.text(cell.best), rate, 0, _TIMELINE_REQUESTS)
                timelines.append(pool.submit(timeline, key, place))
    for run in runs:
        run.result()
    return [future.result() for future in timelines]


def common_rates(cells: Sequence[Cell]) -> Iterator[tuple[list[Cell], float]]:
    """Yields the cells of each profile and workload, and the highest goodput among them."""
    for _, group in groupby(sorted(cells, key=_setting), key=_setting):
        same = list(group)
        yield same, max(cell.goodput for cell in same)


def _setting(cell: Cell) -> tuple[str, str]:
    return cell.profile, cell.workload


def _keys(sweep: Sweep, cell: Cell, common_rate: float) -> tuple[RunKey, ...]:
    final = sweep.effort.final
    rates = [overload_rate(cell.goodput, factor) for factor in sweep.overloads if cell.goodput > 0.0]
    if common_rate > 0.0:
        rates.append(common_rate)
    text = cell.text(cell.best)
    return tuple(RunKey(cell.profile, cell.workload, text, rate, final.seeds[0], final.requests) for rate in rates)


def overload_rate(goodput: float, factor: float) -> float:
    """Returns a multiple of a goodput as a rate that names its run."""
    return rounded(goodput * factor)


def timeline(key: RunKey, place: Place) -> dict[str, Any]:
    """Records `TIMELINE_SECONDS` of a run, from its middle on."""
    profile = hardware(key.profile)
    workload = base_workload(key.profile, key.workload, key.seed, key.requests, place.data).at_rate(key.rate)
    rows = record_timeline(
        workload,
        engine_limits(profile),
        ProfileTimer(profile),
        opened_source(key),
        float(workload.arrival_seconds[len(workload) // 2]),
        TIMELINE_SECONDS,
    )
    return {
        "profile": key.profile,
        "workload": key.workload,
        "policy": key.policy,
        "rate": key.rate,
        "seed": key.seed,
        "limit_seconds": TIMELINE_SECONDS,
        "iterations": [[rounded(value) for value in row] for row in rows],
    }
