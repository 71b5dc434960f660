"""The rates that are looked at: one geometric grid for everybody, so that runs of different policies can be paired."""

from __future__ import annotations

import math

STEP = 1.02
"""Neighbouring rates differ by 2 %, the tolerance of a goodput."""


def rounded(value: float) -> float:
    """Returns a number with 6 digits, so that it reads the same everywhere and a rate names its run."""
    return float(f"{value:.6g}")


def rate_of(step: int) -> float:
    """Returns the rate of a grid point in requests/s."""
    return rounded(STEP**step)


def step_at(rate: float) -> int:
    """Returns the grid point nearest to a rate above 0."""
    return round(math.log(rate) / math.log(STEP))
