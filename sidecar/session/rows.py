"""New requests as rows of the mirror's table: filled, completed with defaults and checked in one pass.

A request arrives in every second or third iteration, so the way in is fast: one kernel fills the rows and says whether
all of them are right. Only when it says no does `checks` look for the field, the value and the remedy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sidecar.queues import REQUEST, RUNNING, WAITING, Table
from sidecar.session.checks import LARGEST_COUNT, LARGEST_HANDLE, LARGEST_SECONDS, LARGEST_WEIGHT
from slidingserve.contract.values import Floats, Ints, ProgressColumns, RequestColumns, SloDefaults
from slidingserve.jit import kernel

_NUMBERS = RequestColumns._fields.index("request_ids")  # the columns before it are numbers, in the order of `_fill`


class RowFiller:
    """Turns columns into rows, in a buffer that is used again.

    Args:
        slos: SLOs in seconds for requests that bring none.
    """

    def __init__(self, slos: SloDefaults) -> None:
        self._slos = slos
        self._buffer: Table = np.zeros(16, REQUEST)

    def fill(
        self, columns: RequestColumns, last_handle: int | None, longest: int, names: tuple[int, int]
    ) -> Table | None:
        """Returns a row for each handle, waiting; None if anything is out of range. Linear in the rows.

        Args:
            columns: the requests.
            last_handle: the largest handle that the session knows, from above which the new ones ascend; None: they
                come in any order.
            longest: most tokens of a prompt.
            names: how many classes and tenants have a name, "none" included.
        """
        count = len(columns.handles)
        if count > len(self._buffer):
            self._buffer = np.zeros(2 * count, REQUEST)
        rows = self._buffer[:count]
        numbers: Any = columns[:_NUMBERS]
        right = _fill(
            rows,
            self._slos.ttft_slo_seconds,
            self._slos.tbt_slo_seconds,
            self._slos.ttlt_slo_seconds,
            last_handle is not None,
            -1 if last_handle is None else last_handle,
            longest,
            names[0],
            names[1],
            *numbers,
        )
        return rows if right else None


def blocks_of_tokens(tokens: Ints, block_tokens: int) -> Ints:
    """Returns the KV blocks that hold each number of tokens (`queues.blocks_for`, for a column)."""
    blocks: Ints = -(-tokens // block_tokens)
    return blocks


def set_progress(rows: Table, progress: ProgressColumns, running_count: int, block_tokens: int) -> None:
    """Gives rows the progress of a snapshot; the first ``running_count`` run."""
    running = np.arange(len(rows)) < running_count
    rows["state"] = np.where(running, RUNNING, WAITING)
    rows["computed"] = progress.computed_tokens
    rows["output"] = progress.output_tokens
    rows["target"] = rows["prompt"] + progress.output_tokens
    rows["blocks"] = np.where(running, blocks_of_tokens(progress.computed_tokens, block_tokens), 0)
    rows["in_flight"] = progress.in_flight_tokens if len(progress.in_flight_tokens) else 0


@kernel
def _fill(
    rows: Table,
    default_ttft: float,
    default_tbt: float,
    default_ttlt: float,
    ascending: bool,
    last_handle: int,
    longest: int,
    classes: int,
    tenants: int,
    handles: Ints,
    arrival: Floats,
    prompt: Ints,
    cached: Ints,
    ttft: Floats,
    tbt: Floats,
    ttlt: Floats,
    priority: Ints,
    class_index: Ints,
    tenant_index: Ints,
    weight: Floats,
    max_output: Ints,
    speculative: Ints,
) -> bool:
    """See `RowFiller.fill`. Every column but the first three may be empty: its default then holds for all rows."""
    count = len(handles)
    if len(arrival) != count or len(prompt) != count:
        return False
    for length in (len(cached), len(priority), len(class_index), len(tenant_index), len(max_output), len(speculative)):
        if length != count and length != 0:
            return False
    for length in (len(ttft), len(tbt), len(ttlt), len(weight)):
        if length != count and length != 0:
            return False
    right = True
    for i in range(count):
        row = rows[i]
        row.state = WAITING
        row.handle = handles[i]
        row.arrival = arrival[i]
        row.prompt = prompt[i]
        row.computed = cached[i] if len(cached) else 0
        row.ttft = ttft[i] if len(ttft) and ttft[i] != 0.0 else default_ttft
        row.tbt = tbt[i] if len(tbt) and tbt[i] != 0.0 else default_tbt
        row.ttlt = ttlt[i] if len(ttlt) and ttlt[i] != 0.0 else default_ttlt
        row.priority = priority[i] if len(priority) else 0
        row.class_index = class_index[i] if len(class_index) else 0
        row.tenant_index = tenant_index[i] if len(tenant_index) else 0
        row.weight = weight[i] if len(weight) else 1.0
        row.max_output = max_output[i] if len(max_output) else 0
        row.speculative = speculative[i] if len(speculative) else 0
        row.output = 0
        row.target = row.prompt
        row.in_flight = 0
        row.blocks = 0
        row.stamp = -1
        right &= last_handle < row.handle <= LARGEST_HANDLE
        if ascending:
            last_handle = row.handle
        right &= 1 <= row.prompt <= longest and 0 <= row.computed < row.prompt
        right &= -LARGEST_SECONDS <= row.arrival <= LARGEST_SECONDS and 0.0 < row.weight <= LARGEST_WEIGHT
        for seconds in (row.ttft, row.tbt, row.ttlt):
            right &= 0.0 <= seconds <= LARGEST_SECONDS
        right &= 0 <= row.class_index < classes and 0 <= row.tenant_index < tenants
        right &= 0 <= row.max_output <= LARGEST_COUNT and 0 <= row.speculative <= LARGEST_COUNT
    return right
