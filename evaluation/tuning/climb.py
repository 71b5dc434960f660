"""The last round for one setting: its goodput with all requests, and the runs below it that a promise is made of.

A search that only looks for the goodput ends runs early where the answer is known. Here every run counts twice, so the
rates are climbed in strides, whole runs each: up or down to the first pair of which one meets the limit and one fails,
between them by halves, then down until a rate is safe in other windows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evaluation.goodput.points import Point, RunKey
from evaluation.goodput.rates import rate_of, step_at
from evaluation.goodput.runner import FOLLOW, estimated_capacity
from evaluation.goodput.task import FINAL_LOWEST_LOAD, Place, stored_run
from evaluation.tuning.promise import is_safe

STRIDE, LONGEST_STRIDE = 8, 16
"""Grid points between two rates: 17 %, and 37 % far below the goodput."""

HIGHEST_LOAD = 3.0
"""Share of the estimated capacity at which a climb ends: for a short while more can be met than served for long."""


@dataclass(frozen=True, slots=True)
class Climb:
    """What is run: one setting over one part of the traffic. ``hint``: grid point where the goodput may be."""

    profile: str
    workload: str
    policy: str
    requests: int
    hint: int
    limit: float

    def key(self, step: int) -> RunKey:
        """Returns what identifies the run at a grid point."""
        return RunKey(self.profile, self.workload, self.policy, rate_of(step), 0, self.requests)


@dataclass(frozen=True, slots=True)
class Climbed:
    """What came of it.

    Attributes:
        curve: complete runs by ascending rate.
        goodput: the highest rate up to which each of them is within the limit, requests/s; 0: none.
        has_top: whether a higher rate failed.
        lowest_rate: of those that were run, requests/s.
    """

    climb: Climb
    curve: tuple[Point, ...]
    goodput: float
    has_top: bool
    lowest_rate: float


def run_climb(climb: Climb, place: Place) -> Climbed:
    """Climbs with runs from the store, or makes them."""
    capacity = estimated_capacity(climb.profile, climb.workload, min(climb.requests, 600), place.data)
    allowed = int(FOLLOW * climb.limit * climb.requests)

    def run(step: int) -> Point:
        return stored_run(climb.key(step), allowed, place)

    return climb_with(run, climb, step_at(capacity * FINAL_LOWEST_LOAD), step_at(capacity * HIGHEST_LOAD))


def climb_with(run: Callable[[int], Point], climb: Climb, lowest: int, highest: int) -> Climbed:
    """Climbs between two grid points. About 8 runs from a good hint."""
    points: dict[int, Point] = {}

    def meets(step: int) -> bool:
        if step not in points:
            points[step] = run(step)
        return points[step].complete and points[step].violation <= climb.limit

    hint = min(max(climb.hint, lowest), highest)
    good, bad = _first_pair(meets, hint, lowest, highest)
    while good is not None and bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if meets(middle) else (good, middle)
    if good is not None:
        _descend(meets, lambda step: is_safe(points[step], climb.limit), min(points), lowest)
    return _climbed(climb, points)


def _first_pair(meets: Callable[[int], bool], hint: int, lowest: int, highest: int) -> tuple[int | None, int | None]:
    """Returns a grid point that meets and the next stride that fails; None where the end of the grid comes first."""
    step = hint
    if meets(step):
        while step < highest:
            further = min(step + STRIDE, highest)
            if not meets(further):
                return step, further
            step = further
        return step, None
    while step > lowest:
        lower = max(step - STRIDE, lowest)
        if meets(lower):
            return lower, step
        step = lower
    return None, step


def _descend(meets: Callable[[int], bool], safe: Callable[[int], bool], step: int, lowest: int) -> None:
    """Goes down until a rate meets the limit with room for other windows."""
    stride = STRIDE
    while step > lowest and not (meets(step) and safe(step)):
        step = max(step - stride, lowest)
        stride = min(stride + 2, LONGEST_STRIDE)
        meets(step)


def _climbed(climb: Climb, points: dict[int, Point]) -> Climbed:
    goodput, has_top = 0.0, False
    for step in sorted(points):
        if not points[step].complete or points[step].violation > climb.limit:
            has_top = True
            break
        goodput = points[step].key.rate
    curve = tuple(points[step] for step in sorted(points) if points[step].complete)
    return Climbed(climb, curve, goodput, has_top, rate_of(min(points)))
