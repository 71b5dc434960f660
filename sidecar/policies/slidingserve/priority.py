"""MLPS, the order of the prompts (arXiv 2606.05933, equation 13).

Urgency is ``r / (rho max(s, eps))``: the share of the recent throughput that the rest of a prompt needs to be in time.
The order is (not protected, not urgent, r): shortest first among those that are equally pressing. ``expired_last`` puts
prompts whose deadline has passed behind all others; the published formula has them first, as the most urgent. With
``order=deadline`` the earliest deadline goes first in its stead, for comparisons.
"""

from __future__ import annotations

from typing import Any

from predictor.features import ROW, TOKENS
from predictor.forecast import append_prompt
from sidecar.policies.common.intake import claim
from sidecar.policies.common.sorting import INDEX, INDEX_BITS, LONGEST, key_of_tokens
from sidecar.policies.slidingserve.workspace import Workspace
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

_NOT_URGENT = (LONGEST + 1) << INDEX_BITS
_NOT_PROTECTED = _NOT_URGENT << 1
_EXPIRED = _NOT_URGENT << 2


@kernel
def urgency(remaining: float, slack: float, throughput: float, eps_seconds: float) -> float:
    """Returns u = r / (rho max(s, eps)); throughput in tokens per second."""
    return remaining / (throughput * max(slack, eps_seconds))


@kernel
def write_keys(work: Workspace, count: int, rules: Any, throughput: float) -> None:
    """Writes a sort key for each of the first ``count`` prompts; ties go by their place in the pool. O(count)."""
    for row in range(count):
        prompt = work.pool[row]
        if rules.by_deadline and not prompt.expired:
            key = key_of_tokens(int(prompt.slack * 1e6), row)  # microseconds need no more bits than tokens
        else:
            key = key_of_tokens(prompt.remaining, row)
        urgent = urgency(prompt.remaining, prompt.slack, throughput, rules.eps_seconds) > rules.alpha
        if not (urgent or rules.by_deadline):
            key |= _NOT_URGENT
        if not prompt.protected:
            key |= _NOT_PROTECTED
        if prompt.expired and rules.expired_last:
            key |= _EXPIRED
        work.keys[0, row] = key


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
        row = keys[position] & INDEX
        prompt = work.pool[row]
        possible, seats, open_blocks, free_blocks = claim(
            prompt, seats, open_blocks, free_blocks, facts.open_blocks < 0, rules.block_tokens
        )
        facts.prompt_tokens -= prompt.remaining - possible
        if possible == 0:
            continue
        prompt.whole = possible == prompt.remaining
        prompt.remaining = possible
        work.lines[kept].row = row
        kept += 1
        if work.fill[rows, TOKENS] < enough:
            append_prompt(work.fill, rows, prompt.remaining, prompt.context)
            rows += 1
    return kept, rows
