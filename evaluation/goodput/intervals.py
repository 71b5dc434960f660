"""How sure a goodput is: a bootstrap over runs of consecutive requests, the same ones for every policy.

The misses of a run are known in `BLOCKS` blocks of consecutive requests. A resample draws as many blocks (of any seed)
as there are, and takes of each policy the misses in just these blocks at every rate; as arrivals and lengths are the
same for all policies, what two policies share cancels out of their difference. Misses of neighbouring blocks are not
quite independent (a queue outlives the border), so an interval is a little too narrow near capacity; blocks hold 150
requests of a run of 3000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from evaluation.goodput.points import Point
from slidingserve.contract.values import Floats

RESAMPLES = 1000

CLAIMED = 0.03
"""The least difference of two goodputs that is claimed."""


def goodput_samples(
    curve: Sequence[Sequence[Point]], limit: float, seed: int = 0, resamples: int = RESAMPLES
) -> Floats:
    """Returns the goodput in each resample, float64[resamples], requests/s; the same blocks for the same ``seed``.

    ``curve`` holds, for each rate in ascending order, the complete runs of all seeds. Between two rates the share of
    misses is taken to grow along a straight line; where all rates meet the limit, or none does, the goodput is the
    last, or 0.
    """
    missed = np.array([[count for run in runs for count in run.missed_by_block] for runs in curve], np.float64)
    sizes = np.array([size for run in curve[0] for size in run.block_sizes], np.float64)
    rates = np.array([runs[0].key.rate for runs in curve])
    drawn = np.random.default_rng(seed).integers(0, sizes.size, (resamples, sizes.size))
    shares = missed[:, drawn].sum(axis=2) / sizes[drawn].sum(axis=1)  # [rates, resamples]
    return np.array([crossing(rates, column, limit) for column in shares.T])


def crossing(rates: Floats, shares: Floats, limit: float) -> float:
    """Returns the rate at which the share of misses first passes the limit; see `goodput_samples`."""
    over = np.flatnonzero(shares > limit)
    if over.size == 0:
        return float(rates[-1])
    first = int(over[0])
    if first == 0:
        return 0.0
    low, high = shares[first - 1], shares[first]
    return float(rates[first - 1] + (rates[first] - rates[first - 1]) * (limit - low) / (high - low))


def interval(samples: Floats) -> tuple[float, float]:
    """Returns the 2.5th and 97.5th percentile."""
    low, high = np.percentile(samples, [2.5, 97.5]).tolist()
    return low, high


def ratio_interval(ours: Floats, theirs: Floats) -> tuple[float, float]:
    """Returns the 95 % interval of the ratio of two goodputs from paired resamples; infinite where theirs is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(theirs > 0, ours / theirs, math.inf)
    low, high = np.percentile(ratio, [2.5, 97.5], method="nearest").tolist()
    return low, high


def complete_curve(points: Mapping[float, Sequence[Point]], seeds: int) -> list[list[Point]]:
    """Returns the rates for which all seeds have a complete run, ascending."""
    return [
        sorted((run for run in runs if run.complete), key=lambda run: run.key.seed)
        for _, runs in sorted(points.items())
        if sum(run.complete for run in runs) == seeds
    ]


def is_clear(ratio: float, low: float, high: float) -> bool:
    """Says whether the interval of a ratio leaves out 1 and the difference is one that is claimed."""
    return (low > 1.0 or high < 1.0) and abs(ratio - 1.0) >= CLAIMED
