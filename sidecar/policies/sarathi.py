"""Policy ``sarathi``: Sarathi-Serve (OSDI 2024), chunked prefill under one token budget, first come, first served.

Source: microsoft/sarathi-serve, ``sarathi_scheduler.py``. Each iteration has a budget of ``chunk_size`` tokens (the
default of 512 is the code's), which counts all tokens, and spends it on

1. every running request whose prefill is done, one token each; if a KV block lacks, the last running request is
   preempted (`common.intake.make_room`);
2. running partial prefills in the order in which they run, ``min(remaining, chunk_size - used)``;
3. waiting requests in the order of arrival, ``min(prompt, chunk_size - used)``, each with KV blocks for its whole
   prompt; the first that finds no seat or no blocks ends the admission.

What is not in it: the stages in which the published code may shrink the chunk as a prompt proceeds (off by default).
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.features import TOKENS
from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, check_ranges
from sidecar.policies.common.fixed_budget import Buffers, FixedBudgetPolicy, spend
from sidecar.policies.common.intake import PROTECT_NOBODY, raised_cap, take_in
from sidecar.policies.registry import register
from sidecar.queues import Table
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

NAME = "sarathi"


@dataclass(frozen=True, slots=True)
class SarathiParameters:
    """Settings of the policy.

    Attributes:
        max_tokens: token budget of an iteration, decodes included (Sarathi: chunk_size); 0: the engine's limit.
    """

    max_tokens: int = 512

    def __post_init__(self) -> None:
        check_ranges(self, {"max_tokens": CAP})


@kernel
def decide_first_come_first_served(
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
    pool, keys, batch = buffers
    decodes, victim_count, prompts, free_blocks, open_blocks, seats, _ = take_in(
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
    for row in range(prompts):  # the order in which the pool holds them is the published one
        keys[0, row] = row
    used = int(batch[TOKENS])
    left = raised_cap(cap, used, limit) - used
    count = spend(pool, keys[0], prompts, left, seats, open_blocks, free_blocks, block_tokens, True, entries, decodes)
    return count, victim_count, 0


def build(parameters: SarathiParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return FixedBudgetPolicy("sarathi/1", NAME, decide_first_come_first_served, context, parameters.max_tokens)


register(NAME, SarathiParameters, build, "Sarathi-Serve (OSDI 2024): chunked prefill, first come, first served")
