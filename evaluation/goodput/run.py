"""`slidingserve goodput` from settings to files: claims the folder, sweeps, summarises, writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.simulated.timing import ProfileTimer
from evaluation.goodput.extras import run_extras
from evaluation.goodput.provenance import Provenance, claim, provenance
from evaluation.goodput.runner import base_workload, hardware
from evaluation.goodput.store import PARQUET, read_points, write_parquet
from evaluation.goodput.summary import NAME, Reference, Summary, summarise, to_json
from evaluation.goodput.sweep import Cell, Report, Sweep, cells_of, search_cells, worker_pool
from evaluation.goodput.task import Place
from evaluation.simulate import engine_limits
from evaluation.workloads import check_feasible
from sidecar.policies import registry
from sidecar.policies.base import PolicyContext

TIMELINES = "timelines.json"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A sweep and where it goes. ``shard`` (k, n): only the k-th of n parts, without a summary."""

    sweep: Sweep
    folder: Path
    shard: tuple[int, int] | None = None
    jobs: int = 0
    data: Path | None = None


Prepare = Callable[[list[Cell], Place, ProcessPoolExecutor], list[Cell]]
"""Told the cells of a sweep before it begins; returns those that are to be searched in their place."""


def as_they_are(cells: list[Cell], place: Place, pool: ProcessPoolExecutor) -> list[Cell]:
    """Returns the cells."""
    return cells


def run(
    request: SweepRun, report: Report, paper: Reference, bound: Reference, prepare: Prepare = as_they_are
) -> Summary | None:
    """Sweeps and writes ``goodput.json``, ``timelines.json`` and ``points.parquet``; a shard only keeps its runs.

    Raises what `check` raises; StoreError; KeyboardInterrupt when it is interrupted, after which the same call goes on
    where it stopped.
    """
    origin = begin(request.sweep, request.folder, request.data)
    cells = cells_of(request.sweep, request.shard)
    shard = "" if request.shard is None else "{}of{}".format(*request.shard)
    place = Place(request.folder, shard, request.data)
    with worker_pool(request.jobs) as pool:
        cells = prepare(cells, place, pool)
        search_cells(request.sweep, cells, place, pool, report)
        timelines = run_extras(request.sweep, cells, place, pool)
    report(1.0, "all runs")
    if request.shard is not None:
        return None
    points = read_points(request.folder)
    summary = summarise(request.sweep, origin, cells, points)
    document = to_json(summary, paper, bound)
    (request.folder / NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (request.folder / TIMELINES).write_text(json.dumps(timelines) + "\n", encoding="utf-8")
    metadata = {"commit": origin.commit, "version": origin.version, "profiles": json.dumps(origin.profiles)}
    try:
        write_parquet(points, request.folder / PARQUET, metadata)
    except ImportError:
        report(1.0, f"{PARQUET} is left out: install slidingserve[evaluation] for it")
    return summary


def begin(sweep: Sweep, folder: Path, data: Path | None) -> Provenance:
    """Checks that everything can be run, and claims the folder; raises what `check` raises, StoreError."""
    check(sweep, data)
    origin = provenance(sweep.profiles)
    claim(folder, origin)
    return origin


def check(sweep: Sweep, data: Path | None) -> None:
    """Looks whether everything that is to be run exists and can finish, before anything is run.

    Raises:
        ProfileError, WorkloadError, TraceError, UnknownPolicyError, PolicyParameterError: what they say.
    """
    for profile in sweep.profiles:
        limits = engine_limits(hardware(profile))
        for policy in sweep.policies:
            name, parameters = registry.parse_spec(policy)
            registry.build(name, parameters, PolicyContext(limits, profile))
        for workload in sweep.workloads:
            check_workload(profile, workload, sweep.effort.final.requests, data)


def check_workload(profile: str, workload: str, requests: int, data: Path | None) -> None:
    """Raises WorkloadError unless the workload exists, has so many requests, and an idle engine can meet nearly all."""
    known = hardware(profile)
    work = base_workload(profile, workload, 0, requests, data)
    check_feasible(work, ProfileTimer(known), profile=profile, limits=engine_limits(known))


def shard_of(text: str) -> tuple[int, int]:
    """Reads ``3/8``; raises ValueError with the remedy."""
    part, _, whole = text.partition("/")
    try:
        k, n = int(part), int(whole)
    except ValueError:
        raise ValueError(f"shard {text!r}: write it as k/n, such as 3/8") from None
    if not 1 <= k <= n:
        raise ValueError(f"shard {text!r}: k must be from 1 to n")
    return k, n
