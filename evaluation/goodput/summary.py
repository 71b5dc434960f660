"""What a sweep came to.

The goodput of each policy with its best cap and with one for everything, how sure each figure is, and how policies
compare. One JSON document (schema 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.goodput.extras import overload_rate
from evaluation.goodput.intervals import complete_curve, goodput_samples, interval, is_clear, ratio_interval
from evaluation.goodput.points import Point
from evaluation.goodput.provenance import Provenance
from evaluation.goodput.sweep import Cell, Sweep, common_cap
from slidingserve.contract.values import Floats

SCHEMA = 1
NAME = "goodput.json"

Reference = Callable[[str, str, str], float | None]
"""A published figure, or a bound, for (profile, workload, policy); None where there is none."""


@dataclass(frozen=True, slots=True)
class OneCap:
    """The goodput with the cap that does best over all workloads, requests/s."""

    cap: int
    goodput: float


@dataclass(frozen=True, slots=True)
class CellSummary:
    """The figures of one policy on one workload and profile; goodput and its 95 % interval in requests/s.

    ``highest_looked_at``: no rate up to it fails, so the true goodput may be higher. ``by_cap``: the goodput with each
    cap in the first round, which has fewer requests than the one that counts.
    """

    profile: str
    workload: str
    policy: str
    cap: int | None
    goodput: float
    low: float | None
    high: float | None
    one_cap: OneCap | None
    highest_looked_at: bool
    violations_beyond: Mapping[str, float]
    worst_ttft_seconds: float | None
    decision_share: float | None
    prediction_error: float | None
    by_cap: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """The ratio of two policies' goodputs on one workload, each with its best cap, and its 95 % interval."""

    profile: str
    workload: str
    policy: str
    against: str
    ratio: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Says whether the interval leaves out 1 and the difference is at least 3 %, the least that is claimed."""
        return is_clear(self.ratio, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole: cells and differences in the order of the sweep."""

    sweep: Sweep
    origin: Provenance
    cells: tuple[CellSummary, ...]
    differences: tuple[Difference, ...]


def summarise(sweep: Sweep, origin: Provenance, cells: Sequence[Cell], points: Sequence[Point]) -> Summary:
    """Brings finished cells and their runs together. O(points + cells x resamples x rates)."""
    curves = _curves(sweep, points)
    samples = {id(cell): _samples(sweep, cell, curves) for cell in cells}
    one_caps = {cell.family: _common(cells, cell) for cell in cells}
    summaries = tuple(_summary(sweep, cell, samples[id(cell)], one_caps[cell.family], points) for cell in cells)
    return Summary(sweep, origin, summaries, tuple(_differences(cells, samples)))


_Curves = Mapping[tuple[str, str, str], list[list[Point]]]


def _curves(sweep: Sweep, points: Sequence[Point]) -> _Curves:
    """Returns, by profile, workload and policy text, the complete runs of the last round by rate."""
    final = sweep.effort.final
    by_rate: dict[tuple[str, str, str], dict[float, list[Point]]] = {}
    for point in points:
        key = point.key
        if key.requests == final.requests and key.seed in final.seeds:
            by_rate.setdefault((key.profile, key.workload, key.policy), {}).setdefault(key.rate, []).append(point)
    return {name: complete_curve(rates, len(final.seeds)) for name, rates in by_rate.items()}


def _samples(sweep: Sweep, cell: Cell, curves: _Curves) -> Floats | None:
    curve = curves.get((cell.profile, cell.workload, cell.text(cell.best)), [])
    return goodput_samples(curve, sweep.limit) if len(curve) > 1 else None


def _common(cells: Sequence[Cell], like: Cell) -> int | None:
    return common_cap([cell for cell in cells if cell.family == like.family])


def _summary(
    sweep: Sweep, cell: Cell, samples: Floats | None, one_cap: int | None, points: Sequence[Point]
) -> CellSummary:
    found = cell.final[cell.best]
    text, final = cell.text(cell.best), sweep.effort.final
    low, high = (None, None) if samples is None else interval(samples)
    mine = [
        p
        for p in points
        if (p.key.profile, p.key.workload, p.key.policy, p.key.requests)
        == (cell.profile, cell.workload, text, final.requests)
        and p.complete
    ]
    at_goodput = [p for p in mine if p.key.rate == cell.goodput]
    beyond = {
        f"{factor:g}": p.violation
        for factor in sweep.overloads
        for p in mine
        if p.key.rate == overload_rate(cell.goodput, factor) and p.key.seed == final.seeds[0]
    }
    errors = [p.prediction_error for p in at_goodput if p.prediction_error is not None]
    return CellSummary(
        profile=cell.profile,
        workload=cell.workload,
        policy=cell.policy,
        cap=cell.best,
        goodput=cell.goodput,
        low=low,
        high=high,
        one_cap=OneCap(one_cap, cell.final[one_cap].goodput) if one_cap in cell.final and one_cap is not None else None,
        highest_looked_at=found.bracket.fails is None,
        violations_beyond=beyond,
        worst_ttft_seconds=max((p.ttft_quantiles[-1] for p in at_goodput), default=None),
        decision_share=max((p.decision_share for p in at_goodput), default=None),
        prediction_error=max(errors, default=None),
        by_cap=dict(sorted(cell.screened.items())),
    )


def _differences(cells: Sequence[Cell], samples: Mapping[int, Floats | None]) -> list[Difference]:
    found = []
    for cell in cells:
        for other in cells:
            if cell is other or (cell.profile, cell.workload) != (other.profile, other.workload):
                continue
            ours, theirs = samples[id(cell)], samples[id(other)]
            if ours is not None and theirs is not None and other.goodput > 0:
                low, high = ratio_interval(ours, theirs)
                ratio = cell.goodput / other.goodput
                found.append(Difference(cell.profile, cell.workload, cell.policy, other.policy, ratio, low, high))
    return found


def to_json(summary: Summary, paper: Reference, bound: Reference) -> dict[str, Any]:
    """Returns the document; what is not finite becomes null."""
    sweep, origin = summary.sweep, summary.origin
    return {
        "schema": SCHEMA,
        "kind": "goodput",
        "commit": origin.commit,
        "version": origin.version,
        "code": origin.code,
        "profiles": origin.profiles,
        "workloads": list(sweep.workloads),
        "policies": list(sweep.policies),
        "seeds": list(sweep.effort.final.seeds),
        "requests": sweep.effort.final.requests,
        "violation_limit": sweep.limit,
        "caps": list(sweep.effort.caps),
        "cells": [
            {
                "profile": cell.profile,
                "workload": cell.workload,
                "policy": cell.policy,
                "cap": cell.cap,
                "goodput": cell.goodput,
                "low": _finite(cell.low),
                "high": _finite(cell.high),
                "one_cap": None if cell.one_cap is None else {"cap": cell.one_cap.cap, "goodput": cell.one_cap.goodput},
                "paper": paper(cell.profile, cell.workload, cell.policy),
                "bound": bound(cell.profile, cell.workload, cell.policy),
                "highest_looked_at": cell.highest_looked_at,
                "violations_beyond": dict(cell.violations_beyond),
                "worst_ttft_seconds": _finite(cell.worst_ttft_seconds),
                "decision_share": _finite(cell.decision_share),
                "prediction_error": _finite(cell.prediction_error),
                "by_cap": {str(cap): goodput for cap, goodput in cell.by_cap.items()},
            }
            for cell in summary.cells
        ],
        "differences": [
            {
                "profile": d.profile,
                "workload": d.workload,
                "policy": d.policy,
                "against": d.against,
                "ratio": _finite(d.ratio),
                "low": _finite(d.low),
                "high": _finite(d.high),
                "clear": d.is_clear,
            }
            for d in summary.differences
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
