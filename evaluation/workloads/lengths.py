"""Lengths of prompts and outputs: distributions solved from the mean and the 90th percentile that are published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from evaluation.workloads.checks import WorkloadError
from slidingserve.contract.values import Floats, Ints

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution of lengths: median in tokens, sigma of the logarithm."""

    median: float
    sigma: float

    def below(self, tokens: float) -> float:
        """Returns the probability of a length below ``tokens``."""
        return _NORMAL.cdf(math.log(tokens / self.median) / self.sigma)

    def clipped_mean(self, shortest: int, longest: int) -> float:
        """Returns the mean after every length was clipped to [shortest, longest]."""
        low, high = (math.log(edge / self.median) / self.sigma for edge in (shortest, longest))
        inside = _NORMAL.cdf(high - self.sigma) - _NORMAL.cdf(low - self.sigma)
        body = self.median * math.exp(self.sigma**2 / 2) * inside
        return shortest * _NORMAL.cdf(low) + body + longest * (1 - _NORMAL.cdf(high))


@dataclass(frozen=True, slots=True)
class LengthTarget:
    """What is published of a length (mean and 90th percentile, tokens), and how we clip it.

    Where ``short_share`` is above 0 the lengths are a mixture: that share follows ``short``, the rest is solved. A
    single lognormal cannot have a p90 above 2.27 times its mean.
    """

    mean: float
    p90: float
    shortest: int
    longest: int
    short_share: float = 0.0
    short: Lognormal = Lognormal(50.0, 0.8)


@cache
def solve_lengths(target: LengthTarget) -> Lognormal:
    """Returns the lognormal of the lengths that are not ``short``, so that mean and p90 hold after clipping.

    For a given sigma the p90 fixes the median; the sigma that gives the mean is found by bisection.
    """
    share = 1 - target.short_share
    above = (0.1 - target.short_share * (1 - target.short.below(target.p90))) / share
    quantile = _NORMAL.inv_cdf(1 - above)

    def candidate(sigma: float) -> Lognormal:
        return Lognormal(target.p90 * math.exp(-quantile * sigma), sigma)

    def surplus(sigma: float) -> float:
        short = target.short_share * target.short.clipped_mean(target.shortest, target.longest)
        return short + share * candidate(sigma).clipped_mean(target.shortest, target.longest) - target.mean

    low, high = 1e-3, _NORMAL.inv_cdf(0.9)
    sign = math.copysign(1.0, surplus(low))
    if sign * surplus(high) > 0:
        raise WorkloadError(f"no lognormal has mean {target.mean} and p90 {target.p90} tokens; raise short_share")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sign * surplus(middle) > 0 else (low, middle)
    return candidate(low)


def sample_lengths(target: LengthTarget, normal: Floats, uniform: Floats) -> Ints:
    """Turns standard normal and uniform draws, float64[n] each, into lengths in tokens, int64[n]."""
    rest = solve_lengths(target)
    is_short = uniform < target.short_share
    median = np.where(is_short, target.short.median, rest.median)
    sigma = np.where(is_short, target.short.sigma, rest.sigma)
    tokens = np.rint(median * np.exp(sigma * normal))
    lengths: Ints = np.clip(tokens, target.shortest, target.longest).astype(np.int64)
    return lengths
