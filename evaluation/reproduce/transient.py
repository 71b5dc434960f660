"""The paper's Figure 6: mixed-v1 under a load that switches every two minutes, for twenty minutes.

On the paper's hardware once at the paper's rates, 1.0 and 2.5 requests/s; on other profiles at 0.5 and 1.3 of what the
hardware can serve at all. And once at rates that stand to SlidingServe's goodput here as the paper's stand to its
goodput there (Qwen2.5-7B, 1.95 requests/s): a faster engine than the paper's is not overloaded by the paper's rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from evaluation.goodput.points import RunKey, with_cap
from evaluation.goodput.rates import rounded
from evaluation.goodput.runner import estimated_capacity
from evaluation.goodput.sweep import Report
from evaluation.reproduce import paper
from evaluation.reproduce.choice import Chosen, is_known
from evaluation.reproduce.overload import search_requests, settle, shares_of
from evaluation.reproduce.paper import POLICIES, QWEN, SLIDINGSERVE, TRANSIENT
from evaluation.reproduce.result import Claim, Reproduced, percent, table
from evaluation.reproduce.runs import Parts, Runs, Say, Setup, Work, how_long, opened
from evaluation.reproduce.verdicts import SHARE, Verdict, judge, judge_order, share_gain
from evaluation.workloads import WorkloadError, parse_workload

BASE = "mixed-v1"
LOW_OF_CAPACITY, HIGH_OF_CAPACITY = 0.5, 1.3
PAIRS = tuple((better, worse) for worse, better in combinations(POLICIES, 2))


@dataclass(frozen=True, slots=True)
class SwitchingLoad:
    """Two rates in requests/s, and what they are."""

    what: str
    low: float
    high: float

    @property
    def rate(self) -> float:
        """The mean."""
        return rounded((self.low + self.high) / 2)

    @property
    def workload(self) -> str:
        """The text of the workload."""
        return str(parse_workload(f"transient:low={self.low:.6g},high={self.high:.6g}"))

    @property
    def name(self) -> str:
        """Both rates, as text."""
        return f"{self.low:g} and {self.high:g}/s"

    def requests(self, minutes: float) -> int:
        """Returns how many arrive in so many minutes."""
        return max(1, round(60 * minutes * self.rate))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The violations under one load: by policy one share for each seed."""

    profile: str
    load: SwitchingLoad
    requests: int
    policies: tuple[Chosen, ...]
    shares: Mapping[str, Sequence[float]]


def reproduce_transient(setup: Setup, minutes: float, report: Report, say: Say) -> Reproduced:
    """Runs the policies under the switching loads. ``setup.requests`` counts only where the goodput has to be found.

    Raises what `opened` and `run_point` raise; WorkloadError for a time that is not above 0.
    """
    if not minutes > 0:
        raise WorkloadError(f"minutes {minutes:g}: give a time above 0")
    with opened(setup, (BASE,), [with_cap(policy, setup.cap) for policy in POLICIES]) as runs:
        say(how_long(_expected(setup, minutes), setup))
        parts = Parts(report)
        outcomes = []
        for number, profile in enumerate(setup.profiles):
            parts.begin((number + 0.3) / len(setup.profiles))
            policies, goodput = settle(runs, profile, BASE)
            parts.update(1.0, f"{BASE}: goodput of {SLIDINGSERVE} {goodput:g}/s")
            parts.begin((number + 1) / len(setup.profiles))
            outcomes += _run(runs, profile, loads_of(profile, goodput, setup), policies, minutes, parts.update)
        return _compare(runs, outcomes, minutes)


def _expected(setup: Setup, minutes: float) -> float:
    runs = 2 * len(POLICIES) * setup.seeds
    work = Work()
    for profile in setup.profiles:
        capacity = estimated_capacity(profile, BASE, 100, setup.data)
        work.searched[profile, BASE] = search_requests(setup, profile, BASE)
        work.ran[profile, BASE] = runs * 60 * minutes * 0.6 * capacity
    return work.seconds(with_cap(SLIDINGSERVE, setup.cap), setup)


def loads_of(profile: str, goodput: float, setup: Setup) -> list[SwitchingLoad]:
    """Returns the paper's load, or one by capacity, and the one that matches SlidingServe's goodput (if it has one)."""
    if profile == paper.HARDWARE:
        loads = [SwitchingLoad("the paper's rates", TRANSIENT.low, TRANSIENT.high)]
    else:
        capacity = estimated_capacity(profile, BASE, 600, setup.data)
        low, high = (float(f"{share * capacity:.3g}") for share in (LOW_OF_CAPACITY, HIGH_OF_CAPACITY))
        loads = [SwitchingLoad("0.5 and 1.3 of capacity", low, high)]
    if goodput > 0:
        scale = goodput / paper.GOODPUT[QWEN][SLIDINGSERVE][BASE]
        low, high = (float(f"{scale * rate:.3g}") for rate in (TRANSIENT.low, TRANSIENT.high))
        loads.append(SwitchingLoad("as the paper's, by goodput", low, high))
    return loads


def _run(
    runs: Runs,
    profile: str,
    loads: Sequence[SwitchingLoad],
    policies: tuple[Chosen, ...],
    minutes: float,
    report: Report,
) -> list[Outcome]:
    keys = {
        (load, one.policy): [
            RunKey(profile, load.workload, one.text, load.rate, seed, load.requests(minutes)) for seed in runs.seeds
        ]
        for load in loads
        for one in policies
    }
    points = runs.make([key for group in keys.values() for key in group], report)
    return [
        Outcome(
            profile,
            load,
            load.requests(minutes),
            policies,
            {one.policy: shares_of(points, keys[load, one.policy]) for one in policies},
        )
        for load in loads
    ]


def _compare(runs: Runs, outcomes: Sequence[Outcome], minutes: float) -> Reproduced:
    claims = [claim for outcome in outcomes for claim in claims_of(outcome)]
    notes = [
        f"the paper's figures are for {QWEN} on its own machine; differences are compared as percentage points, seed "
        "by seed.",
    ]
    if any(not is_known(outcome.policies) for outcome in outcomes):
        notes.append(
            f"every policy has the cap {runs.setup.cap}; `slidingserve reproduce goodput --out {runs.setup.folder}` "
            "before this gives each its best."
        )
    return Reproduced(
        name="transient",
        origin=runs.origin,
        settings={"minutes": minutes, "period_seconds": TRANSIENT.period_seconds, "seeds": list(runs.seeds)},
        tables=(_table(outcomes),),
        claims=tuple(claims),
        sentences=tuple(_sentence(outcome, claims) for outcome in outcomes),
        notes=tuple(notes),
        figures=tuple(row for outcome in outcomes for row in _figures(outcome)),
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        for one in outcome.policies:
            shares = outcome.shares[one.policy]
            is_first = one is outcome.policies[0]
            rows.append(
                (
                    outcome.profile if is_first else "",
                    outcome.load.what if is_first else "",
                    f"{outcome.load.low:g} and {outcome.load.high:g}" if is_first else "",
                    one.text,
                    percent(float(np.mean(shares))),
                    f"{percent(min(shares))} to {percent(max(shares))}",
                    percent(TRANSIENT.violations[one.policy]),
                )
            )
    title = f"Requests that miss a deadline, {BASE} under a load that switches every {TRANSIENT.period_seconds:g} s"
    return table(title, ("profile", "load", "requests/s", "policy", "missed", "over seeds", f"paper ({QWEN})"), rows)


def claims_of(outcome: Outcome) -> list[Claim]:
    """Returns the claims of each policy over each that the paper has behind it, and of the order."""
    where = outcome.load.name
    claims = []
    for better, worse in PAIRS:
        gain = share_gain(outcome.shares[worse], outcome.shares[better])
        published = TRANSIENT.violations[worse] - TRANSIENT.violations[better]
        what = f"{better} misses fewer than {worse}"
        claims.append(Claim(outcome.profile, where, what, "share", judge(gain, published, SHARE), gain, published))
    order = judge_order([claim.verdict for claim in claims])
    claims.append(Claim(outcome.profile, where, " < ".join(reversed(POLICIES)), "order", order))
    return claims


def _sentence(outcome: Outcome, claims: Sequence[Claim]) -> str:
    mine = [claim for claim in claims if (claim.profile, claim.where) == (outcome.profile, outcome.load.name)]
    order = next(claim.verdict for claim in mine if claim.kind == "order")
    ours = ", ".join(f"{policy} {percent(float(np.mean(shares)))}" for policy, shares in outcome.shares.items())
    theirs = ", ".join(f"{policy} {percent(share)}" for policy, share in TRANSIENT.violations.items())
    full = all(claim.verdict is Verdict.HOLDS for claim in mine if claim.kind == "share")
    return (
        f"{outcome.profile} at {outcome.load.low:g} and {outcome.load.high:g} requests/s ({outcome.load.what}): {ours} "
        f"of {outcome.requests} requests miss (the paper: {theirs}). The order {order}"
        f"{', and the differences are as large as the paper has them' if full else ''}."
    )


def _figures(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "profile": outcome.profile,
            "load": outcome.load.what,
            "low": outcome.load.low,
            "high": outcome.load.high,
            "requests": outcome.requests,
            "policy": one.policy,
            "text": one.text,
            "violations": list(outcome.shares[one.policy]),
            "paper": TRANSIENT.violations[one.policy],
        }
        for one in outcome.policies
    ]
