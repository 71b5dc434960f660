"""The paper's Figure 5: how many requests miss their deadlines beyond the goodput, policy by policy.

All policies run at the same multiples of SlidingServe's goodput, with the same arrivals and lengths. The paper gives
figures for mixed-v1 at 3 requests/s only (its ablation, Qwen2.5-7B): on its own hardware that rate is run as well, on
others the same multiple of the goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.goodput.extras import overload_rate
from evaluation.goodput.points import Point, RunKey, with_cap
from evaluation.goodput.sweep import Report
from evaluation.reproduce import paper
from evaluation.reproduce.choice import Chosen, chosen, is_known
from evaluation.reproduce.paper import POLICIES, QWEN, SLIDINGSERVE
from evaluation.reproduce.result import Claim, Reproduced, percent, table
from evaluation.reproduce.runs import LOOKS, Parts, Runs, Say, Setup, Work, how_long, opened
from evaluation.reproduce.verdicts import SHARE, Gain, in_words, judge, mean_gain
from evaluation.workloads import parse_workload

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5)
"""Multiples of SlidingServe's goodput."""

LIMIT = 0.01
OVER = "above capacity"
RIVALS = tuple(policy for policy in POLICIES if policy != SLIDINGSERVE)

Shares = Mapping[str, Sequence[float]]
"""Violations by policy, one share for each seed."""


@dataclass(frozen=True, slots=True)
class Load:
    """One rate: a multiple of SlidingServe's goodput, or the paper's own rate (``factor`` None)."""

    rate: float
    factor: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """The violations of each policy on one workload and profile, in the order of the loads."""

    profile: str
    workload: str
    policies: tuple[Chosen, ...]
    goodput: float
    loads: tuple[Load, ...]
    shares: tuple[Shares, ...]


def reproduce_overload(
    setup: Setup, workloads: Sequence[str], factors: Sequence[float], report: Report, say: Say
) -> Reproduced:
    """Runs the policies at multiples of SlidingServe's goodput, which is searched for where the folder has none.

    Raises what `opened` and `run_point` raise.
    """
    texts = tuple(dict.fromkeys(str(parse_workload(text)) for text in workloads))
    with opened(setup, texts, [with_cap(policy, setup.cap) for policy in POLICIES]) as runs:
        say(how_long(_expected(setup, texts, len(factors)), setup))
        parts = Parts(report)
        places = [(profile, workload) for profile in setup.profiles for workload in texts]
        curves = []
        for number, (profile, workload) in enumerate(places):
            parts.begin((number + 0.3) / len(places))
            policies, goodput = settle(runs, profile, workload)
            parts.update(1.0, f"{workload}: goodput of {SLIDINGSERVE} {goodput:g}/s")
            parts.begin((number + 1) / len(places))
            curves.append(_curve(runs, profile, workload, policies, goodput, factors, parts.update))
        return _compare(runs, curves)


def _expected(setup: Setup, workloads: Sequence[str], factors: int) -> float:
    each = float(setup.requests * setup.seeds)
    work = Work()
    for profile in setup.profiles:
        for workload in workloads:
            work.searched[profile, workload] = search_requests(setup, profile, workload)
            work.ran[profile, workload] = len(POLICIES) * factors * each
    return work.seconds(with_cap(SLIDINGSERVE, setup.cap), setup)


def search_requests(setup: Setup, profile: str, workload: str) -> float:
    """Returns the requests of the search for SlidingServe's goodput; none where the folder has it."""
    is_there = is_known(chosen(setup.folder, profile, workload, (SLIDINGSERVE,), setup.cap))
    return 0.0 if is_there else LOOKS * setup.requests * setup.seeds


def settle(runs: Runs, profile: str, workload: str) -> tuple[tuple[Chosen, ...], float]:
    """Returns the policies with their settings, and SlidingServe's goodput: of the folder, or by a search."""
    setup = runs.setup
    policies = tuple(chosen(setup.folder, profile, workload, POLICIES, setup.cap))
    ours = next(one for one in policies if one.policy == SLIDINGSERVE)
    goodput = ours.goodput
    if goodput is None:
        goodput = runs.search(profile, workload, ours.text, LIMIT)
    return policies, goodput


def loads_of(profile: str, workload: str, goodput: float, factors: Sequence[float]) -> tuple[Load, ...]:
    """Returns the rates to run at, ascending; none where there is no goodput to multiply, but for the paper's own."""
    loads = [Load(overload_rate(goodput, factor), factor) for factor in sorted(set(factors))] if goodput > 0 else []
    if workload == paper.ABLATION_WORKLOAD:
        if profile == paper.HARDWARE:
            loads.append(Load(paper.OVERLOAD_RATE, None))
        elif goodput > 0:
            loads.append(Load(overload_rate(goodput, paper.OVERLOAD_FACTOR), None))
    return tuple(sorted(loads, key=lambda load: load.rate))


def _curve(
    runs: Runs,
    profile: str,
    workload: str,
    policies: tuple[Chosen, ...],
    goodput: float,
    factors: Sequence[float],
    report: Report,
) -> Curve:
    loads = loads_of(profile, workload, goodput, factors)
    keys = {
        (load, one.policy): [
            RunKey(profile, workload, one.text, load.rate, seed, runs.setup.requests) for seed in runs.seeds
        ]
        for load in loads
        for one in policies
    }
    points = runs.make([key for group in keys.values() for key in group], report)
    shares = tuple({one.policy: shares_of(points, keys[load, one.policy]) for one in policies} for load in loads)
    return Curve(profile, workload, policies, goodput, loads, shares)


def shares_of(points: Mapping[RunKey, Point], keys: Sequence[RunKey]) -> list[float]:
    """Returns the violations of runs, as shares of their requests."""
    return [points[key].violation for key in keys]


def _compare(runs: Runs, curves: Sequence[Curve]) -> Reproduced:
    claims = [claim for curve in curves for claim in _claims(curve)]
    notes = []
    unknown = [curve.workload for curve in curves if not is_known(curve.policies)]
    if unknown:
        notes.append(
            f"{', '.join(dict.fromkeys(unknown))}: every policy has the cap {runs.setup.cap}; `slidingserve reproduce "
            f"goodput --out {runs.setup.folder}` before this gives each its best."
        )
    if runs.setup.seeds < 2:
        notes.append("one seed says nothing about others, so there is no interval; give more --seeds.")
    return Reproduced(
        name="overload",
        origin=runs.origin,
        settings={"requests": runs.setup.requests, "seeds": list(runs.seeds)},
        tables=tuple(_table(curve) for curve in curves),
        claims=tuple(claims),
        sentences=tuple(sentence for curve in curves for sentence in _sentences(curve, claims)),
        notes=tuple(notes),
        figures=tuple(row for curve in curves for row in _figures(curve)),
    )


def _table(curve: Curve) -> str:
    header = ["load", "requests/s", *(one.text for one in curve.policies)]
    is_published = any(load.factor is None for load in curve.loads)
    rows = []
    for load, shares in zip(curve.loads, curve.shares, strict=True):
        name = "the paper's" if load.factor is None else f"{load.factor:g} x"
        row = [name, f"{load.rate:.3g}", *(percent(float(np.mean(shares[one.policy]))) for one in curve.policies)]
        if is_published:
            row.append(_published(curve) if load.factor is None else "")
        rows.append(row)
    title = (
        f"Requests that miss a deadline, {curve.workload} on {curve.profile}; load as a multiple of {SLIDINGSERVE}'s "
        f"goodput, {curve.goodput:.3g} requests/s"
    )
    return table(title, [*header, *([f"paper ({QWEN})"] if is_published else [])], rows)


def _published(curve: Curve) -> str:
    known = [(one.policy, paper.OVERLOAD_VIOLATIONS.get(one.policy)) for one in curve.policies]
    return ", ".join(f"{policy} {percent(share)}" for policy, share in known if share is not None)


def overload_gain(curve: Curve, rival: str) -> Gain:
    """Returns by how much fewer requests miss than with a rival, the mean over all loads above the goodput."""
    over = [shares for load, shares in zip(curve.loads, curve.shares, strict=True) if (load.factor or 0.0) > 1.0]
    if not over:
        return Gain(float("nan"))
    fewer = [np.array(shares[rival]) - np.array(shares[SLIDINGSERVE]) for shares in over]
    return mean_gain(np.mean(fewer, axis=0))


def _claims(curve: Curve) -> list[Claim]:
    claims = []
    for rival in RIVALS:
        gain = overload_gain(curve, rival)
        what = f"fewer misses than {rival}, {OVER}"
        claims.append(Claim(curve.profile, curve.workload, what, "share", judge(gain, None, SHARE), gain))
    for load, shares in zip(curve.loads, curve.shares, strict=True):
        if load.factor is None:
            for rival in RIVALS:
                gain = mean_gain(np.array(shares[rival]) - np.array(shares[SLIDINGSERVE]))
                theirs = paper.OVERLOAD_VIOLATIONS.get(rival)
                published = None if theirs is None else theirs - paper.OVERLOAD_VIOLATIONS[SLIDINGSERVE]
                what = f"fewer misses than {rival}, at {load.rate:.3g}/s"
                verdict = judge(gain, published, SHARE)
                claims.append(Claim(curve.profile, curve.workload, what, "share", verdict, gain, published))
    return claims


def _sentences(curve: Curve, claims: Sequence[Claim]) -> list[str]:
    where = f"{curve.workload} on {curve.profile}"
    if not any((load.factor or 0.0) > 1.0 for load in curve.loads):
        return [f"{where}: {SLIDINGSERVE} has no goodput to exceed, so nothing can be said of overload."]
    means = {one.policy: _mean_over(curve, one.policy) for one in curve.policies}
    least = min(means, key=lambda policy: means[policy])
    listed = ", ".join(f"{policy} {percent(share)}" for policy, share in means.items())
    mine = [
        claim.verdict
        for claim in claims
        if (claim.profile, claim.where) == (curve.profile, curve.workload) and claim.what.endswith(OVER)
    ]
    return [
        f"{where}: {least} degrades least. Over all loads above the goodput of {SLIDINGSERVE} on average {listed} of "
        f"the requests miss. That {SLIDINGSERVE} degrades less than its {len(mine)} rivals {in_words(mine)}."
    ]


def _mean_over(curve: Curve, policy: str) -> float:
    over = [s[policy] for load, s in zip(curve.loads, curve.shares, strict=True) if (load.factor or 0.0) > 1.0]
    return float(np.mean(over))


def _figures(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "profile": curve.profile,
            "workload": curve.workload,
            "policy": one.policy,
            "text": one.text,
            "factor": load.factor,
            "rate": load.rate,
            "violations": list(shares[one.policy]),
            "paper": paper.OVERLOAD_VIOLATIONS.get(one.policy) if load.factor is None else None,
        }
        for load, shares in zip(curve.loads, curve.shares, strict=True)
        for one in curve.policies
    ]
