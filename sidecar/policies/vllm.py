"""Policy ``vllm``: what vLLM V1 does by itself (first come, first served, one token budget, recompute preemption).

Source: the behaviour of ``vllm/v1/core/sched/scheduler.py`` (``schedule``), release 0.32, without speculative
decoding's placeholders, encoders and connectors. In order:

1. Running requests in queue order get what they miss, up to the budget that is left. If KV blocks run out, the LAST
   running request is preempted, again and again, until the block fits or the request itself was the last.
2. Only if nobody was preempted: waiting requests from the head, while budget and sequence limit last; the first that
   does not fit into the free blocks ends the admission. With ``reserve_full_prompt`` (vLLM:
   ``scheduler_reserve_full_isl``) the whole prompt has to fit, not just its first chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.registry import register
from sidecar.queues import (
    RUNNING_COUNT,
    WAITING_START,
    WAITING_STOP,
    Queues,
    Table,
    blocks_for,
    extra_blocks,
    remaining_tokens,
)
from slidingserve.contract.values import Ints, IterationState
from slidingserve.jit import kernel

VERSION = "vllm/1"


@dataclass(frozen=True, slots=True)
class VllmParameters:
    """Settings of the policy; each 0 means the engine's own limit, or none.

    Attributes:
        max_tokens: token budget of an iteration, decodes included (vLLM: max_num_batched_tokens).
        max_sequences: most running requests (vLLM: max_num_seqs).
        long_prefill_tokens: most prompt tokens that one request gets per iteration (vLLM:
            long_prefill_token_threshold).
        reserve_full_prompt: admit only what fits with its whole prompt (vLLM: scheduler_reserve_full_isl).
    """

    max_tokens: int = 0
    max_sequences: int = 0
    long_prefill_tokens: int = 0
    reserve_full_prompt: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences", "long_prefill_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(name, "give 0 (the engine's limit) or a positive number")


class VllmPolicy:
    """vLLM's own policy; see the module."""

    version = VERSION
    model_version = ""

    def __init__(self, parameters: VllmParameters, context: PolicyContext) -> None:
        limits = context.limits
        self._max_sequences = min(parameters.max_sequences or limits.max_sequences, limits.max_sequences)
        budget = min(parameters.max_tokens or limits.max_tokens_per_iteration, limits.max_tokens_per_iteration)
        longest = min(parameters.long_prefill_tokens, budget)
        self._settings = (budget, limits.kv_block_tokens, longest, parameters.reserve_full_prompt)

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan; linear in the running and the admitted requests."""
        plan.path = "fcfs"
        plan.count, plan.victim_count = schedule_first_come_first_served(
            *queues.arrays,
            plan.entries,
            plan.victims,
            iteration.free_kv_blocks,
            self._max_sequences if iteration.may_admit else 0,
            *self._settings,
        )


@kernel
def schedule_first_come_first_served(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    victims: Ints,
    free_blocks: int,
    max_sequences: int,
    budget: int,
    block_tokens: int,
    long_prefill_tokens: int,
    reserve_full_prompt: bool,
) -> tuple[int, int]:
    """Returns (entries, victims) written; linear in the running and the admitted requests."""
    count = 0
    victim_count = 0
    last = bounds[RUNNING_COUNT]
    position = 0
    while position < last and budget > 0:
        slot = running[position]
        tokens = min(remaining_tokens(requests, slot), budget)
        if long_prefill_tokens > 0:
            tokens = min(tokens, long_prefill_tokens)
        wanted = extra_blocks(requests[slot].computed + tokens, requests[slot].blocks, block_tokens)
        while wanted > free_blocks and last > position:
            last -= 1
            victims[victim_count] = running[last]
            victim_count += 1
            free_blocks += requests[running[last]].blocks
        if last <= position:
            break
        if tokens > 0:
            free_blocks -= wanted
            budget -= tokens
            entries[count].slot = slot
            entries[count].tokens = tokens
            count += 1
        position += 1
    if victim_count > 0:
        return count, victim_count
    room = max_sequences - last
    position = bounds[WAITING_START]
    while position < bounds[WAITING_STOP] and budget > 0 and room > 0:
        slot = waiting[position]
        missing = requests[slot].target - requests[slot].computed
        tokens = min(missing, budget)
        if long_prefill_tokens > 0:
            tokens = min(tokens, long_prefill_tokens)
        wanted = blocks_for(requests[slot].computed + tokens, block_tokens)
        if wanted > free_blocks:
            break
        if reserve_full_prompt and blocks_for(requests[slot].target, block_tokens) > free_blocks:
            break
        free_blocks -= wanted
        budget -= tokens
        room -= 1
        entries[count].slot = slot
        entries[count].tokens = tokens
        count += 1
        position += 1
    return count, 0


def _build(parameters: VllmParameters, context: PolicyContext) -> VllmPolicy:
    return VllmPolicy(parameters, context)


register("vllm", VllmParameters, _build, "first come, first served with one token budget, as vLLM by itself")
