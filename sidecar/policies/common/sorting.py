"""Sorting prompts by one integer each, in which their row stands in the lowest bits.

A key is ``(group, value, row)`` in one int64: whatever the policy orders by, ties go by the row in the pool, that is by
the order in which running and waiting requests stand in the queues.
"""

from __future__ import annotations

from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

INDEX_BITS = 20
INDEX = (1 << INDEX_BITS) - 1
LONGEST = (1 << 38) - 1  # most tokens that a key tells apart
FAR_SECONDS = 1e6  # and the longest time, and the slack of a request without a deadline
GROUP = 1 << 61  # above any time or number of tokens; a key has room for groups 0 to 2

_RUN = 8


@kernel
def key_of_tokens(tokens: int, row: int) -> int:
    """Returns the key of a number of tokens."""
    return (min(tokens, LONGEST) << INDEX_BITS) | row


@kernel
def key_of_seconds(seconds: float, row: int) -> int:
    """Returns the key of a time, which counts in microseconds and to FAR_SECONDS in both directions."""
    microseconds = int((min(max(seconds, -FAR_SECONDS), FAR_SECONDS) + FAR_SECONDS) * 1e6)
    return (microseconds << INDEX_BITS) | row


@kernel
def sort_keys(keys: Ints, count: int) -> int:
    """Sorts the first ``count`` keys of row 0 and returns the row that they are in then; row 1 is room to work in.

    Runs of 8 by insertion, then merging (numba takes seconds to compile numpy's sort). O(count log count).
    """
    for start in range(0, count, _RUN):
        for at in range(start + 1, min(start + _RUN, count)):
            key = keys[0, at]
            place = at
            while place > start and keys[0, place - 1] > key:
                keys[0, place] = keys[0, place - 1]
                place -= 1
            keys[0, place] = key
    row = 0
    width = _RUN
    while width < count:
        for start in range(0, count, 2 * width):
            merge(keys[row], keys[1 - row], start, min(start + width, count), min(start + 2 * width, count))
        row = 1 - row
        width *= 2
    return row


@kernel
def merge(sources: Ints, targets: Ints, start: int, middle: int, stop: int) -> None:
    """Merges the sorted ``sources[start:middle]`` and ``sources[middle:stop]`` into ``targets``. O(stop - start)."""
    left = start
    right = middle
    for at in range(start, stop):
        if right >= stop or (left < middle and sources[left] <= sources[right]):
            targets[at] = sources[left]
            left += 1
        else:
            targets[at] = sources[right]
            right += 1
