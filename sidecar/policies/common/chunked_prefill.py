"""Sarathi-Serve's iteration with prompts in one of three orders: what `sarathi`, `sarathi-edf`, `sarathi-srpf` share.

Decodes first, then prompts, each with ``min(remaining, cap - used)``; the fixed budget counts decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.features import TOKENS
from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, OUTPUT_TOKENS, SECONDS, check_ranges
from sidecar.policies.common.fixed_budget import Buffers, FixedBudgetPolicy, spend
from sidecar.policies.common.intake import PROTECT_NOBODY, list_expired, raised_cap, start_slack_seconds, take_in
from sidecar.policies.common.sorting import GROUP, key_of_seconds, key_of_tokens, sort_keys
from sidecar.queues import Table
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

IN_TURN, BY_DEADLINE, BY_LENGTH = range(3)
"""As they run and wait, the first that finds no place ends the admission; earliest deadline first; shortest first."""


@dataclass(frozen=True, slots=True)
class DeadlineParameters:
    """Settings of a policy that looks at deadlines.

    Attributes:
        max_tokens: token budget of an iteration, decodes included; 0: the engine's limit.
        expired_last: prompts whose deadline has passed go last, shortest first; false: the original order.
        output_tokens: what a request with only a TTLT SLO is taken to generate if it brings no max_output_tokens.
        seconds_per_output: how long each of those tokens is taken to need.
    """

    max_tokens: int = 256
    expired_last: bool = True
    output_tokens: float = 15.0
    seconds_per_output: float = 0.4

    def __post_init__(self) -> None:
        check_ranges(self, {"max_tokens": CAP, "output_tokens": OUTPUT_TOKENS, "seconds_per_output": SECONDS})


def deadline_policy(
    version: str, path: str, order: int, parameters: DeadlineParameters, context: PolicyContext
) -> FixedBudgetPolicy:
    """Returns a policy with prompts in an order, expired ones last if its parameters say so."""
    return FixedBudgetPolicy(
        version,
        path,
        decide_in_order,
        context,
        parameters.max_tokens,
        order,
        parameters.expired_last,
        parameters.output_tokens,
        parameters.seconds_per_output,
    )


@kernel
def decide_in_order(
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
    order: int,
    expired_last: bool,
    output_tokens: float,
    seconds_per_output: float,
) -> tuple[int, int, int]:
    """Returns (entries, victims, demoted) written. O(n log n) for n live requests; O(n) in turn."""
    pool, keys, batch = buffers
    in_turn = order == IN_TURN
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
        in_turn,
        pool,
        batch,
    )
    sorted_row = 0
    if in_turn:  # the order in which the pool holds them
        for row in range(prompts):
            pool[row].expired = False
            keys[0, row] = row
    else:
        for row in range(prompts):
            prompt = pool[row]
            slack = start_slack_seconds(requests, prompt.slot, now_seconds, output_tokens, seconds_per_output)
            prompt.expired = expired_last and slack <= 0.0
            if order == BY_DEADLINE and not prompt.expired:
                key = key_of_seconds(slack, row)
            else:
                key = key_of_tokens(prompt.remaining, row)
            keys[0, row] = GROUP + key if prompt.expired else key
        sorted_row = sort_keys(keys, prompts)
    placed = keys[sorted_row]
    used = int(batch[TOKENS])
    left = raised_cap(cap, used, limit) - used
    count = spend(pool, placed, prompts, left, seats, open_blocks, free_blocks, block_tokens, in_turn, entries, decodes)
    return count, victim_count, list_expired(pool, placed, prompts, demoted)
