"""MLPS, the order of the prompts (arXiv 2606.05933, equation 13).

Urgency is ``r / (rho max(s, eps))``: the share of the recent throughput that the rest of a prompt needs to be in time.
The order is (not protected, not urgent, r): shortest first among those that are equally pressing. ``expired_last`` puts
prompts whose deadline has passed behind all others; the published formula has them first, as the most urgent.
"""

from __future__ import annotations

from typing import Any

from predictor.features import ROW, TOKENS
from predictor.forecast import append_prompt
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import extra_blocks
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

_INDEX_BITS = 20
_LENGTH_BITS = 38
_NOT_URGENT = 1 << (_INDEX_BITS + _LENGTH_BITS)
_NOT_PROTECTED = _NOT_URGENT << 1
_EXPIRED = _NOT_URGENT << 2
_LONGEST = (1 << _LENGTH_BITS) - 1
_INDEX = (1 << _INDEX_BITS) - 1
_RUN = 8


@kernel
def urgency(remaining: float, slack: float, throughput: float, eps_seconds: float) -> float:
    """Returns u = r / (rho max(s, eps)); throughput in tokens per second."""
    return remaining / (throughput * max(slack, eps_seconds))


@kernel
def write_keys(work: Workspace, count: int, rules: Any, throughput: float) -> None:
    """Writes a sort key for each of the first ``count`` prompts; ties go by their place in the pool. O(count)."""
    for row in range(count):
        prompt = work.pool[row]
        key = (min(prompt.remaining, _LONGEST) << _INDEX_BITS) | row
        if urgency(prompt.remaining, prompt.slack, throughput, rules.eps_seconds) <= rules.alpha:
            key |= _NOT_URGENT
        if not prompt.protected:
            key |= _NOT_PROTECTED
        if prompt.expired and rules.expired_last:
            key |= _EXPIRED
        work.keys[0, row] = key


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


@kernel
def line_up(work: Workspace, keys: Ints, count: int, rules: Any, facts: Any) -> tuple[int, int]:
    """Brings the prompts into the order of their sorted keys and lays out the fill (see `predictor.forecast`).

    A waiting prompt that finds no seat or no KV blocks left when it is its turn is passed over, a running one is cut
    to what blocks are left, if they are too few for all. Returns (prompts in the order, prompts laid out); the latter
    end where the window's budgets do. O(count).
    """
    for column in range(ROW):
        work.fill[0, column] = work.batch[column]
    enough = work.batch[TOKENS] + rules.budget * max(rules.window, 1)
    kept = 0
    rows = 0
    seats = facts.seats
    open_blocks = facts.open_blocks
    free_blocks = facts.free_blocks
    for position in range(count):
        row = keys[position] & _INDEX
        prompt = work.pool[row]
        if prompt.waiting:
            if seats <= 0 or prompt.blocks > open_blocks:
                facts.prompt_tokens -= prompt.remaining
                continue
            seats -= 1
            open_blocks -= prompt.blocks
        elif facts.open_blocks < 0:
            possible = min(prompt.remaining, prompt.room + free_blocks * rules.block_tokens)
            facts.prompt_tokens -= prompt.remaining - possible
            if possible == 0:
                continue
            prompt.whole = possible == prompt.remaining
            prompt.remaining = possible
            free_blocks -= extra_blocks(possible - prompt.room, 0, rules.block_tokens)
        work.lines[kept].row = row
        kept += 1
        if work.fill[rows, TOKENS] < enough:
            append_prompt(work.fill, rows, prompt.remaining, prompt.context)
            rows += 1
    return kept, rows
