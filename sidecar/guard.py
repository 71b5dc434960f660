"""Holds a plan against the engine's limits, whatever policy made it.

A policy, or the model it asks, may be wrong; what leaves the sidecar never asks for more tokens, requests or KV blocks
than there are, and never for a token that a request does not need. What is too much is cut; nothing is invented.
"""

from __future__ import annotations

from sidecar.queues import RUNNING, RUNNING_COUNT, WAITING, Table, extra_blocks, remaining_tokens
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel


@kernel
def enforce_limits(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    count: int,
    victims: Ints,
    victim_count: int,
    handles: Ints,
    tokens: Ints,
    victim_handles: Ints,
    stamp: int,
    free_blocks: int,
    may_admit: bool,
    budget: int,
    max_sequences: int,
    block_tokens: int,
) -> tuple[int, int, int]:
    """Cuts the plan to what is allowed, in place, and writes it as handles.

    ``stamp`` is a number that no earlier call used (it marks the slots seen in this call). Returns (entries kept,
    victims kept, entries and victims changed or dropped). Linear in the plan.
    """
    changed = 0
    kept_victims = 0
    live = bounds[RUNNING_COUNT]
    for position in range(victim_count):
        slot = victims[position]
        if not 0 <= slot < len(requests) or requests[slot].state != RUNNING or requests[slot].stamp == stamp:
            changed += 1
            continue
        requests[slot].stamp = stamp
        live -= 1
        free_blocks += requests[slot].blocks
        victims[kept_victims] = slot
        victim_handles[kept_victims] = requests[slot].handle
        kept_victims += 1
    kept = 0
    for position in range(count):
        slot = entries[position].slot
        asked = entries[position].tokens
        allowed = 0
        if 0 <= slot < len(requests) and requests[slot].stamp != stamp:
            state = requests[slot].state
            if state == RUNNING or (state == WAITING and may_admit and live < max_sequences):
                allowed = min(asked, remaining_tokens(requests, slot), budget)
                wanted = extra_blocks(requests[slot].computed + allowed, requests[slot].blocks, block_tokens)
                if allowed > 0 and wanted > free_blocks:
                    held = (requests[slot].blocks + free_blocks) * block_tokens
                    allowed = min(allowed, held - requests[slot].computed)
                    wanted = free_blocks
                if allowed > 0:
                    requests[slot].stamp = stamp
                    free_blocks -= wanted
                    budget -= allowed
                    if state == WAITING:
                        live += 1
        if allowed <= 0 or allowed != asked:
            changed += 1
        if allowed > 0:
            entries[kept].slot = slot
            entries[kept].tokens = allowed
            handles[kept] = requests[slot].handle
            tokens[kept] = allowed
            kept += 1
    return kept, kept_victims, changed
