"""New requests as rows of the mirror's table: filled, completed with defaults and checked in one pass.

A request arrives in every second or third iteration, so the way in is fast: one kernel says whether all rows are right.
Only when it says no does `checks` look for the field, the value and the remedy.
"""

from __future__ import annotations

import numpy as np

from sidecar.queues import REQUEST, RUNNING, WAITING, Table
from slidingserve.contract.values import ProgressColumns, RequestColumns, SloDefaults
from slidingserve.jit import kernel

_FIELDS = (
    ("arrival_seconds", "arrival"),
    ("prompt_tokens", "prompt"),
    ("cached_prefix_tokens", "computed"),
    ("ttft_slo_seconds", "ttft"),
    ("tbt_slo_seconds", "tbt"),
    ("ttlt_slo_seconds", "ttlt"),
    ("priority", "priority"),
    ("class_index", "class_index"),
    ("tenant_index", "tenant_index"),
    ("weight", "weight"),
    ("max_output_tokens", "max_output"),
    ("speculative_tokens", "speculative"),
)


def row_template() -> Table:
    """Returns one row with the defaults of left-out columns."""
    row = np.zeros(1, REQUEST)
    row["state"], row["weight"], row["stamp"] = WAITING, 1.0, -1
    return row


def fill_rows(template: Table, columns: RequestColumns) -> Table | None:
    """Returns a row for each handle, as the columns say; None if the columns differ in length. Linear in the rows."""
    count = len(columns.handles)
    if len(columns.arrival_seconds) != count or len(columns.prompt_tokens) != count:
        return None
    if columns.request_ids and len(columns.request_ids) != count:
        return None
    rows = np.repeat(template, count)
    rows["handle"] = columns.handles
    for name, field in _FIELDS:
        column = getattr(columns, name)
        if len(column):
            if len(column) != count:
                return None
            rows[field] = column
    return rows


def set_progress(rows: Table, progress: ProgressColumns, running_count: int) -> None:
    """Gives rows the progress of a snapshot; the first ``running_count`` run."""
    rows["state"] = np.where(np.arange(len(rows)) < running_count, RUNNING, WAITING)
    rows["computed"] = progress.computed_tokens
    rows["output"] = progress.output_tokens
    if len(progress.in_flight_tokens):
        rows["in_flight"] = progress.in_flight_tokens


def complete_rows(rows: Table, slos: SloDefaults, last_handle: int, longest: int, names: tuple[int, int]) -> bool:
    """Fills absent SLOs and what follows from other columns; returns whether everything is in range.

    Args:
        rows: new requests.
        slos: for those that bring none.
        last_handle: the largest handle that the session knows; those of the rows ascend from above it.
        longest: most tokens of a prompt.
        names: how many classes and tenants have a name, "none" included.
    """
    return _complete_rows(
        rows,
        slos.ttft_slo_seconds,
        slos.tbt_slo_seconds,
        slos.ttlt_slo_seconds,
        last_handle,
        longest,
        names[0],
        names[1],
    )


@kernel
def _complete_rows(
    rows: Table, ttft: float, tbt: float, ttlt: float, last_handle: int, longest: int, classes: int, tenants: int
) -> bool:
    """See `complete_rows`; handles have to ascend from above ``last_handle``. Linear in the rows."""
    right = True
    for position in range(len(rows)):
        row = rows[position]
        right &= last_handle < row.handle <= 4294967295
        last_handle = row.handle
        right &= 1 <= row.prompt <= longest and 0 <= row.computed < row.prompt
        right &= -1e9 <= row.arrival <= 1e9 and 0.0 < row.weight <= 1e9
        right &= 0.0 <= row.ttft <= 1e9 and 0.0 <= row.tbt <= 1e9 and 0.0 <= row.ttlt <= 1e9
        right &= 0 <= row.class_index < classes and 0 <= row.tenant_index < tenants
        right &= 0 <= row.max_output <= 4294967295 and 0 <= row.speculative <= 4294967295
        row.target = row.prompt + row.output
        if row.ttft == 0.0:
            row.ttft = ttft
        if row.tbt == 0.0:
            row.tbt = tbt
        if row.ttlt == 0.0:
            row.ttlt = ttlt
    return right
