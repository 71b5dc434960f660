"""Prompts in their order as a fill, from which a budget is priced and then spent (see `predictor.forecast`)."""

from __future__ import annotations

from predictor.features import ROW, TOKENS, add_chunk
from predictor.forecast import append_prompt
from sidecar.policies.common.intake import claim
from sidecar.policies.common.sorting import INDEX
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel


@kernel
def start_fill(fill: Floats, batch: Floats) -> None:
    """Makes the decodes, whose features ``batch`` holds, the base of a fill."""
    for column in range(ROW):
        fill[0, column] = batch[column]


@kernel
def lay_out(
    pool: Table,
    keys: Ints,
    count: int,
    order: Ints,
    fill: Floats,
    seats: int,
    open_blocks: int,
    free_blocks: int,
    block_tokens: int,
    highest: float,
) -> int:
    """Finds places for the prompts in the order of their keys, and appends them to the fill up to ``highest`` tokens.

    ``order`` takes their rows of the pool. Returns how many prompts that takes. O(count).
    """
    scarce = open_blocks < 0
    rows = 0
    position = 0
    while position < count and fill[rows, TOKENS] < highest:
        row = keys[position] & INDEX
        prompt = pool[row]
        possible, seats, open_blocks, free_blocks = claim(prompt, seats, open_blocks, free_blocks, scarce, block_tokens)
        if possible > 0:
            prompt.remaining = possible
            order[rows] = row
            append_prompt(fill, rows, possible, prompt.context)
            rows += 1
        position += 1
    return rows


@kernel
def spend_fill(pool: Table, order: Ints, rows: int, left: int, entries: Table, count: int, batch: Floats) -> int:
    """Gives the prompts of a fill what they miss, in their order, until ``left`` tokens are spent.

    Adds them to the features; returns the new number of entries. O(prompts that get any).
    """
    place = 0
    while place < rows and left > 0:
        prompt = pool[order[place]]
        tokens = min(prompt.remaining, left)
        entries[count].slot = prompt.slot
        entries[count].tokens = tokens
        add_chunk(batch, tokens, prompt.context)
        count += 1
        left -= tokens
        place += 1
    return count
