"""Policy ``sarathi-srpf``: Sarathi-Serve, shortest remaining prompt first.

Source: ``srpf`` with a fixed chunk of 256 in the artifact of QoServe (microsoft/sarathi-serve, commit 72339db5).
Decodes first, then prompts, started or not, by remaining tokens, each with ``min(remaining, max_tokens - used)``; the
fixed budget counts decodes. Ties go to running prompts, then by arrival.

Prompts whose deadline has passed go last, shortest first as well (they cannot be in time any more);
``expired_last=false`` is the original, which asks for no deadline. A deadline is that of `sarathi_edf`.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.features import TOKENS
from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, OUTPUT_TOKENS, SECONDS, check_ranges
from sidecar.policies.common.fixed_budget import Buffers, FixedBudgetPolicy, spend
from sidecar.policies.common.intake import PROTECT_NOBODY, list_expired, raised_cap, start_slack_seconds, take_in
from sidecar.policies.common.sorting import GROUP, key_of_tokens, sort_keys
from sidecar.policies.registry import register
from sidecar.queues import Table
from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

NAME = "sarathi-srpf"


@dataclass(frozen=True, slots=True)
class SarathiSrpfParameters:
    """Settings of the policy.

    Attributes:
        max_tokens: token budget of an iteration, decodes included; 0: the engine's limit.
        expired_last: prompts whose deadline has passed go last; false: the original order, by length alone.
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
def decide_shortest_first(
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
        keys[0, row] = (GROUP if prompt.expired else 0) + key_of_tokens(prompt.remaining, row)
    order = keys[sort_keys(keys, prompts)]
    used = int(batch[TOKENS])
    left = raised_cap(cap, used, limit) - used
    count = spend(pool, order, prompts, left, seats, open_blocks, free_blocks, block_tokens, False, entries, decodes)
    return count, victim_count, list_expired(pool, order, prompts, demoted)


def build(parameters: SarathiSrpfParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return FixedBudgetPolicy(
        "sarathi-srpf/1",
        "srpf",
        decide_shortest_first,
        context,
        parameters.max_tokens,
        parameters.expired_last,
        parameters.output_tokens,
        parameters.seconds_per_output,
    )


register(
    NAME, SarathiSrpfParameters, build, "Sarathi-Serve with the shortest remaining prompt first, expired ones last"
)
