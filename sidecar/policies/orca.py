"""Policy ``orca``: Orca (OSDI 2022), iteration-level batching, first come, first served, whole prompts, no chunks.

Source: the paper, and ``orca_scheduler.py`` of microsoft/sarathi-serve. Each iteration every running request gets its
token; then waiting requests are admitted in the order of arrival while

- fewer than ``max_sequences`` run (Orca's batch size cap), and
- KV blocks for their prompt and the most that they may generate can be reserved beside what everybody who runs has
  reserved. A request that does not say what it may generate reserves its next token only (it may be preempted later).

The first that finds no place ends the admission. A prompt is computed in one iteration: one that does not fit into what
is left of the iteration's tokens waits for the next. What Orca does not know is an engine with a token limit: the first
prompt in line gets what there is, or it might be longer than any iteration and wait for ever. A lone request that may
generate more than the whole KV cache holds is admitted if its prompt fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.features import TOKENS
from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, check_ranges
from sidecar.policies.common.fixed_budget import Buffers, FixedBudgetPolicy
from sidecar.policies.common.intake import PROTECT_NOBODY, claim, raised_cap, take_in
from sidecar.policies.registry import register
from sidecar.queues import RUNNING_COUNT, Table, blocks_for
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

NAME = "orca"


@dataclass(frozen=True, slots=True)
class OrcaParameters:
    """Settings of the policy.

    Attributes:
        max_sequences: batch size cap: most running requests; 0: the engine's limit.
        max_tokens: most tokens of an iteration, decodes included; 0: the engine's limit, as Orca has none of its own.
    """

    max_sequences: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, {"max_sequences": CAP, "max_tokens": CAP})


@kernel
def reserved_blocks(requests: Table, slot: int, block_tokens: int) -> int:
    """Returns the KV blocks that a request reserves: for its prompt and the most that it may generate."""
    request = requests[slot]
    return blocks_for(max(request.prompt + request.max_output, request.target + 1), block_tokens)


@kernel
def decide_whole_prompts(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    victims: Ints,
    demoted: Ints,
    may_admit: bool,
    now_seconds: float,
    free_blocks: int,
    limit: int,
    block_tokens: int,
    max_sequences: int,
    cap: int,
    buffers: Buffers,
) -> tuple[int, int, int]:
    """Returns (entries, victims, demoted) written. O(live requests)."""
    pool, _, batch = buffers
    all_free = free_blocks
    count, victim_count, prompts, free_blocks, open_blocks, seats, _ = take_in(
        requests,
        running,
        waiting,
        bounds,
        entries,
        victims,
        may_admit,
        now_seconds,
        free_blocks,
        block_tokens,
        max_sequences,
        PROTECT_NOBODY,
        True,
        pool,
        batch,
    )
    scarce = open_blocks < 0
    reservable = all_free  # read only where nobody was preempted
    for position in range(bounds[RUNNING_COUNT]):
        slot = running[position]
        reservable -= reserved_blocks(requests, slot, block_tokens) - requests[slot].blocks
    alone = bounds[RUNNING_COUNT] == 0
    used = int(batch[TOKENS])
    left = raised_cap(cap, used, limit) - used
    decodes = count
    for row in range(prompts):
        prompt = pool[row]
        if left <= 0 or (prompt.remaining > left and count > decodes):
            break
        if prompt.waiting:
            reserved = reserved_blocks(requests, prompt.slot, block_tokens)
            if reserved > reservable and not alone:
                break
            reservable -= reserved
        possible, seats, open_blocks, free_blocks = claim(prompt, seats, open_blocks, free_blocks, scarce, block_tokens)
        if possible == 0 and prompt.waiting:
            break
        tokens = min(possible, left)
        if tokens > 0:
            entries[count].slot = prompt.slot
            entries[count].tokens = tokens
            count += 1
            left -= tokens
            alone = False
    return count, victim_count, 0


def build(parameters: OrcaParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return FixedBudgetPolicy(
        "orca/1",
        NAME,
        decide_whole_prompts,
        context,
        parameters.max_tokens,
        max_sequences=parameters.max_sequences,
    )


register(NAME, OrcaParameters, build, "Orca (OSDI 2022): first come, first served, whole prompts, most output reserved")
