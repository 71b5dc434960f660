"""Who takes part in an iteration: decodes, which always get their token, and prompts, which compete for the rest.

KV capacity comes first: if the decodes' next tokens do not fit, running requests are preempted from the tail, as vLLM
does. A waiting request takes part only while its whole prompt fits beside what running prompts still need, so that no
two prompts block each other half-way. Where running prompts need more blocks than there are all the same (an engine may
have admitted them by its own rules), each gets what its turn in the order leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.features import add_decode, clear
from sidecar.policies.common.sorting import FAR_SECONDS, INDEX
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

PROMPT = np.dtype(
    [
        ("slot", np.int64),
        ("remaining", np.int64),  # r, tokens missing in the KV cache
        ("context", np.int64),  # u, tokens in the KV cache
        ("slack", np.float64),  # s, seconds to the deadline of its next token
        ("blocks", np.int64),  # KV blocks that it still needs for all of its prompt
        ("room", np.int64),  # tokens that the KV blocks it holds still take
        ("whole", np.bool_),  # there are KV blocks for all of r
        ("waiting", np.bool_),  # not admitted yet
        ("protected", np.bool_),  # g, or whatever a policy puts first
        ("expired", np.bool_),  # its deadline has passed, or a policy has given it up
        ("chosen", np.bool_),  # in the constructed batch
    ]
)
"""A prompt that wants tokens: one row for each of P, the prefilling and waiting requests."""

PROTECT_NOBODY, PROTECT_PRIORITY, PROTECT_RUNNING = 0, 1, 2
_RAISE_TOKENS = 16


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
def start_slack_seconds(
    requests: Table, slot: int, now_seconds: float, output_tokens: float, seconds_per_output: float
) -> float:
    """Returns the time until a prompt has to be computed, which for one with a TTFT SLO is that of its next token.

    One that has only a TTLT SLO must be done so long before its last token is due as its output takes: QoServe's
    artifact, ``ttft_deadline = tier_deadline - n_out * 0.4 s``, where n_out is ``max_output`` if the client told it,
    else ``output_tokens``; what has been generated already is not counted.
    """
    request = requests[slot]
    slack: float = slack_seconds(requests, slot, now_seconds)
    if request.ttft > 0.0 or request.ttlt <= 0.0:
        return slack
    expected = float(request.max_output) if request.max_output > 0 else output_tokens
    slack -= max(expected - request.output, 0.0) * seconds_per_output
    return slack


@kernel
def raised_cap(cap: int, decodes: int, limit: int) -> int:
    """Returns a cap, raised to 16 tokens above the decodes', the engine's limit at most.

    One below the decodes' would stop every prompt for good.
    """
    return max(cap, min(decodes + _RAISE_TOKENS, limit))


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
def add_prompt(
    requests: Table, slot: int, blocks: int, now_seconds: float, block_tokens: int, protect: int, prompt: Any
) -> int:
    """Fills a row of the pool with a request; returns the tokens that it misses."""
    request = requests[slot]
    prompt.slot = slot
    prompt.remaining = request.target - request.computed
    prompt.context = request.computed
    prompt.slack = slack_seconds(requests, slot, now_seconds)
    prompt.blocks = blocks
    prompt.room = request.blocks * block_tokens - request.computed
    prompt.whole = True
    prompt.waiting = request.state == WAITING
    prompt.expired = prompt.slack <= 0.0
    prompt.chosen = False
    prompt.protected = (protect == PROTECT_PRIORITY and request.priority < 0) or (
        protect == PROTECT_RUNNING and request.computed > 0 and request.state == RUNNING
    )
    remaining: int = prompt.remaining
    return remaining


@kernel
def take_in(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    victims: Ints,
    may_admit: bool,
    now_seconds: float,
    free_blocks: int,
    block_tokens: int,
    max_sequences: int,
    protect: int,
    in_turn: bool,
    pool: Table,
    batch: Floats,
) -> tuple[int, int, int, int, int, int, int]:
    """Writes every decode into the entries and the features, and every prompt into the pool.

    Running prompts come first in the pool, then waiting ones, each in the order of its queue. ``in_turn``: the first
    waiting prompt that does not fit bars those behind it; else it is left out. Returns (decodes, victims, prompts, KV
    blocks that decodes leave free, those that running prompts will not need either (below 0 if there are too few),
    seats for waiting requests, tokens that prompts miss). O(live requests).
    """
    last, victim_count, free_blocks = make_room(
        requests, running, bounds[RUNNING_COUNT], victims, free_blocks, block_tokens
    )
    open_blocks = free_blocks
    clear(batch)
    decodes = 0
    prompts = 0
    prompt_tokens = 0
    for position in range(last):
        slot = running[position]
        if is_decode(requests, slot):
            tokens = remaining_tokens(requests, slot)
            entries[decodes].slot = slot
            entries[decodes].tokens = tokens
            add_decode(batch, tokens, requests[slot].computed)
            decodes += 1
        elif requests[slot].target > requests[slot].computed:
            blocks = extra_blocks(requests[slot].target, requests[slot].blocks, block_tokens)
            open_blocks -= blocks
            prompt_tokens += add_prompt(requests, slot, blocks, now_seconds, block_tokens, protect, pool[prompts])
            prompts += 1
    seats = max_sequences - last if may_admit and victim_count == 0 else 0
    if seats > 0:
        for position in range(bounds[WAITING_START], bounds[WAITING_STOP]):
            slot = waiting[position]
            blocks = blocks_for(requests[slot].target, block_tokens)
            if blocks <= open_blocks:
                prompt_tokens += add_prompt(requests, slot, blocks, now_seconds, block_tokens, protect, pool[prompts])
                prompts += 1
            elif in_turn:
                break
    return decodes, victim_count, prompts, free_blocks, open_blocks, seats, prompt_tokens


@kernel
def claim(
    prompt: Any, seats: int, open_blocks: int, free_blocks: int, scarce: bool, block_tokens: int
) -> tuple[int, int, int, int]:
    """Takes seat and KV blocks for a prompt whose turn it is.

    A waiting one needs a seat and blocks for all of it; a running one is cut to what blocks are left if they are too
    few for all (``scarce``). Returns (tokens that it can be given; 0: it is passed over, seats, open blocks and free
    blocks that are left).
    """
    tokens: int = prompt.remaining
    if prompt.waiting:
        if seats <= 0 or prompt.blocks > open_blocks:
            return 0, seats, open_blocks, free_blocks
        return tokens, seats - 1, open_blocks - prompt.blocks, free_blocks
    if scarce:
        tokens = min(tokens, prompt.room + free_blocks * block_tokens)
        free_blocks -= extra_blocks(tokens - prompt.room, 0, block_tokens)
    return tokens, seats, open_blocks, free_blocks


@kernel
def list_expired(pool: Table, keys: Ints, count: int, demoted: Ints) -> int:
    """Writes the slots of the expired prompts, which stand at the end of the order; returns how many. O(those)."""
    listed = 0
    while listed < count and pool[keys[count - 1 - listed] & INDEX].expired:
        demoted[listed] = pool[keys[count - 1 - listed] & INDEX].slot
        listed += 1
    return listed
