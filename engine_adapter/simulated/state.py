"""The simulated engine's state as columns, and the kernels that run one batch on it.

A request's handle is its row in the table. Kernels are independent of the sidecar's: an engine trusts nobody, so a plan
from outside is used only through order and minimum, and a wrong one can delay requests but not break the engine.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.digest import Words
from engine_adapter.simulated.timing import iteration_seconds
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

Table: TypeAlias = NDArray[Any]

PENDING, WAITING, RUNNING, DONE = 0, 1, 2, 3

REQUEST = np.dtype(
    [
        ("state", np.int64),
        ("prompt", np.int64),  # tokens
        ("wanted", np.int64),  # output tokens that the request will generate
        ("generated", np.int64),  # output tokens so far
        ("computed", np.int64),  # tokens in the KV cache
        ("blocks", np.int64),  # KV blocks held
        ("arrival", np.float64),  # seconds
        ("first", np.float64),  # time of the first token; NaN before
        ("last", np.float64),  # time of the latest token; NaN before
        ("ttft", np.float64),  # SLOs, seconds
        ("tbt", np.float64),
        ("late", np.bool_),  # a token came after its deadline
        ("gap_missed", np.bool_),  # a gap between tokens was longer than the TBT SLO
        ("batch", np.int64),  # number of the last batch that it was in
    ]
)

# Positions in the engine's vector of counts. The waiting queue is an array with room at both ends.
RUNNING_COUNT, WAITING_START, WAITING_STOP, FREE_BLOCKS, GAP_COUNT, PREEMPTIONS = 0, 1, 2, 3, 4, 5
COUNTS = 6


@kernel
def blocks_of(tokens: int, block_tokens: int) -> int:
    """Returns the KV blocks that ``tokens`` tokens take."""
    return -(-tokens // block_tokens)


@kernel
def missing_tokens(requests: Table, row: int) -> int:
    """Returns the tokens that have to be computed before the request's next token comes."""
    missing: int = requests[row].prompt + requests[row].generated - requests[row].computed
    return missing


@kernel
def queue_arrivals(requests: Table, waiting: Ints, counts: Ints, first: int, stop: int, longest: int) -> int:
    """Queues rows ``first`` to ``stop``; those of more than ``longest`` tokens are done at once. Returns how many."""
    rejected = 0
    for row in range(first, stop):
        if requests[row].prompt + requests[row].wanted > longest:
            requests[row].state = DONE
            rejected += 1
        else:
            requests[row].state = WAITING
            waiting[counts[WAITING_STOP]] = row
            counts[WAITING_STOP] += 1
    return rejected


@kernel
def load_batch(
    requests: Table,
    running: Ints,
    waiting: Ints,
    counts: Ints,
    handles: Ints,
    tokens: Ints,
    victims: Ints,
    batch_number: int,
    budget: int,
    max_sequences: int,
    block_tokens: int,
    rows: Ints,
    chunk: Ints,
    context: Ints,
    words: Words,
    first_word: int,
    step: int,
) -> tuple[int, int, bool]:
    """Preempts, admits and allocates KV blocks as the plan says, within the engine's own limits.

    ``words`` gets the plan as it came, from ``first_word``: step, count, then handle and tokens of each.

    What is impossible is left out or made smaller. Returns the size of the batch (its rows, chunks and contexts are
    written), the number of preempted victims (moved to the front of ``victims``), and whether all of it was as planned.
    ``batch_number`` is one that no earlier call used. Linear in the plan, plus the waiting queue when it admits from
    its middle, plus the running queue for each victim.
    """
    words[first_word] = step & 0xFFFFFFFF
    words[first_word + 1] = len(handles)
    as_planned = True
    preempted = 0
    for position in range(len(victims)):
        row = victims[position]
        if 0 <= row < len(requests) and requests[row].state == RUNNING:
            preempt(requests, running, waiting, counts, row)
            victims[preempted] = row
            preempted += 1
        else:
            as_planned = False
    count = 0
    from_head = True
    for position in range(len(handles)):
        row = handles[position]
        asked = tokens[position]
        words[first_word + 2 + 2 * position] = row
        words[first_word + 3 + 2 * position] = asked
        given = 0
        if 0 <= row < len(requests) and requests[row].batch != batch_number:
            state = requests[row].state
            if state == RUNNING or (state == WAITING and counts[RUNNING_COUNT] < max_sequences):
                given = min(asked, missing_tokens(requests, row), budget)
                total = requests[row].computed + given
                extra = 0
                if total > requests[row].blocks * block_tokens:
                    extra = blocks_of(total, block_tokens) - requests[row].blocks
                if extra > counts[FREE_BLOCKS]:
                    given = 0
                elif given > 0:
                    counts[FREE_BLOCKS] -= extra
                    requests[row].blocks += extra
                    requests[row].batch = batch_number
                    budget -= given
                    rows[count] = row
                    chunk[count] = given
                    context[count] = requests[row].computed
                    count += 1
                    if state == WAITING:
                        requests[row].state = RUNNING
                        running[counts[RUNNING_COUNT]] = row
                        counts[RUNNING_COUNT] += 1
                        if waiting[counts[WAITING_START]] == row:
                            counts[WAITING_START] += 1
                        else:
                            from_head = False
        if given <= 0 or given != asked:
            as_planned = False
    if not from_head:
        counts[WAITING_STOP] = keep_state(requests, waiting, counts[WAITING_START], counts[WAITING_STOP], WAITING)
    return count, preempted, as_planned


@kernel
def preempt(requests: Table, running: Ints, waiting: Ints, counts: Ints, row: int) -> None:
    """Takes a running request's KV blocks away (it is computed anew later) and puts it at the head of the queue."""
    requests[row].state = WAITING
    counts[FREE_BLOCKS] += requests[row].blocks
    requests[row].blocks = 0
    requests[row].computed = 0
    counts[RUNNING_COUNT] = keep_state(requests, running, 0, counts[RUNNING_COUNT], RUNNING)
    counts[WAITING_START] -= 1
    waiting[counts[WAITING_START]] = row
    counts[PREEMPTIONS] += 1


@kernel
def keep_state(requests: Table, order: Ints, start: int, stop: int, state: int) -> int:
    """Drops the rows of another state from ``order[start:stop]``; returns the new stop. Linear in the range."""
    kept = start
    for position in range(start, stop):
        row = order[position]
        if requests[row].state == state:
            order[kept] = row
            kept += 1
    return kept


@kernel
def finish_batch(
    requests: Table,
    running: Ints,
    counts: Ints,
    rows: Ints,
    chunk: Ints,
    count: int,
    end_seconds: float,
    gaps: Floats,
    finished: Ints,
) -> int:
    """Advances every request of the batch; its tokens come at ``end_seconds``. Returns the number of finished rows.

    Deadline of the k-th token: arrival + TTFT + (k - 1) TBT; none where an SLO of these is 0. Linear in the
    batch, plus the running queue when a request finishes.
    """
    done = 0
    for position in range(count):
        row = rows[position]
        request = requests[row]
        request.computed += chunk[position]
        if request.computed < request.prompt + request.generated:
            continue
        has_deadline = request.ttft > 0.0 and (request.generated == 0 or request.tbt > 0.0)
        if has_deadline and end_seconds > request.arrival + request.ttft + request.generated * request.tbt:
            request.late = True
        if request.generated == 0:
            request.first = end_seconds
        else:
            gap = end_seconds - request.last
            gaps[counts[GAP_COUNT]] = gap
            counts[GAP_COUNT] += 1
            if 0.0 < request.tbt < gap:
                request.gap_missed = True
        request.last = end_seconds
        request.generated += 1
        if request.generated >= request.wanted:
            request.state = DONE
            counts[FREE_BLOCKS] += request.blocks
            request.blocks = 0
            finished[done] = row
            done += 1
    if done > 0:
        counts[RUNNING_COUNT] = keep_state(requests, running, 0, counts[RUNNING_COUNT], RUNNING)
    return done


@kernel
def run_batch(
    requests: Table,
    running: Ints,
    counts: Ints,
    rows: Ints,
    chunk: Ints,
    context: Ints,
    count: int,
    start_seconds: float,
    constant_seconds: float,
    model: Floats,
    gaps: Floats,
    finished: Ints,
) -> tuple[float, int]:
    """`iteration_seconds` and `finish_batch` in one call, for timers that are a packed profile.

    Returns (duration in seconds, number of finished rows).
    """
    seconds = iteration_seconds(chunk, context, count, model) + constant_seconds
    done = finish_batch(requests, running, counts, rows, chunk, count, start_seconds + seconds, gaps, finished)
    return seconds, done
