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
from sidecar.queues import Table
from slidingserve.jit import kernel

_INDEX_BITS = 20
_LENGTH_BITS = 38
_NOT_URGENT = 1 << (_INDEX_BITS + _LENGTH_BITS)
_NOT_PROTECTED = _NOT_URGENT << 1
_EXPIRED = _NOT_URGENT << 2
_LONGEST = (1 << _LENGTH_BITS) - 1
_INDEX = (1 << _INDEX_BITS) - 1


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
        work.lines[row].key = key


@kernel
def sort_keys(lines: Table, count: int) -> None:
    """Sorts the first ``count`` keys by merging (numba takes seconds to compile numpy's sort). O(count log count)."""
    width = 1
    while width < count:
        for start in range(0, count, 2 * width):
            middle = min(start + width, count)
            stop = min(start + 2 * width, count)
            left = start
            right = middle
            for at in range(start, stop):
                if right >= stop or (left < middle and lines[left].key <= lines[right].key):
                    lines[at].spare = lines[left].key
                    left += 1
                else:
                    lines[at].spare = lines[right].key
                    right += 1
        for at in range(count):
            lines[at].key = lines[at].spare
        width *= 2


@kernel
def line_up(work: Workspace, count: int, rules: Any, facts: Any) -> tuple[int, int]:
    """Brings the prompts into the order of their (sorted) keys and lays out the fill (see `predictor.forecast`).

    A waiting prompt that finds no seat or no KV blocks left when it is its turn is passed over. Returns (prompts in
    the order, prompts laid out); the latter end where the window's budgets do. O(count).
    """
    for column in range(ROW):
        work.fill[0, column] = work.batch[column]
    enough = work.batch[TOKENS] + rules.budget * max(rules.window, 1)
    kept = 0
    rows = 0
    seats = facts.seats
    free_blocks = facts.free_blocks
    for position in range(count):
        row = work.lines[position].key & _INDEX
        prompt = work.pool[row]
        if prompt.waiting:
            if seats <= 0 or prompt.blocks > free_blocks:
                facts.prompt_tokens -= prompt.remaining
                continue
            seats -= 1
            free_blocks -= prompt.blocks
        work.lines[kept].row = row
        kept += 1
        if work.fill[rows, TOKENS] < enough:
            append_prompt(work.fill, rows, prompt.remaining, prompt.context)
            rows += 1
    return kept, rows
