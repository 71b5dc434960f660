"""When a published claim holds here, worked out from figures alone.

A claim is a gain, for which more is better: a ratio of goodputs (nothing gained: 1), or the difference of two shares of
violations (nothing gained: 0). It was measured as a value with a 95 % interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from evaluation.goodput.intervals import CLAIMED
from slidingserve.contract.values import Floats


class Verdict(StrEnum):
    """What is to be said of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not hold"
    UNKNOWN = "cannot be told within the interval"


@dataclass(frozen=True, slots=True)
class Scale:
    """What a gain is counted in: the value that means none, and the least that is claimed at all."""

    nothing: float
    least: float


RATIO = Scale(1.0, 1.0 + CLAIMED)
"""Goodputs: nothing is claimed below 3 %."""

SHARE = Scale(0.0, 0.01)
"""Violations: nothing below one point, about the noise of a run of 600 requests."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A measured gain and its 95 % interval (NaN: unknown)."""

    value: float
    low: float = math.nan
    high: float = math.nan


def judge(gain: Gain, published: float | None, scale: Scale) -> Verdict:
    """Returns the verdict on the claim that there is this gain.

    It holds where the gain is clear (its interval leaves out none at all, and it is not too small to be claimed) and
    may be as large as the published one; in part where it is clear, but smaller. It does not hold where the interval
    leaves out any gain worth claiming. Else it cannot be told. ``published`` None: any clear gain will do.
    """
    if math.isnan(gain.value) or math.isnan(gain.low) or math.isnan(gain.high):
        return Verdict.UNKNOWN
    if gain.high < scale.least:
        return Verdict.FAILS
    if gain.low > scale.nothing and gain.value >= scale.least:
        return Verdict.HOLDS if published is None or gain.high >= published else Verdict.IN_PART
    return Verdict.UNKNOWN


def judge_order(pairs: Sequence[Verdict]) -> Verdict:
    """Returns the verdict on an order, from those on the gain of each pair in it; how large the gains are is no matter.

    In part: some pairs are in order, and some are not.
    """
    right = sum(verdict in (Verdict.HOLDS, Verdict.IN_PART) for verdict in pairs)
    wrong = sum(verdict is Verdict.FAILS for verdict in pairs)
    if wrong:
        return Verdict.IN_PART if right else Verdict.FAILS
    return Verdict.HOLDS if pairs and right == len(pairs) else Verdict.UNKNOWN


def in_words(verdicts: Sequence[Verdict]) -> str:
    """Returns how many claims hold, such as ``holds on 3 of 5, does not hold on 2``."""
    counts = Counter(verdicts)
    first, *others = [f"{verdict} on {counts[verdict]}" for verdict in Verdict if counts[verdict]] or ["holds on none"]
    return ", ".join([f"{first} of {len(verdicts)}", *others])


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5th percentile of Student's t by degrees of freedom from 1; beyond, the last one is a little too wide."""


def mean_gain(differences: Floats) -> Gain:
    """Returns the mean of paired differences, float64[n], one for each seed, with its 95 % interval (Student's t).

    The seeds are what is independent: within an overloaded run a queue makes neighbours miss together. One seed says
    nothing about others, so then there is no interval.
    """
    mean = float(differences.mean())
    if differences.size < 2:
        return Gain(mean)
    error = float(differences.std(ddof=1)) / math.sqrt(differences.size)
    reach = _STUDENT[min(differences.size - 1, len(_STUDENT)) - 1] * error
    return Gain(mean, mean - reach, mean + reach)


def share_gain(worse: Sequence[float], better: Sequence[float]) -> Gain:
    """Returns how much smaller the second policy's shares of violations are, seed by seed."""
    return mean_gain(np.array(worse) - np.array(better))
