"""The queues of one engine as columns: every live request a row of one table, every queue an order of row numbers.

The table is one numpy structured array: its fields are the columns, and a kernel takes it as a single argument (0.25 us
for each call, measured; the same columns as a NamedTuple of twenty arrays take 4 us). No Python object stands for a
request.

Time of the operations: those that touch requests are linear in the requests they touch; removing from the middle of a
queue is linear in that queue.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slidingserve.contract.values import Ints
from slidingserve.jit import kernel

Table: TypeAlias = NDArray[Any]

FREE, WAITING, RUNNING = 0, 1, 2

REQUEST = np.dtype(
    [
        # What every decision looks at comes first: 64 bytes, one cache line.
        ("handle", np.int64),
        ("state", np.int64),  # FREE, WAITING (holds no KV blocks) or RUNNING
        ("target", np.int64),  # prompt + output: the tokens that have to be in the KV cache before the next one comes
        ("computed", np.int64),  # tokens in the KV cache; of a waiting request those expected in the prefix cache
        ("output", np.int64),  # tokens generated, in flight included
        ("blocks", np.int64),  # KV blocks held
        ("speculative", np.int64),  # draft tokens that a decode of it carries
        ("stamp", np.int64),  # number of the last decision that the guard saw this request in
        ("prompt", np.int64),  # tokens
        ("in_flight", np.int64),  # of the computed tokens, those that are launched and not confirmed
        ("max_output", np.int64),  # tokens; 0: unknown
        ("arrival", np.float64),  # seconds on the engine's clock
        ("ttft", np.float64),  # SLOs in seconds
        ("tbt", np.float64),
        ("ttlt", np.float64),  # 0: none
        ("weight", np.float64),
        ("priority", np.int64),
        ("class_index", np.int64),
        ("tenant_index", np.int64),
    ]
)

ENTRY = np.dtype([("slot", np.int64), ("tokens", np.int64)])

RUNNING_COUNT, WAITING_START, WAITING_STOP = 0, 1, 2  # positions in `Queues.bounds`


class Queues:
    """The mirror's state.

    Attributes:
        requests: table of REQUEST rows, indexed by slot.
        running: slots of the running requests in the engine's order; the first ``bounds[RUNNING_COUNT]`` count.
        waiting: slots of the waiting ones in order, from ``bounds[WAITING_START]`` to ``bounds[WAITING_STOP]``.
        bounds: the three counts above, int64[3].
        arrays: the four of them, in the order in which kernels take them (to look up each costs as much as to use it).
    """

    def __init__(self, capacity: int = 256) -> None:
        self.requests: Table = np.zeros(capacity, REQUEST)
        self.running: Ints = np.zeros(capacity, np.int64)
        self.waiting: Ints = np.zeros(3 * capacity, np.int64)
        self.bounds: Ints = np.array([0, capacity, capacity], np.int64)
        self._share()
        self._slot_of: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        """Returns the number of live requests."""
        return len(self._slot_of)

    def __contains__(self, handle: int) -> bool:
        return handle in self._slot_of

    @property
    def capacity(self) -> int:
        """Rows of the table."""
        return len(self.requests)

    @property
    def running_slots(self) -> Ints:
        """Slots of the running requests, in order (a view)."""
        return self.running[: self.bounds[RUNNING_COUNT]]

    @property
    def waiting_slots(self) -> Ints:
        """Slots of the waiting requests, in order (a view)."""
        return self.waiting[self.bounds[WAITING_START] : self.bounds[WAITING_STOP]]

    def slot(self, handle: int) -> int:
        """Returns the row of a live request; raises KeyError."""
        return self._slot_of[handle]

    def slots(self, handles: Ints) -> Ints:
        """Returns the rows of live requests; raises KeyError. Linear in ``handles``."""
        return np.array([self._slot_of[handle] for handle in handles.tolist()], np.int64)

    def find(self, handles: Ints) -> list[int] | None:
        """Returns the rows of live requests, each named once; None if that is not so. Linear in ``handles``."""
        slot_of = self._slot_of
        try:
            slots = [slot_of[handle] for handle in handles.tolist()]
        except KeyError:
            return None
        return slots if len(slots) < 2 or len(set(slots)) == len(slots) else None

    def clear(self) -> None:
        """Forgets every request."""
        self.requests["state"] = FREE
        self._slot_of.clear()
        self._free = list(range(self.capacity - 1, -1, -1))
        self.bounds[:] = (0, self.capacity, self.capacity)

    def add(self, rows: Table) -> int:
        """Appends at least one new request to the queue that its ``state`` names, in order.

        Returns the largest handle. Linear in ``rows``, amortised.
        """
        count = len(rows)
        assert count > 0
        while len(self._free) < count:
            self._grow()
        slots = self._free[: -count - 1 : -1]
        del self._free[-count:]
        handles: list[int] = rows["handle"].tolist()
        self._slot_of.update(zip(handles, slots, strict=True))
        place_rows(*self.arrays, rows, np.array(slots))
        return max(handles)

    def remove(self, handles: Ints, slots: list[int]) -> None:
        """Removes live requests, whose rows are ``slots``. Linear in them and in the queues that they stand in."""
        for handle in handles.tolist():
            del self._slot_of[handle]
        self._free.extend(slots)
        release_rows(*self.arrays, np.array(slots))

    def _grow(self) -> None:
        """Doubles the table."""
        old = self.capacity
        order = self.waiting_slots.copy()
        self.requests = np.concatenate([self.requests, np.zeros(old, REQUEST)])
        self.running = np.concatenate([self.running, np.zeros(old, np.int64)])
        self.waiting = np.zeros(3 * 2 * old, np.int64)
        self.waiting[2 * old : 2 * old + len(order)] = order
        self.bounds[WAITING_START : WAITING_STOP + 1] = (2 * old, 2 * old + len(order))
        self._free = list(range(2 * old - 1, old - 1, -1)) + self._free
        self._share()

    def _share(self) -> None:
        self.arrays = (self.requests, self.running, self.waiting, self.bounds)


@kernel
def blocks_for(tokens: int, block_tokens: int) -> int:
    """Returns the KV blocks that hold ``tokens`` tokens."""
    return (tokens + block_tokens - 1) // block_tokens


@kernel
def extra_blocks(tokens: int, held: int, block_tokens: int) -> int:
    """Returns the KV blocks that ``tokens`` tokens need beyond the ``held`` ones; without a division where none is."""
    return 0 if tokens <= held * block_tokens else blocks_for(tokens, block_tokens) - held


@kernel
def make_room(waiting: Ints, bounds: Ints, before: int, behind: int) -> None:
    """Moves the waiting order to the middle of its array if it lacks that much room before or behind it."""
    start = bounds[WAITING_START]
    stop = bounds[WAITING_STOP]
    if before <= start and stop + behind <= len(waiting):
        return
    middle = len(waiting) // 3
    count = stop - start
    for position in range(count):  # numba takes seconds to compile a slice assignment
        if middle > start:  # move the last first, so that nothing is written over before it is read
            waiting[middle + count - 1 - position] = waiting[stop - 1 - position]
        else:
            waiting[middle + position] = waiting[start + position]
    bounds[WAITING_START] = middle
    bounds[WAITING_STOP] = middle + count


@kernel
def place_rows(requests: Table, running: Ints, waiting: Ints, bounds: Ints, rows: Table, slots: Ints) -> None:
    """Copies rows into the table and appends each to its queue. Linear in the rows, amortised."""
    make_room(waiting, bounds, 0, len(slots))
    for position in range(len(slots)):
        slot = slots[position]
        requests[slot] = rows[position]
        if rows[position].state == RUNNING:
            running[bounds[RUNNING_COUNT]] = slot
            bounds[RUNNING_COUNT] += 1
        else:
            waiting[bounds[WAITING_STOP]] = slot
            bounds[WAITING_STOP] += 1


@kernel
def release_rows(requests: Table, running: Ints, waiting: Ints, bounds: Ints, slots: Ints) -> None:
    """Frees rows and closes the gaps that they leave. Linear in the slots and the queues that they stand in."""
    in_running = False
    in_waiting = False
    for slot in slots:
        in_running |= requests[slot].state == RUNNING
        in_waiting |= requests[slot].state == WAITING
        requests[slot].state = FREE
    close_gaps(requests, running, waiting, bounds, in_running, in_waiting)


@kernel
def keep_state(requests: Table, order: Ints, start: int, stop: int, state: int) -> int:
    """Drops the slots of another state from ``order[start:stop]``; returns the new stop. Linear in the range."""
    kept = start
    for position in range(start, stop):
        slot = order[position]
        if requests[slot].state == state:
            order[kept] = slot
            kept += 1
    return kept


@kernel
def close_gaps(requests: Table, running: Ints, waiting: Ints, bounds: Ints, in_running: bool, in_waiting: bool) -> None:
    """Drops every slot from a queue that its row no longer belongs to. Linear in the queues named."""
    if in_running:
        bounds[RUNNING_COUNT] = keep_state(requests, running, 0, bounds[RUNNING_COUNT], RUNNING)
    if in_waiting:
        bounds[WAITING_STOP] = keep_state(requests, waiting, bounds[WAITING_START], bounds[WAITING_STOP], WAITING)


@kernel
def apply_batch(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    count: int,
    victims: Ints,
    victim_count: int,
    block_tokens: int,
) -> None:
    """Preempts the victims, admits what was waiting and advances every request of the batch.

    A victim loses its KV blocks and goes to the head of the waiting queue; a request that gets its last missing token
    has one more output token. Linear in the batch, plus the running queue if a victim is not at its tail and the
    waiting queue if what was admitted is not its head.
    """
    if victim_count > 0:
        make_room(waiting, bounds, victim_count, 0)
    for position in range(victim_count):
        slot = victims[position]
        requests[slot].state = WAITING
        requests[slot].computed = 0
        requests[slot].in_flight = 0
        requests[slot].blocks = 0
        last = bounds[RUNNING_COUNT] - 1
        if running[last] == slot:
            bounds[RUNNING_COUNT] = last
        else:
            close_gaps(requests, running, waiting, bounds, True, False)
        bounds[WAITING_START] -= 1
        waiting[bounds[WAITING_START]] = slot
    admitted_from_head = True
    for position in range(count):
        slot = entries[position].slot
        if requests[slot].state == WAITING:
            requests[slot].state = RUNNING
            running[bounds[RUNNING_COUNT]] = slot
            bounds[RUNNING_COUNT] += 1
            if waiting[bounds[WAITING_START]] == slot:
                bounds[WAITING_START] += 1
            else:
                admitted_from_head = False
        advance(requests, slot, entries[position].tokens, block_tokens)
    if not admitted_from_head:
        close_gaps(requests, running, waiting, bounds, False, True)


@kernel
def advance(requests: Table, slot: int, tokens: int, block_tokens: int) -> None:
    """Lets one request compute ``tokens`` tokens; draft tokens count as rejected until the engine says otherwise."""
    request = requests[slot]
    request.blocks += extra_blocks(request.computed + tokens, request.blocks, block_tokens)
    request.computed = min(request.computed + tokens, request.target)
    if request.computed >= request.target:
        request.output += 1
        request.target += 1


@kernel
def remaining_tokens(requests: Table, slot: int) -> int:
    """Returns the most tokens that a request can be given now: its missing prompt, or one and its draft tokens."""
    request = requests[slot]
    missing: int = request.target - request.computed
    if missing == 1 and request.output > 0:
        missing += request.speculative
    return missing
