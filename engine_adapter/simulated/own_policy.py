"""The engine's own policy, as vLLM V1's scheduler (release 0.32): used when nobody else decides in time.

Plain Python on purpose: it is the readable reference that the sidecar's ``vllm`` policy is tested against, and it runs
only when there is no answer from outside.
"""

from __future__ import annotations

from engine_adapter.simulated.state import FREE_BLOCKS, RUNNING_COUNT, WAITING_START, WAITING_STOP, Table
from slidingserve.contract.values import Ints


def schedule_own(
    requests: Table,
    running: Ints,
    waiting: Ints,
    counts: Ints,
    budget: int,
    max_sequences: int,
    block_tokens: int,
    *,
    reserve_full_prompt: bool = True,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns ((row, tokens) of the batch, rows to preempt). Linear in the running and the admitted requests."""
    free = int(counts[FREE_BLOCKS])
    live = running[: counts[RUNNING_COUNT]].tolist()
    batch: list[tuple[int, int]] = []
    victims: list[int] = []

    def needed(row: int, tokens: int) -> int:
        request = requests[row]
        return max(0, -(-int(request["computed"] + tokens) // block_tokens) - int(request["blocks"]))

    def missing(row: int) -> int:
        request = requests[row]
        return int(request["prompt"] + request["generated"] - request["computed"])

    turn = 0
    while turn < len(live) and budget > 0:
        row = live[turn]
        tokens = min(missing(row), budget)
        while needed(row, tokens) > free:
            victim = live.pop()
            victims.append(victim)
            free += int(requests[victim]["blocks"])
            if victim == row:
                return batch, victims
        free -= needed(row, tokens)
        budget -= tokens
        batch.append((row, tokens))
        turn += 1
    if victims:
        return batch, victims
    for row in waiting[counts[WAITING_START] : counts[WAITING_STOP]].tolist():
        if budget <= 0 or len(live) >= max_sequences:
            break
        tokens = min(missing(row), budget)
        if needed(row, tokens) > free or (reserve_full_prompt and needed(row, missing(row)) > free):
            break
        free -= needed(row, tokens)
        budget -= tokens
        live.append(row)
        batch.append((row, tokens))
    return batch, victims
