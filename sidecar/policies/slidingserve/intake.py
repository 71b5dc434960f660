"""Who takes part in this iteration: decodes, which always get their token, and prompts, which compete for the rest.

KV capacity comes first: if the decodes' next tokens do not fit, running requests are preempted from the tail, as vLLM
does. A waiting request takes part only while its whole prompt fits beside what running prompts still need, so that no
two prompts block each other half-way. Where running prompts need more blocks than there are all the same (an engine may
have admitted them by its own rules), each gets what its turn in the order leaves.
"""

from __future__ import annotations

from typing import Any

from predictor.features import add_decode, clear
from predictor.forecast import predicted_seconds
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import (
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    WAITING_START,
    WAITING_STOP,
    Table,
    blocks_for,
    extra_blocks,
    remaining_tokens,
)
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

FAR_SECONDS = 1e6  # slack of a request without a deadline
PROTECT_PRIORITY, PROTECT_RUNNING = 1, 2


@kernel
def slack_seconds(requests: Table, slot: int, now_seconds: float) -> float:
    """Returns the time to the deadline of a request's next token: arrival + TTFT + (tokens so far) x TBT.

    A request without a TTFT SLO, or a decode without a TBT SLO, is due when its last token is; without any, never.
    """
    request = requests[slot]
    if request.ttft > 0.0 and (request.output == 0 or request.tbt > 0.0):
        slack: float = request.arrival + request.ttft + request.output * request.tbt - now_seconds
    elif request.ttlt > 0.0:
        slack = request.arrival + request.ttlt - now_seconds
    else:
        slack = FAR_SECONDS
    return min(slack, FAR_SECONDS)


@kernel
def is_decode(requests: Table, slot: int) -> bool:
    """Says whether a request misses only its latest output token."""
    return bool(requests[slot].output > 0 and requests[slot].target - requests[slot].computed == 1)


@kernel
def make_room(
    requests: Table, running: Ints, last: int, victims: Ints, free_blocks: int, block_tokens: int
) -> tuple[int, int, int]:
    """Preempts running requests from the tail until the next token of every decode that is left fits.

    Where only prompts run and not one of them can go on, the last is preempted as well, or they would wait for each
    other for ever. Returns (requests left running, victims, KV blocks that are free once the decodes have theirs).
    O(running).
    """
    for position in range(last):
        free_blocks -= _blocks_of_next(requests, running[position], block_tokens, True)
    count = 0
    while last > 0 and (free_blocks < 0 or not _can_go_on(requests, running, last, free_blocks, block_tokens)):
        last -= 1
        slot = running[last]
        victims[count] = slot
        count += 1
        free_blocks += requests[slot].blocks + _blocks_of_next(requests, slot, block_tokens, True)
    return last, count, free_blocks


@kernel
def _can_go_on(requests: Table, running: Ints, last: int, free_blocks: int, block_tokens: int) -> bool:
    """Says whether any of the running requests can be given a token; usually the first can. O(running)."""
    for position in range(last):
        slot = running[position]
        if is_decode(requests, slot) or _blocks_of_next(requests, slot, block_tokens, False) <= free_blocks:
            return True
    return False


@kernel
def _blocks_of_next(requests: Table, slot: int, block_tokens: int, of_decodes: bool) -> int:
    """Returns the KV blocks that a request lacks for its next token (a decode's with drafts); 0 for other kinds."""
    request = requests[slot]
    if is_decode(requests, slot) != of_decodes:
        return 0
    tokens = remaining_tokens(requests, slot) if of_decodes else 1
    return extra_blocks(request.computed + tokens, request.blocks, block_tokens)


@kernel
def add_prompt(requests: Table, slot: int, blocks: int, count: int, pool: Table, rules: Any, facts: Any) -> None:
    """Puts a request at row ``count`` of the pool, and its tokens into the sum."""
    request = requests[slot]
    prompt = pool[count]
    prompt.slot = slot
    prompt.remaining = request.target - request.computed
    prompt.context = request.computed
    prompt.slack = slack_seconds(requests, slot, facts.now_seconds)
    prompt.blocks = blocks
    prompt.room = request.blocks * rules.block_tokens - request.computed
    prompt.whole = True
    prompt.waiting = request.state == WAITING
    prompt.expired = prompt.slack <= 0.0
    prompt.chosen = False
    facts.prompt_tokens += prompt.remaining
    prompt.protected = (rules.protect == PROTECT_PRIORITY and request.priority < 0) or (
        rules.protect == PROTECT_RUNNING and request.computed > 0 and request.state == RUNNING
    )


@kernel
def take_in(
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
    last, victim_count, facts.free_blocks = make_room(
        requests, running, bounds[RUNNING_COUNT], victims, facts.free_blocks, rules.block_tokens
    )
    open_blocks = facts.free_blocks
    clear(work.batch)
    decodes = 0
    prompts = 0
    facts.prompt_tokens = 0
    for position in range(last):
        slot = running[position]
        if is_decode(requests, slot):
            tokens = remaining_tokens(requests, slot)
            entries[decodes].slot = slot
            entries[decodes].tokens = tokens
            add_decode(work.batch, tokens, requests[slot].computed)
            decodes += 1
        elif requests[slot].target > requests[slot].computed:
            blocks = extra_blocks(requests[slot].target, requests[slot].blocks, rules.block_tokens)
            open_blocks -= blocks
            add_prompt(requests, slot, blocks, prompts, work.pool, rules, facts)
            prompts += 1
    facts.seats = rules.max_sequences - last if may_admit and victim_count == 0 else 0
    if facts.seats > 0:
        for position in range(bounds[WAITING_START], bounds[WAITING_STOP]):
            slot = waiting[position]
            blocks = blocks_for(requests[slot].target, rules.block_tokens)
            if blocks <= open_blocks:
                add_prompt(requests, slot, blocks, prompts, work.pool, rules, facts)
                prompts += 1
    facts.open_blocks = open_blocks
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
