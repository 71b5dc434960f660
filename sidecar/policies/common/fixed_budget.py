"""Policies that spend a fixed token budget: decodes first, then prompts in some order (Sarathi-Serve and its kin).

Each of them is a kernel that takes everybody in, brings the prompts into its order and calls `spend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from predictor.features import ROW
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.common.intake import PROMPT, claim
from sidecar.policies.common.sorting import INDEX
from sidecar.queues import Queues, Table
from slidingserve.contract.values import Floats, Ints, IterationState
from slidingserve.jit import kernel


class Buffers(NamedTuple):
    """Room for one decision, used again in each; n is the mirror's capacity.

    Attributes:
        pool: PROMPT[n].
        keys: int64[2, n], see `common.sorting.sort_keys`.
        batch: float64[8], the features of the decodes.
    """

    pool: Table
    keys: Ints
    batch: Floats


def make_buffers(capacity: int) -> Buffers:
    """Returns buffers for so many live requests."""
    return Buffers(np.zeros(capacity, PROMPT), np.zeros((2, capacity), np.int64), np.zeros(ROW))


@kernel
def spend(
    pool: Table,
    keys: Ints,
    count: int,
    left: int,
    seats: int,
    open_blocks: int,
    free_blocks: int,
    block_tokens: int,
    in_turn: bool,
    entries: Table,
    filled: int,
) -> int:
    """Gives the prompts in the order of their keys what they miss, until ``left`` tokens are spent.

    ``in_turn``: a waiting prompt that finds no seat or KV blocks ends it; else it is passed over. Returns the new
    number of entries. O(prompts looked at).
    """
    scarce = open_blocks < 0
    position = 0
    while position < count and left > 0:
        prompt = pool[keys[position] & INDEX]
        possible, seats, open_blocks, free_blocks = claim(prompt, seats, open_blocks, free_blocks, scarce, block_tokens)
        tokens = min(possible, left)
        if tokens > 0:
            entries[filled].slot = prompt.slot
            entries[filled].tokens = tokens
            filled += 1
            left -= tokens
        elif in_turn and prompt.waiting:
            break
        position += 1
    return filled


class FixedBudgetPolicy:
    """Decides by one kernel and one cap.

    Args:
        version: of its decisions.
        path: what its decisions are called.
        decide_batch: takes the queues' arrays, entries, victims and demoted of the plan, may_admit, now_seconds, free
            KV blocks, the engine's limit, block size, most sequences, the cap, the buffers and ``settings``; returns
            (entries, victims, demoted).
        max_tokens: the cap, decodes included; 0: the engine's limit, which it never exceeds.
        max_sequences: most running requests; 0: the engine's limit.
        settings: what else the kernel takes.
    """

    model_version = ""

    def __init__(
        self,
        version: str,
        path: str,
        decide_batch: Callable[..., tuple[int, int, int]],
        context: PolicyContext,
        max_tokens: int,
        *settings: float,
        max_sequences: int = 0,
    ) -> None:
        limits = context.limits
        limit = limits.max_tokens_per_iteration
        self.version = version
        self._path = path
        self._decide_batch = decide_batch
        self._bounds = (
            limit,
            limits.kv_block_tokens,
            min(max_sequences or limits.max_sequences, limits.max_sequences),
            min(max_tokens or limit, limit),
        )
        self._settings = settings
        self._buffers = make_buffers(0)

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan. O(n log n) for n live requests."""
        if len(queues.requests) != len(self._buffers.pool):
            self._buffers = make_buffers(len(queues.requests))
        plan.path = self._path
        plan.count, plan.victim_count, plan.demoted_count = self._decide_batch(
            *queues.arrays,
            plan.entries,
            plan.victims,
            plan.demoted,
            iteration.may_admit,
            iteration.now_seconds,
            iteration.free_kv_blocks,
            *self._bounds,
            self._buffers,
            *self._settings,
        )
