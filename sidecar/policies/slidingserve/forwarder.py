"""The batch forward simulator F: what a budget, or a chosen set, comes to as an allocation, and how long it takes.

Decodes are in the entries already; prompts are added in the order that `priority` gave them.
"""

from __future__ import annotations

from typing import Any

from predictor.features import TOKENS, add_chunk
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import Table
from slidingserve.jit import kernel


@kernel
def allocate(work: Workspace, row: int, tokens: int, entries: Table, count: int) -> int:
    """Gives a prompt (a row of the pool) some tokens; returns the new number of entries."""
    entries[count].slot = work.pool[row].slot
    entries[count].tokens = tokens
    add_chunk(work.batch, tokens, work.pool[row].context)
    return count + 1


@kernel
def forward_budget(work: Workspace, kept: int, budget: float, entries: Table, count: int) -> int:
    """Spends a budget on the prompts in their order; returns the new number of entries. O(prompts that get any)."""
    left = int(budget - work.batch[TOKENS])
    for place in range(kept):
        if left <= 0:
            break
        row = work.lines[place].row
        tokens = min(work.pool[row].remaining, left)
        count = allocate(work, row, tokens, entries, count)
        left -= tokens
    return count


@kernel
def forward_chosen(work: Workspace, kept: int, budget: float, rules: Any, entries: Table, count: int) -> int:
    """Gives every chosen prompt all that it misses, and with ``fill_remainder`` the others what is left of the budget.

    Returns the new number of entries. O(kept).
    """
    left = int(budget - work.batch[TOKENS])
    for place in range(kept):
        row = work.lines[place].row
        if work.pool[row].chosen:
            count = allocate(work, row, work.pool[row].remaining, entries, count)
            left -= work.pool[row].remaining
    if not rules.fill_remainder:
        return count
    for place in range(kept):
        if left <= 0:
            break
        row = work.lines[place].row
        if not work.pool[row].chosen:
            tokens = min(work.pool[row].remaining, left)
            count = allocate(work, row, tokens, entries, count)
            left -= tokens
    return count
