"""The paper's Table 4: what each part of SlidingServe is worth, on mixed-v1.

A ladder: EDF with a fixed cap, then the SlidingChunker in its place (prompts still by deadline), then MLPS for the
order, then the BatchConstructor, which is all of SlidingServe. Each rung has its best cap. Goodput, and violations at
the paper's 3 requests/s; on hardware that is not the paper's at the same multiple of the top rung's goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.goodput.caps import Effort, planned_requests
from evaluation.goodput.extras import overload_rate
from evaluation.goodput.points import RunKey, with_cap
from evaluation.goodput.store import read_points
from evaluation.goodput.summary import CellSummary, Summary, summarise
from evaluation.goodput.sweep import Report, Sweep, cells_of, search_cells
from evaluation.reproduce.goodput import ratio_of
from evaluation.reproduce.overload import shares_of
from evaluation.reproduce.paper import (
    ABLATION_WORKLOAD,
    HARDWARE,
    LADDER,
    OVERLOAD_FACTOR,
    OVERLOAD_RATE,
    QWEN,
    Rung,
)
from evaluation.reproduce.result import Claim, Reproduced, percent, table
from evaluation.reproduce.runs import LOOKS, Parts, Runs, Say, Setup, Work, how_long, opened
from evaluation.reproduce.verdicts import RATIO, SHARE, judge, judge_order, share_gain

TOP = LADDER[-1]


@dataclass(frozen=True, slots=True)
class AblationRequest:
    """What to reproduce. ``seeds``: of the violations, which take far less time than a goodput."""

    profiles: tuple[str, ...]
    folder: Path
    effort: Effort
    seeds: int
    limit: float = 0.01
    jobs: int = 0

    @property
    def setup(self) -> Setup:
        """The same for runs at one rate."""
        return Setup(self.profiles, self.folder, self.effort.final.requests, self.seeds, jobs=self.jobs)


@dataclass(frozen=True, slots=True)
class Ladder:
    """What came of the rungs on one profile: goodputs, and violations (a share for each seed) at one rate."""

    profile: str
    cells: Mapping[str, CellSummary]
    rate: float
    shares: Mapping[str, Sequence[float]]


def reproduce_ablation(request: AblationRequest, report: Report, say: Say) -> Reproduced:
    """Searches the goodput of each rung, and runs all of them beyond it.

    Raises what `opened` and `run_point` raise.
    """
    texts = tuple(rung.policy for rung in LADDER)
    sweep = Sweep(request.profiles, (ABLATION_WORKLOAD,), texts, request.effort, request.limit, overloads=())
    with opened(request.setup, sweep.workloads, texts) as runs:
        say(how_long(_expected(request), request.setup))
        parts = Parts(report)
        parts.begin(0.9)
        cells = cells_of(sweep)
        search_cells(sweep, cells, runs.place, runs.pool, parts.update)
        summary = summarise(sweep, runs.origin, cells, read_points(request.folder))
        parts.begin(1.0)
        ladders = _overloaded(runs, summary, parts.update)
    return compare(summary, ladders)


def _expected(request: AblationRequest) -> float:
    places = [(profile, ABLATION_WORKLOAD) for profile in request.profiles]
    searched = len(LADDER) * LOOKS * planned_requests(request.effort, has_caps=True)
    ran = float(len(LADDER) * request.seeds * request.effort.final.requests)
    return Work(dict.fromkeys(places, searched), dict.fromkeys(places, ran)).seconds(TOP.policy, request.setup)


def overloaded_rate(profile: str, goodput: float) -> float:
    """Returns the rate for the violations, in requests/s; 0 where there is no goodput to multiply."""
    return OVERLOAD_RATE if profile == HARDWARE else overload_rate(goodput, OVERLOAD_FACTOR)


def _overloaded(runs: Runs, summary: Summary, report: Report) -> list[Ladder]:
    cells = {(cell.profile, cell.policy): cell for cell in summary.cells}
    rates = {p: overloaded_rate(p, cells[p, TOP.policy].goodput) for p in summary.sweep.profiles}
    texts = {place: with_cap(cell.policy, cell.cap) for place, cell in cells.items()}
    keys = {
        (profile, rung.policy): [
            RunKey(profile, ABLATION_WORKLOAD, texts[profile, rung.policy], rate, seed, runs.setup.requests)
            for seed in runs.seeds
        ]
        for profile, rate in rates.items()
        for rung in LADDER
        if rate > 0
    }
    points = runs.make([key for group in keys.values() for key in group], report)
    return [
        Ladder(
            profile,
            {rung.policy: cells[profile, rung.policy] for rung in LADDER},
            rate,
            {rung.policy: shares_of(points, keys.get((profile, rung.policy), ())) for rung in LADDER},
        )
        for profile, rate in rates.items()
    ]


def compare(summary: Summary, ladders: Sequence[Ladder]) -> Reproduced:
    """Returns the table of the rungs beside the paper's, with what holds of it."""
    claims: list[Claim] = []
    sentences: list[str] = []
    for ladder in ladders:
        of_profile = claims_of(ladder, summary)
        claims += of_profile
        sentences += _sentences(ladder, of_profile)
    final = summary.sweep.effort.final
    notes = [f"the paper's figures are for {QWEN} on its own machine; ratios and order count."]
    seeds = max((len(shares) for ladder in ladders for shares in ladder.shares.values()), default=0)
    if seeds == 1:
        notes.append("one seed says nothing about others, so the violations have no interval; give more --seeds.")
    return Reproduced(
        name="ablation",
        origin=summary.origin,
        settings={
            "workload": ABLATION_WORKLOAD,
            "seeds": list(final.seeds),
            "overload_seeds": list(range(seeds)),
            "requests": final.requests,
            "caps": list(summary.sweep.effort.caps),
        },
        tables=tuple(_table(ladder) for ladder in ladders),
        claims=tuple(claims),
        sentences=tuple(sentences),
        notes=tuple(notes),
        figures=tuple(row for ladder in ladders for row in _figures(ladder)),
    )


def _table(ladder: Ladder) -> str:
    rows = []
    for rung in LADDER:
        cell, shares = ladder.cells[rung.policy], ladder.shares[rung.policy]
        rows.append(
            (
                rung.name,
                rung.policy,
                f"{cell.goodput:.3g}",
                "" if cell.low is None or cell.high is None else f"{cell.low:.3g} to {cell.high:.3g}",
                str(cell.cap),
                f"{rung.goodput:.2f}",
                percent(float(np.mean(shares)) if shares else None),
                percent(rung.violations),
            )
        )
    title = f"Ablation on {ABLATION_WORKLOAD}, {ladder.profile}: goodput in requests/s; missed at {ladder.rate:.3g}/s"
    header = ("rung", "policy", "goodput", "95 %", "cap", f"paper ({QWEN})", "missed", f"paper at {OVERLOAD_RATE:g}/s")
    return table(title, header, rows)


def claims_of(ladder: Ladder, summary: Summary) -> list[Claim]:
    """Returns the claims of each rung over the one before it, of the last over the first, and of the whole ladder."""
    claims = []
    for before, rung in (*pairwise(LADDER), (LADDER[0], TOP)):
        whole = (before, rung) == (LADDER[0], TOP)
        where = f"{rung.name}, on {before.name}" if not whole else "all of it, on EDF"
        claims += _gains(ladder, summary, before, rung, where)
    for kind, what in (("ratio", "each rung has more goodput"), ("share", "each rung misses fewer")):
        verdicts = [claim.verdict for claim in claims[:-2] if claim.kind == kind]
        claims.append(Claim(ladder.profile, "the ladder", what, "order", judge_order(verdicts)))
    return claims


def _gains(ladder: Ladder, summary: Summary, before: Rung, rung: Rung, where: str) -> list[Claim]:
    """Returns the claims on goodput and on violations that one rung makes over another."""
    ratio = ratio_of(ladder.cells[rung.policy], ladder.cells[before.policy], summary.differences)
    published = rung.goodput / before.goodput
    claims = [
        Claim(ladder.profile, where, "more goodput", "ratio", judge(ratio, published, RATIO), ratio, published),
    ]
    if ladder.shares[rung.policy]:
        fewer = share_gain(ladder.shares[before.policy], ladder.shares[rung.policy])
        points = before.violations - rung.violations
        verdict = judge(fewer, points, SHARE)
        claims.append(Claim(ladder.profile, where, "fewer misses", "share", verdict, fewer, points))
    return claims


def _sentences(ladder: Ladder, claims: Sequence[Claim]) -> list[str]:
    ours = " -> ".join(f"{ladder.cells[rung.policy].goodput:.3g}" for rung in LADDER)
    theirs = " -> ".join(f"{rung.goodput:.2f}" for rung in LADDER)
    sentences = [f"{ladder.profile}: goodput {ours} requests/s (the paper: {theirs})."]
    if ladder.rate > 0:
        missed = " -> ".join(percent(float(np.mean(ladder.shares[rung.policy]))) for rung in LADDER)
        published = " -> ".join(percent(rung.violations) for rung in LADDER)
        sentences.append(f"{ladder.profile}, missed at {ladder.rate:.3g}/s: {missed} (the paper: {published}).")
    for claim in claims:
        if claim.kind == "order":
            sentences.append(f"{ladder.profile}: that {claim.what} {claim.verdict}.")
    steps = {rung.name: [c for c in claims if c.where.startswith(f"{rung.name}, ")] for rung in LADDER[1:]}
    for name, mine in steps.items():
        words = "; ".join(f"for {claim.what} {claim.verdict}" for claim in mine)
        sentences.append(f"{ladder.profile}: that {name.removeprefix('+ ')} makes {words}.")
    return sentences


def _figures(ladder: Ladder) -> list[dict[str, Any]]:
    return [
        {
            "profile": ladder.profile,
            "rung": rung.name,
            "policy": rung.policy,
            "cap": ladder.cells[rung.policy].cap,
            "goodput": ladder.cells[rung.policy].goodput,
            "low": ladder.cells[rung.policy].low,
            "high": ladder.cells[rung.policy].high,
            "paper_goodput": rung.goodput,
            "rate": ladder.rate,
            "violations": list(ladder.shares[rung.policy]),
            "paper_violations": rung.violations,
        }
        for rung in LADDER
    ]
