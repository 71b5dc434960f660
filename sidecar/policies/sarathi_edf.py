"""Policy ``sarathi-edf``: Sarathi-Serve, prompts by earliest deadline; the baseline of QoServe and of SlidingServe.

Source: ``edf`` in the artifact of QoServe (microsoft/sarathi-serve, commit 72339db5). Decodes first, then prompts,
started or not, by

- ``arrival + TTFT`` (of one that had output before it was preempted: its next token's deadline), or
- ``arrival + TTLT - n_out * 0.4 s`` of a request that has only a TTLT SLO (n_out known or 15),

each with ``min(remaining, max_tokens - used)``; the fixed budget counts decodes. QoServe uses 256 tokens, SlidingServe
does not say.

Earliest deadline first breaks down once deadlines have passed: those requests come first for ever, and nobody is in
time. So prompts whose deadline has passed go last, the least remaining work first; ``expired_last=false`` is the
original.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.features import TOKENS
from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, OUTPUT_TOKENS, SECONDS, check_ranges
from sidecar.policies.common.fixed_budget import Buffers, FixedBudgetPolicy, spend
from sidecar.policies.common.intake import PROTECT_NOBODY, list_expired, raised_cap, start_slack_seconds, take_in
from sidecar.policies.common.sorting import GROUP, key_of_seconds, key_of_tokens, sort_keys
from sidecar.policies.registry import register
from sidecar.queues import Table
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

NAME = "sarathi-edf"


@dataclass(frozen=True, slots=True)
class SarathiEdfParameters:
    """Settings of the policy.

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


@kernel
def decide_earliest_deadline_first(
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
    expired_last: bool,
    output_tokens: float,
    seconds_per_output: float,
) -> tuple[int, int, int]:
    """Returns (entries, victims, demoted) written. O(n log n) for n live requests."""
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
        False,
        pool,
        batch,
    )
    for row in range(prompts):
        prompt = pool[row]
        slack = start_slack_seconds(requests, prompt.slot, now_seconds, output_tokens, seconds_per_output)
        prompt.expired = expired_last and slack <= 0.0
        if prompt.expired:
            keys[0, row] = GROUP + key_of_tokens(prompt.remaining, row)
        else:
            keys[0, row] = key_of_seconds(slack, row)
    order = keys[sort_keys(keys, prompts)]
    used = int(batch[TOKENS])
    left = raised_cap(cap, used, limit) - used
    count = spend(pool, order, prompts, left, seats, open_blocks, free_blocks, block_tokens, False, entries, decodes)
    return count, victim_count, list_expired(pool, order, prompts, demoted)


def build(parameters: SarathiEdfParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return FixedBudgetPolicy(
        "sarathi-edf/1",
        "edf",
        decide_earliest_deadline_first,
        context,
        parameters.max_tokens,
        parameters.expired_last,
        parameters.output_tokens,
        parameters.seconds_per_output,
    )


register(NAME, SarathiEdfParameters, build, "Sarathi-Serve with prompts by earliest deadline, expired ones last")
