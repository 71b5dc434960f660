"""How much requests generate, learned from those that have ended.

A policy sees no request end; it sees that one is gone. What it had generated when it was last seen, and the token of
the iteration in which it ended, is its length; requests that were aborted count as ended, and with iterations in flight
a length may be off by as many tokens.
"""

from __future__ import annotations

import numpy as np

from sidecar.queues import FREE, Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

CLASSES = 64  # classes that are told apart; those beyond share the last row
_COUNT, _MEAN, _SQUARES = 0, 1, 2

KNOWN = np.dtype(
    [
        ("handle", np.int64),  # whom the row is about; -1: nobody
        ("class_index", np.int64),
        ("output", np.int64),  # tokens generated when last seen
        ("first_seconds", np.float64),  # when its first token was there; 0: not known
        ("relegated", np.bool_),
        ("spared", np.bool_),  # another was relegated in its stead
    ]
)
"""What a policy remembers of the request in a slot."""


def make_known(capacity: int) -> Table:
    """Returns a table of KNOWN rows about nobody."""
    known: Table = np.zeros(capacity, KNOWN)
    known["handle"] = -1
    return known


def make_history() -> Floats:
    """Returns float64[CLASSES, 3]: requests that have ended, mean of what they generated, sum of squared deviations."""
    return np.zeros((CLASSES, 3))


@kernel
def recognise(requests: Table, known: Table, slot: int) -> None:
    """Makes the slot's row one about the request that is there now. O(1)."""
    row = known[slot]
    if row.handle != requests[slot].handle:
        row.handle = requests[slot].handle
        row.class_index = min(requests[slot].class_index, CLASSES - 1)
        row.output = 0
        row.first_seconds = 0.0
        row.relegated = False
        row.spared = False


@kernel
def learn_lengths(requests: Table, known: Table, seen: Ints, count: int, history: Floats) -> None:
    """Counts those of the ``count`` slots in ``seen`` whose request is gone (Welford's running moments). O(count)."""
    for position in range(count):
        slot = seen[position]
        row = known[slot]
        if requests[slot].state != FREE and requests[slot].handle == row.handle:
            continue
        moments = history[row.class_index]
        moments[_COUNT] += 1.0
        deviation = row.output + 1.0 - moments[_MEAN]
        moments[_MEAN] += deviation / moments[_COUNT]
        moments[_SQUARES] += deviation * (row.output + 1.0 - moments[_MEAN])


@kernel
def expected_output(history: Floats, class_index: int, unknown: float) -> float:
    """Returns mean + 2 standard deviations of what a class generates; ``unknown`` until one of it has ended."""
    moments = history[min(class_index, CLASSES - 1)]
    if moments[_COUNT] == 0.0:
        return unknown
    return float(moments[_MEAN] + 2.0 * np.sqrt(moments[_SQUARES] / moments[_COUNT]))
