"""The largest set without any of the known conflicts, by which the largest set that can be met is found.

A set of requests that contains an infeasible set is infeasible. So whoever meets a set leaves out at least one request
of every infeasible set: the fewest late ones are a minimum hitting set. Infeasible sets are found one at a time: take
the largest set that hits all known ones, test it; if it can be met it is an optimum, else shrink it to a smallest
infeasible set and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evaluation.bounds.search import FEASIBLE, INFEASIBLE

MAX_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Largest:
    """Rows of a largest set. ``proven``: a test says that it is feasible; else it only has no known conflict."""

    rows: tuple[int, ...]
    proven: bool


def largest_feasible(count: int, test: Callable[[tuple[int, ...]], int], conflicts: list[tuple[int, ...]]) -> Largest:
    """Returns a largest feasible subset of rows 0 .. count - 1; adds the conflicts that it finds to the list.

    ``test`` says of a set whether it is INFEASIBLE, FEASIBLE or UNKNOWN. Feasible subsets must be feasible. The size is
    an upper bound in any case: a test that does not end counts as if it had found a schedule. At most 2**count rounds,
    each with up to count + 1 tests.
    """
    while True:
        rows = _complement_of_least_hitting_set(count, conflicts)
        result = test(rows) if rows else FEASIBLE
        if result != INFEASIBLE:
            return Largest(rows, result == FEASIBLE)
        conflicts.append(_shrink(rows, test))


def _shrink(rows: tuple[int, ...], test: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
    """Returns an infeasible subset none of whose rows can be shown to be needless."""
    for row in rows:
        fewer = tuple(other for other in rows if other != row)
        if fewer and test(fewer) == INFEASIBLE:
            rows = fewer
    return rows


def _complement_of_least_hitting_set(count: int, conflicts: list[tuple[int, ...]]) -> tuple[int, ...]:
    left_out = np.arange(1 << count)
    for conflict in conflicts:
        left_out = left_out[(left_out & sum(1 << row for row in conflict)) != 0]
    least = int(left_out[np.argmin(np.bitwise_count(left_out))])
    return tuple(row for row in range(count) if not least >> row & 1)
