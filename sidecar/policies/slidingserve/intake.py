"""Who takes part in this iteration (see `sidecar.policies.common.intake`), and what the decodes leave to the window."""

from __future__ import annotations

from typing import Any

from predictor.forecast import predicted_seconds
from sidecar.policies.common.intake import slack_seconds, take_in
from sidecar.policies.common.sorting import FAR_SECONDS
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel


@kernel
def take_everybody_in(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    victims: Ints,
    may_admit: bool,
    work: Workspace,
    rules: Any,
    facts: Any,
    model: Floats,
) -> tuple[int, int, int]:
    """Writes every decode into the entries and every prompt into the pool, and fills in the facts.

    ``facts`` comes with the time, the throughput and the free KV blocks. Returns (decodes, victims, prompts). O(live
    requests).
    """
    decodes, victim_count, prompts, facts.free_blocks, facts.open_blocks, facts.seats, facts.prompt_tokens = take_in(
        requests,
        running,
        waiting,
        bounds,
        entries,
        victims,
        may_admit,
        facts.now_seconds,
        facts.free_blocks,
        rules.block_tokens,
        rules.max_sequences,
        rules.protect,
        False,
        work.pool,
        work.batch,
    )
    facts.decode_seconds = predicted_seconds(work.batch, model)
    return decodes, victim_count, prompts


@kernel
def measure_window(requests: Table, entries: Table, decodes: int, rules: Any, facts: Any) -> None:
    """Fills in what the safe decodes leave to each iteration of the window.

    T_1 is their least slack, T_j the least (slack + (j - 1) TBT) less the iterations before it. O(decodes).
    """
    least = 0.0
    if rules.skip_lost_decodes:
        least = facts.decode_seconds * rules.safety
    first = second = third = fourth = FAR_SECONDS
    for position in range(decodes):
        slot = entries[position].slot
        slack = slack_seconds(requests, slot, facts.now_seconds)
        if slack > 0.0 and slack >= least:
            tbt = requests[slot].tbt if requests[slot].tbt > 0.0 else FAR_SECONDS
            first = min(first, slack)
            second = min(second, slack + tbt)
            third = min(third, slack + 2.0 * tbt)
            fourth = min(fourth, slack + 3.0 * tbt)
    facts.slack_seconds[0] = first
    facts.slack_seconds[1] = second - first if first < FAR_SECONDS else FAR_SECONDS
    facts.slack_seconds[2] = third - second if first < FAR_SECONDS else FAR_SECONDS
    facts.slack_seconds[3] = fourth - third if first < FAR_SECONDS else FAR_SECONDS
