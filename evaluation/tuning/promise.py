"""The rate that can be promised: one that also holds in a window of the same traffic that was not seen.

A goodput is the highest rate at which at most 1 % missed in the window that was recorded. Another window has other
rushes, so the same rate may miss more in it: in half of all windows, if nothing is done about it. How much more is
estimated from how unequally the misses are spread over the recorded window, cut into `points.BLOCKS` blocks of
consecutive requests, and the lower of two figures is promised.

**A bootstrap of time blocks.** Rushes last longer than a block (in the Azure conversation trace a quarter of an hour),
so runs of `RUN` neighbouring blocks are drawn, circularly (Politis and Romano, 1992). A confidence interval of the mean
would say where the long-run share lies; the promise is for one more window, so the draw is made twice: of the recorded
window another possible record, and of that a future window. That doubles the variance, as it should: the future window
is as uncertain as the recorded one. The goodput of a future is where its share of misses crosses the limit.

**The worst stretch.** The bootstrap knows no more than twenty blocks, five of them independent, and is too sure of
itself where rushes are few and unequal: of its promises 70 to 90 % hold in traffic made to try it (docs/tuning.md). So
the promise must hold in every stretch of the recording by itself. That a whole future window is worse than the worst of
so many recorded stretches is unlikely, however misses are distributed.

Neither can know a rush that is far worse than all that were recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.goodput.intervals import crossing, interval
from evaluation.goodput.points import Point
from evaluation.goodput.rates import rate_of, step_at
from slidingserve.contract.values import Floats, Ints

RUN = 4
"""Neighbouring blocks that are drawn together."""

RESAMPLES = 2000

STRETCHES = (20, 10, 5)
"""Into how many stretches a window is cut: as many as leave `LEAST_STRETCH` requests in each, or the last."""

LEAST_STRETCH = 200
"""With fewer requests a stretch fails by a single miss or two, which says little of rushes."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a policy's runs over a window allow to promise.

    Attributes:
        rate: the promise, requests/s, a rate of the grid; 0: none can be made.
        goodput: in the recorded window, requests/s.
        low, high: between these the goodput of another window is expected: the lower of 2.5th percentile and worst
            stretch, and the 97.5th percentile. ``rate`` is ``low`` put down to the grid, and never above ``goodput``.
        samples: the goodput in each future; of two policies with runs over the same window the futures are the same.
    """

    rate: float
    goodput: float
    low: float
    high: float
    samples: Floats


def promise(curve: Sequence[Point], goodput: float, limit: float, seed: int = 0) -> Promise:
    """Makes a promise of complete runs over one window, in ascending order of their rates, each rate once.

    ``limit``: share of requests that may miss. Without any run there is no promise. O(resamples x rates x blocks).
    """
    if not curve:
        return Promise(0.0, goodput, 0.0, 0.0, np.zeros(RESAMPLES))
    samples = future_goodputs(curve, limit, seed)
    low, high = interval(samples)
    low = min(low, worst_stretch(curve, limit))
    return Promise(grid_rate_below(min(low, goodput)), goodput, low, high, samples)


def future_goodputs(curve: Sequence[Point], limit: float, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Returns the goodput in each future window, float64[resamples], requests/s; see the module."""
    rates = np.array([point.key.rate for point in curve])
    return np.array([crossing(rates, column, limit) for column in future_shares(curve, seed, resamples).T])


def future_shares(curve: Sequence[Point], seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Returns the share of misses at each rate in each future window, float64[rates, resamples]."""
    missed = np.array([point.missed_by_block for point in curve], np.float64)
    sizes = np.array(curve[0].block_sizes, np.float64)
    drawn = _drawn_twice(sizes.size, resamples, seed)
    shares: Floats = missed[:, drawn].sum(axis=2) / sizes[drawn].sum(axis=1)
    return shares


def worst_stretch(curve: Sequence[Point], limit: float) -> float:
    """Returns the least goodput of a stretch of the window, requests/s. O(rates x blocks)."""
    rates = np.array([point.key.rate for point in curve])
    shares = np.array([_stretch_shares(point) for point in curve])
    return min(crossing(rates, column, limit) for column in shares.T)


def _stretch_shares(point: Point) -> Floats:
    """Returns the share of misses in each stretch."""
    count = next((n for n in STRETCHES if point.key.requests >= n * LEAST_STRETCH), STRETCHES[-1])
    missed, sizes = (
        np.array(column, np.float64).reshape(count, -1).sum(axis=1)
        for column in (point.missed_by_block, point.block_sizes)
    )
    shares: Floats = missed / sizes
    return shares


def is_safe(point: Point, limit: float, seed: int = 0) -> bool:
    """Says whether at this rate every stretch, and 39 of 40 futures, stay within the limit."""
    if not point.complete or float(_stretch_shares(point).max()) > limit:
        return False
    return float(np.quantile(future_shares([point], seed)[0], 0.975)) <= limit


def grid_rate_below(rate: float) -> float:
    """Returns the highest rate of the grid that is not above ``rate``; 0 for 0."""
    if rate <= 0.0:
        return 0.0
    step = step_at(rate)
    return rate_of(step) if rate_of(step) <= rate else rate_of(step - 1)


def _drawn_twice(blocks: int, resamples: int, seed: int) -> Ints:
    """Returns which blocks make up each future window, int64[resamples, blocks]."""
    random = np.random.default_rng(seed)
    record, future = (_runs(random, blocks, resamples) for _ in range(2))
    drawn: Ints = np.take_along_axis(record, future, axis=1)
    return drawn


def _runs(random: np.random.Generator, blocks: int, resamples: int) -> Ints:
    """Draws runs of neighbouring places, int64[resamples, blocks]; behind the last comes the first."""
    starts = random.integers(0, blocks, (resamples, math.ceil(blocks / RUN), 1))
    places: Ints = ((starts + np.arange(RUN)) % blocks).reshape(resamples, -1)[:, :blocks]
    return places
