"""Finds the goodput on the grid of rates: the highest point up to which every point looked at meets the SLOs.

Violations need not grow with the rate (a policy that stalls is worse when there is little to do), so the points below
are looked at too, coarsely; the last step is a bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Meets = Callable[[int], bool]
"""Says of a grid point whether its violations are within the limit."""

COARSE = 12
"""Grid points between two looks in the coarse pass: a factor of 1.27."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """The last grid point that meets and the first that does not.

    None: nothing down to the lowest meets, or nothing up to the highest fails.
    """

    meets: int | None
    fails: int | None


def search_upwards(meets: Meets, lowest: int, highest: int, resolution: int = 1) -> Bracket:
    """Looks from ``lowest`` on in coarse steps, at most at ``highest``, then halves the interval.

    Ends when it is ``resolution`` grid points long. O((highest - lowest) / COARSE + log COARSE) looks.
    """
    return _upwards(meets, (*range(lowest, highest, COARSE), highest), resolution)


def search_around(
    meets: Meets, hint: int, lowest: int, highest: int, resolution: int = 1, checks: Sequence[int] = (1,)
) -> Bracket:
    """Looks at ``hint`` minus so many coarse steps, then around it in growing steps, then halves the interval.

    For a hint of good quality about half the looks of `search_upwards`.
    """
    good: int | None = None
    for steps in checks:
        point = hint - steps * COARSE
        if point < lowest:
            continue
        if not meets(point):
            return _downwards(meets, point, good, lowest, resolution)
        good = point
    stride, point = 2, hint
    if not meets(point):
        return _downwards(meets, point, good, lowest, resolution)
    while point < highest:
        further = min(point + stride, highest)
        if not meets(further):
            return Bracket(*_halve(meets, point, further, resolution))
        point, stride = further, min(2 * stride, COARSE)
    return Bracket(point, None)


def _upwards(meets: Meets, points: Sequence[int], resolution: int) -> Bracket:
    good: int | None = None
    for point in points:
        if not meets(point):
            return Bracket(None, point) if good is None else Bracket(*_halve(meets, good, point, resolution))
        good = point
    return Bracket(good, None)


def _downwards(meets: Meets, fails: int, good: int | None, lowest: int, resolution: int) -> Bracket:
    """Narrows the interval below a point that fails; ``good`` is a point below that meets, if one is known."""
    stride, point = 2, fails
    while True:
        point = max(point - stride, lowest if good is None else good)
        if point == good or (point < fails and meets(point)):
            return Bracket(*_halve(meets, point, fails, resolution))
        if point <= lowest:
            return Bracket(None, point)
        fails, stride = point, 2 * stride


def _halve(meets: Meets, good: int, fails: int, resolution: int) -> tuple[int, int]:
    while fails - good > resolution:
        middle = (good + fails) // 2
        if meets(middle):
            good = middle
        else:
            fails = middle
    return good, fails
