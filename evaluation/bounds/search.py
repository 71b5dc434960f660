"""Can all requests of a set be met? Search over progress vectors, each kept with the earliest time it is reached.

A state is the position of every request (see `progress`), written as one integer. Of two ways to the same state the
earlier is at least as good, as a schedule may idle. An iteration starts at once or when the last of its members
arrives: to start it later gains nothing. So the search is over the states, each expanded into all batches that the
limits allow; there is no way back, so in the order of total progress each state is expanded once.

Complexity: at most prod(positions) states, times prod(choices) batches each, where a decode has 2 choices and a prefill
one per position ahead. Pruned by: the latest time at which a request can be at a position (`Track.must`), and the least
time of all tokens that are still due by a deadline (`cover_seconds`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine_adapter.simulated.state import blocks_of
from engine_adapter.simulated.timing import iteration_seconds
from evaluation.bounds.floor import FEATURE_COUNT, UNSURE, floor_seconds
from evaluation.bounds.progress import TOLERANCE_SECONDS, Track
from slidingserve.contract.values import EngineLimits, Floats, Ints
from slidingserve.jit import kernel

INFEASIBLE, FEASIBLE, UNKNOWN = 0, 1, 2
MAX_STATES = 2**62


class Tasks(NamedTuple):
    """The requests of one set as arrays; m requests, the widest has w positions. See `Track`."""

    arrival: Floats  # float64[m]
    prompt: Ints  # int64[m]
    first: Ints  # int64[m]
    last: Ints  # int64[m]
    least: Ints  # int64[m, w]
    most: Ints  # int64[m, w]
    reach: Floats  # float64[m, w]: an iteration that brings it here must end by then
    must: Floats  # float64[m, w]
    weight: Ints  # int64[m]: state = sum of position x weight
    by_first: Ints  # int64[m]: order in which the first tokens are due
    by_last: Ints  # int64[m]: order in which the last tokens are due


class Rules(NamedTuple):
    """How batches are timed and what they may hold."""

    model: Floats
    cheapest: Floats  # see `cheapest_seconds`
    cover: Floats  # see `cover_seconds`
    exact: bool  # real iteration times; else floors
    preempts: bool  # progress may have been computed anew: contexts and kinds are unknown
    max_sequences: int
    kv_blocks: int
    block_tokens: int


class Memory(NamedTuple):
    """Hash table of states, of a size that is a power of two, and the heap of those to be expanded."""

    key: Ints
    stamp: Ints  # number of the search that wrote the entry
    parent: Ints
    seconds: Floats
    waiting: Ints  # 1: in the heap
    heap_key: Floats
    heap_state: Ints


def make_memory(bits: int = 19) -> Memory:
    """Returns room for 0.7 x 2**bits states."""
    size = 1 << bits
    ints = [np.zeros(size, np.int64) for _ in range(5)]
    return Memory(ints[0], ints[1], ints[2], np.zeros(size), ints[3], np.zeros(size), ints[4])


def make_tasks(chosen: list[Track]) -> Tasks:
    """Returns the arrays of a set of requests, the most urgent first; its order is that of ``chosen``.

    Raises ValueError if the states do not fit into an integer.
    """
    width = max(t.last for t in chosen) + 1
    size = len(chosen)
    weight, states = [], 1
    for t in chosen:
        weight.append(states)
        states *= t.last + 1
    if states >= MAX_STATES:
        raise ValueError(f"{states} states; take fewer or shorter requests, or a coarser granularity")
    least, most = np.zeros((size, width), np.int64), np.zeros((size, width), np.int64)
    reach, must = np.zeros((size, width)), np.zeros((size, width))
    for row, t in enumerate(chosen):
        for into, column in ((least, t.least), (most, t.most), (reach, np.minimum(t.due, t.must)), (must, t.must)):
            into[row, : t.last + 1] = column
    return Tasks(
        np.array([t.arrival for t in chosen]),
        np.array([t.prompt for t in chosen], np.int64),
        np.array([t.first for t in chosen], np.int64),
        np.array([t.last for t in chosen], np.int64),
        least,
        most,
        reach,
        must,
        np.array(weight, np.int64),
        np.argsort([t.due[t.first] for t in chosen], kind="stable").astype(np.int64),
        np.argsort([t.due[t.last] for t in chosen], kind="stable").astype(np.int64),
    )


def make_rules(
    model: Floats, cheapest: Floats, cover: Floats, limits: EngineLimits, exact: bool, preempts: bool
) -> Rules:
    """Returns the rules of an engine with these limits."""
    return Rules(
        model, cheapest, cover, exact, preempts, limits.max_sequences, limits.kv_blocks, limits.kv_block_tokens
    )


@kernel
def place_of(memory: Memory, state: int, stamp: int) -> int:
    """Returns where a state is in the table, or the free place where it belongs."""
    mask = len(memory.key) - 1
    place = ((state * 0x9E3779B97F4A7C1) >> 17) & mask
    while memory.stamp[place] == stamp and memory.key[place] != state:
        place = (place + 1) & mask
    return place


@kernel
def begin(memory: Memory, stamp: int) -> int:
    """Puts the state in which nothing is done into the table and the heap; returns the heap's size."""
    memory.key[0], memory.stamp[0], memory.parent[0] = 0, stamp, -1  # state 0 belongs to place 0
    memory.seconds[0], memory.waiting[0] = 0.0, 1
    memory.heap_key[0], memory.heap_state[0] = 0.0, 0
    return 1


@kernel
def push(memory: Memory, size: int, key: float, state: int) -> None:
    """Adds to the heap of ``size`` entries; the least key is on top."""
    keys, states = memory.heap_key, memory.heap_state
    at = size
    while at > 0 and keys[(at - 1) // 2] > key:
        keys[at], states[at] = keys[(at - 1) // 2], states[(at - 1) // 2]
        at = (at - 1) // 2
    keys[at], states[at] = key, state


@kernel
def pop(memory: Memory, size: int) -> int:
    """Removes the state with the least key from the heap of ``size`` entries and returns it."""
    keys, states = memory.heap_key, memory.heap_state
    top = states[0]
    key, state = keys[size - 1], states[size - 1]
    at, below = 0, 1
    while below < size - 1:
        if below + 1 < size - 1 and keys[below + 1] < keys[below]:
            below += 1
        if keys[below] >= key:
            break
        keys[at], states[at] = keys[below], states[below]
        at, below = below, 2 * below + 1
    keys[at], states[at] = key, state
    return int(top)


@kernel
def fits_blocks(tasks: Tasks, rules: Rules, before: Ints, after: Ints) -> bool:
    """Says whether requests and KV blocks fit the engine.

    Exact: everything that has begun and is not finished holds its blocks, as there is no preemption. Else only the
    batch itself counts: whatever a real engine does with the others, those in a batch hold their blocks.
    """
    blocks, running = 0, 0
    for i in range(len(before)):
        moved = after[i] > before[i]
        if moved or (rules.exact and before[i] > 0 and before[i] < tasks.last[i]):
            running += 1
            blocks += blocks_of(tasks.least[i, after[i]], rules.block_tokens)
    return running <= rules.max_sequences and blocks <= rules.kv_blocks


@kernel
def fill_entries(tasks: Tasks, rules: Rules, before: Ints, after: Ints, chunk: Ints, context: Ints) -> int:
    """Writes what `batch_seconds` times, as `IterationTimer` or, unless exact, `floor_seconds` takes it. O(m)."""
    count = 0
    for i in range(len(before)):
        p, q = before[i], after[i]
        if p == q:
            continue
        if p >= tasks.first[i]:
            chunk[count] = 1
            context[count] = UNSURE if rules.preempts else tasks.most[i, p]
        else:
            chunk[count] = max(1, tasks.least[i, q] - tasks.most[i, p])
            context[count] = 0 if rules.preempts else tasks.least[i, p]
            if not rules.exact and chunk[count] == 1 and tasks.most[i, p] > 0:
                context[count] = UNSURE
        count += 1
    return count


@kernel
def batch_seconds(
    tasks: Tasks, rules: Rules, before: Ints, after: Ints, entries: tuple[Ints, Ints, Ints, Ints], features: Floats
) -> float:
    """Returns how long (or, unless exact, how long at least) the iteration between two positions takes. O(m)."""
    chunk, context = entries[0], entries[1]
    count = fill_entries(tasks, rules, before, after, chunk, context)
    if rules.exact:
        return iteration_seconds(chunk, context, count, rules.model)
    return floor_seconds(chunk, context, count, rules.model, rules.cheapest, (entries[2], entries[3]), features)


@kernel
def can_still_finish(tasks: Tasks, rules: Rules, after: Ints, now: float) -> bool:
    """Says whether the tokens left fit before their deadlines, if nothing but their number took time. O(m)."""
    tokens = 0
    for i in tasks.by_first:
        if after[i] < tasks.first[i]:
            tokens += tasks.prompt[i] - tasks.most[i, after[i]]
            if now + rules.cover[tokens] > tasks.reach[i, tasks.first[i]] + TOLERANCE_SECONDS:
                return False
    tokens = 0
    for i in tasks.by_last:
        left = tasks.last[i] - max(after[i], tasks.first[i])
        if after[i] < tasks.first[i]:
            left += tasks.prompt[i] - tasks.most[i, after[i]]
        tokens += left
        if left > 0 and now + rules.cover[tokens] > tasks.reach[i, tasks.last[i]] + TOLERANCE_SECONDS:
            return False
    return True


@kernel
def search(tasks: Tasks, rules: Rules, memory: Memory, stamp: int, dive: bool, max_steps: int) -> tuple[int, int]:
    """Looks for a schedule that meets all requests of a set.

    Args:
        tasks: the set.
        rules: times and limits.
        memory: the table; after FEASIBLE it holds the way to the goal under ``stamp``.
        stamp: a number from 1 that no earlier search in this memory had.
        dive: expand the furthest state first (quick when there is a schedule) instead of each state once.
        max_steps: give up after so many steps; a step decides what one request gets in one batch.

    Returns (INFEASIBLE, FEASIBLE or UNKNOWN, steps taken).
    """
    m = len(tasks.arrival)
    before, after = np.zeros(m, np.int64), np.zeros(m, np.int64)
    tokens, start, limit = np.zeros(m + 1, np.int64), np.zeros(m + 1), np.zeros(m + 1)
    entries = (
        np.zeros(m + 2, np.int64), np.zeros(m + 2, np.int64), np.zeros(m + 2, np.int64), np.zeros(m + 2, np.int64)
    )  # fmt: skip
    features = np.zeros(FEATURE_COUNT)
    goal = 0
    for i in range(m):
        goal += tasks.last[i] * tasks.weight[i]
    heap = begin(memory, stamp)
    states, steps = 1, 0
    while heap > 0:
        state = pop(memory, heap)
        heap -= 1
        place = place_of(memory, state, stamp)
        memory.waiting[place] = 0
        limit[0], tokens[0], start[0] = np.inf, 0, memory.seconds[place]
        left = state
        for i in range(m - 1, -1, -1):
            before[i] = left // tasks.weight[i]
            left -= before[i] * tasks.weight[i]
        # Batches in rising order, the last request's choice changes fastest: position stays, or any further one.
        depth = 0
        after[0] = before[0] - 1
        while depth >= 0:
            steps += 1
            if steps > max_steps:
                return UNKNOWN, steps
            after[depth] += 1
            p, q = before[depth], after[depth]
            last_choice = p if p == tasks.last[depth] else max(p + 1, tasks.first[depth])
            if q > last_choice:
                depth -= 1
                continue
            if q == p:
                tokens[depth + 1], start[depth + 1] = tokens[depth], start[depth]
                limit[depth + 1] = min(limit[depth], tasks.must[depth, p])
            else:
                tokens[depth + 1] = tokens[depth] + max(1, tasks.least[depth, q] - tasks.most[depth, p])
                start[depth + 1] = max(start[depth], tasks.arrival[depth])
                limit[depth + 1] = min(limit[depth], tasks.reach[depth, q])
            if tokens[depth + 1] >= len(rules.cheapest):
                depth -= 1
                continue
            if start[depth + 1] + rules.cheapest[tokens[depth + 1]] > limit[depth + 1]:
                continue
            if depth < m - 1:
                depth += 1
                after[depth] = before[depth] - 1
                continue
            if tokens[m] == 0:
                continue
            if not fits_blocks(tasks, rules, before, after):
                continue
            end = start[m] + batch_seconds(tasks, rules, before, after, entries, features)
            if end > limit[m] or not can_still_finish(tasks, rules, after, end):
                continue
            child, level = 0, 0
            for i in range(m):
                child += after[i] * tasks.weight[i]
                level += after[i]
            place = place_of(memory, child, stamp)
            if memory.stamp[place] == stamp:
                if memory.seconds[place] <= end:
                    continue
            else:
                states += 1
                memory.key[place], memory.stamp[place], memory.waiting[place] = child, stamp, 0
            memory.seconds[place], memory.parent[place] = end, state
            if child == goal:
                return FEASIBLE, steps
            if memory.waiting[place] == 0:
                memory.waiting[place] = 1
                push(memory, heap, (-level if dive else level) + 1e-3 * end, child)
                heap += 1
            if states * 10 > len(memory.key) * 7 or heap >= len(memory.heap_key):
                return UNKNOWN, steps
    return INFEASIBLE, steps


def way_to_goal(tasks: Tasks, memory: Memory, stamp: int) -> list[Ints]:
    """Returns the positions after each iteration, from none to all, after a search that ended FEASIBLE."""
    state = int((tasks.last * tasks.weight).sum())
    way = []
    while state >= 0:
        positions, left = np.zeros(len(tasks.last), np.int64), state
        for i in range(len(positions) - 1, -1, -1):
            positions[i], left = divmod(left, int(tasks.weight[i]))
        way.append(positions)
        state = int(memory.parent[place_of(memory, state, stamp)])
    return way[::-1]
