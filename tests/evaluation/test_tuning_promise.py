"""Promises that hold in windows not seen, and the runs that they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.goodput.points import BLOCKS, Point
from evaluation.goodput.rates import rate_of, step_at
from evaluation.tuning.climb import Climb, climb_with
from evaluation.tuning.promise import future_shares, grid_rate_below, is_safe, promise
from tests.evaluation.made_points import LIMIT, SIZE, point


def curve(blocks: list[int]) -> list[Point]:
    """Misses that grow with the square of the rate above 1/s; at 2/s they are as told."""
    return [point(rate, [round(x * (rate - 1) ** 2) for x in blocks]) for rate in (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)]


def test_misses_spread_evenly_allow_nearly_the_goodput_rushes_far_less() -> None:
    even = promise(curve([2] * BLOCKS), 2.0, LIMIT)
    scattered = promise(curve([8, 0, 0, 0] * 5), 2.0, LIMIT)
    rush = promise(curve([8] * 5 + [0] * 15), 2.0, LIMIT)
    assert even.low == pytest.approx(even.high)
    assert rush.low <= scattered.low < even.low
    assert rush.high > even.high
    assert rush.samples.std() > 2 * scattered.samples.std(), "in runs of neighbours a rush comes whole or not at all"
    for made in (even, scattered, rush):
        assert made.rate <= min(made.low, made.goodput) < made.rate * 1.0201
        assert rate_of(step_at(made.rate)) == made.rate


def test_a_future_window_is_as_uncertain_as_the_recorded_one() -> None:
    """The variance of one more window's share is twice that of the mean: chance had its part in the record too."""
    blocks = [int(x) for x in np.random.default_rng(1).integers(0, 6, BLOCKS)]
    shares = future_shares([point(1.0, blocks)])[0]
    runs = np.array([sum(blocks[(i + k) % BLOCKS] for k in range(4)) for i in range(BLOCKS)])
    of_mean = runs.var() / (BLOCKS / 4) / (4 * SIZE) ** 2
    assert 1.5 * of_mean < shares.var() < 2.5 * of_mean
    assert shares.mean() == pytest.approx(sum(blocks) / (SIZE * BLOCKS), rel=0.05)
    assert np.array_equal(shares, future_shares([point(1.0, blocks)])[0])


def test_a_promise_of_rushes_that_come_and_go_holds_in_a_window_that_was_not_seen() -> None:
    """Traffic whose rushes come and go (correlation of 0.7 from block to block): nearly all promises hold in the window
    behind, where the goodput itself would in half of them."""
    random, windows = np.random.default_rng(3), 80
    promised = held_at_goodput = 0
    for _ in range(windows):
        load = np.zeros(2 * BLOCKS)
        for i in range(1, load.size):
            load[i] = 0.7 * load[i - 1] + random.standard_normal()
        at_two = np.exp(0.8 * load)

        def misses(rate: float, part: slice, at_two: np.ndarray[Any, Any] = at_two) -> list[int]:
            return [int(x) for x in np.minimum(SIZE, at_two[part] * (rate / 2) ** 6)]

        first, second = slice(0, BLOCKS), slice(BLOCKS, None)
        rates = [rate_of(step) for step in range(-30, 90, 8)]
        seen = [point(rate, misses(rate, first)) for rate in rates]
        goodput = max(p.key.rate for p in seen if p.violation <= LIMIT)
        made = promise(seen, goodput, LIMIT)
        assert made.rate <= goodput
        promised += sum(misses(made.rate, second)) <= LIMIT * SIZE * BLOCKS
        held_at_goodput += sum(misses(goodput, second)) <= LIMIT * SIZE * BLOCKS
    assert promised >= 0.9 * windows
    assert held_at_goodput < 0.75 * windows


def test_a_policy_that_fails_at_every_rate_promises_nothing() -> None:
    made = promise([point(1.0, [5] * BLOCKS)], 0.0, LIMIT)
    assert (made.rate, made.low, made.high) == (0.0, 0.0, 0.0)
    assert promise([], 0.0, LIMIT).rate == 0.0, "all runs were ended early"


@given(st.floats(1e-3, 1e3))
def test_a_rate_is_put_down_to_the_grid(rate: float) -> None:
    below = grid_rate_below(rate)
    assert below <= rate < below * 1.0201
    assert grid_rate_below(below) == below
    assert grid_rate_below(0.0) == 0.0


@given(st.integers(-100, 100), st.integers(-150, 150), st.integers(0, 15))
def test_a_climb_finds_the_goodput_and_a_safe_rate_below_in_few_runs(last: int, hint: int, calm: int) -> None:
    looks: list[int] = []

    def run(step: int) -> Point:
        looks.append(step)
        rush = min(SIZE, round(10 * 1.02 ** (4 * (step - last))))
        return point(rate_of(step), [rush] * (BLOCKS - calm) + [0] * calm)

    climb = Climb("h100-tp1", "w", "vllm", SIZE * BLOCKS, hint, LIMIT)
    climbed = climb_with(run, climb, -400, 400)
    assert climbed.goodput == max(p.key.rate for p in climbed.curve if p.violation <= LIMIT)
    assert run(step_at(climbed.goodput) + 1).violation > LIMIT
    assert climbed.has_top
    assert is_safe(climbed.curve[0], LIMIT)
    assert [p.key.rate for p in climbed.curve] == sorted({p.key.rate for p in climbed.curve})
    assert len(looks) <= 16 + abs(step_at(climbed.goodput) - hint) / 8


def test_a_climb_ends_at_the_ends_of_the_grid_and_believes_no_rate_above_one_that_fails() -> None:
    def level(misses: int) -> Any:
        return lambda step: point(rate_of(step), [misses] * BLOCKS)

    climb = Climb("h100-tp1", "w", "vllm", SIZE * BLOCKS, 20, LIMIT)
    assert climb_with(level(9), climb, 0, 40).goodput == 0.0
    free = climb_with(level(0), climb, 0, 40)
    assert (free.goodput, free.has_top) == (rate_of(40), False)

    def stalls(step: int) -> Point:
        """Worse at low rates; a rush makes rates unsafe, so that it goes down and sees it."""
        blocks = [9] * BLOCKS if step < 10 else [40] + [0] * (BLOCKS - 1) if step <= 30 else [99] * BLOCKS
        return point(rate_of(step), blocks)

    stalled = climb_with(stalls, climb, -20, 60)
    assert (stalled.goodput, promise(stalled.curve, stalled.goodput, LIMIT).rate) == (0.0, 0.0)
