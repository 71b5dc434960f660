"""Checks of the engine's messages, column by column. All raise `Refusal` and change nothing.

Each check is a few vectorised comparisons, linear in the rows that the message brings; a step that brings none costs
nothing here but its scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sidecar.queues import RUNNING, WAITING, Queues
from sidecar.session.refusal import Refusal
from slidingserve.contract.values import (
    PROTOCOL_VERSION,
    AppliedBatch,
    EngineLimits,
    ErrorReason,
    Floats,
    Ints,
    IterationState,
    Mode,
    OpenSession,
    PauseState,
    ProgressColumns,
    RequestColumns,
    SloDefaults,
    Snapshot,
)

# `rows` holds new requests against the same numbers.
LARGEST_SECONDS = 1e12  # clocks that count from 1970 are welcome
LARGEST_WEIGHT = 1e9
LARGEST_HANDLE = 2**32 - 1
LARGEST_NUMBER = 2**63 - 1  # of an epoch or a step, so that the next one fits too
MOST_NAMES = 65536  # of classes, and of tenants, in one session
LARGEST_COUNT = 2**32 - 1  # tokens or indices in a column
LARGEST_LIMIT = 2**40  # so that no sum or product of limits leaves 64 bits

_COUNT_REMEDY = "give a 32-bit number that is not negative"


def check_open(message: OpenSession) -> None:
    """Checks protocol version, limits and default SLOs (the policy checks its own parameters)."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise Refusal(
            ErrorReason.UNSUPPORTED_PROTOCOL,
            "open_session.protocol_version",
            message.protocol_version,
            f"this sidecar speaks version {PROTOCOL_VERSION}; use an adapter and a sidecar of the same major release",
        )
    if not isinstance(message.mode, Mode):
        raise _not_a_member("open_session.mode", message.mode, Mode)
    check_limits(message.limits, "open_session.limits")
    check_slo_defaults(message.slo_defaults, "open_session.slo_defaults")


def check_limits(limits: EngineLimits, path: str) -> None:
    """Checks that an iteration can hold something."""
    for name in ("max_tokens_per_iteration", "max_sequences", "kv_blocks", "kv_block_tokens"):
        if not 1 <= getattr(limits, name) <= LARGEST_LIMIT:
            raise _invalid(f"{path}.{name}", getattr(limits, name), f"give a positive number, at most {LARGEST_LIMIT}")
    if not 0 <= limits.max_model_tokens <= LARGEST_COUNT:
        raise _invalid(f"{path}.max_model_tokens", limits.max_model_tokens, "give a positive number, or 0 for no limit")


def check_slo_defaults(defaults: SloDefaults, path: str) -> None:
    """Checks that SLOs are absent (0) or positive seconds."""
    for name in ("ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds"):
        if not 0.0 <= getattr(defaults, name) <= LARGEST_SECONDS:
            raise _invalid(
                f"{path}.{name}", getattr(defaults, name), "give seconds above 0, or 0 for the sidecar's default"
            )


def longest_prompt(limits: EngineLimits) -> int:
    """Returns the most tokens that a prompt may have."""
    return limits.max_model_tokens or 2**31


def check_iteration(iteration: IterationState, path: str, limits: EngineLimits, earliest_seconds: float) -> None:
    """Checks the scalars of a step; ``earliest_seconds`` is the engine's clock in the message before."""
    _, _, now, free_blocks, last_seconds, _, pause_state, _, within_seconds, _ = iteration
    if (
        earliest_seconds <= now <= LARGEST_SECONDS
        and 0 <= free_blocks <= limits.kv_blocks
        and 0.0 <= last_seconds <= LARGEST_SECONDS
        and 0.0 <= within_seconds <= LARGEST_SECONDS
        and isinstance(pause_state, PauseState)
    ):
        return
    if not earliest_seconds <= now <= LARGEST_SECONDS:
        if math.isfinite(now) and 0.0 <= now < earliest_seconds:
            remedy = f"the engine's clock went back from {earliest_seconds}; send a monotonic clock"
        else:
            remedy = "give finite seconds of the engine's monotonic clock, at least 0"
        raise _invalid(f"{path}.now_seconds", now, remedy)
    if not 0 <= iteration.free_kv_blocks <= limits.kv_blocks:
        raise _invalid(
            f"{path}.free_kv_blocks", iteration.free_kv_blocks, f"the session has {limits.kv_blocks} blocks in all"
        )
    for name in ("last_iteration_seconds", "answer_within_seconds"):
        value = getattr(iteration, name)
        if not 0.0 <= value <= LARGEST_SECONDS:
            raise _invalid(f"{path}.{name}", value, "give finite seconds, or 0 for unknown")
    raise _not_a_member(f"{path}.pause_state", iteration.pause_state, PauseState)


def check_numbers(iteration: IterationState, path: str, last_epoch: int) -> None:
    """Checks the numbers that a snapshot brings; an epoch is larger than any before."""
    if not last_epoch < iteration.epoch <= LARGEST_NUMBER:
        raise _invalid(
            f"{path}.epoch", iteration.epoch, f"a snapshot starts a new epoch; give a number above {last_epoch}"
        )
    if not 0 <= iteration.step <= LARGEST_NUMBER:
        raise _invalid(f"{path}.step", iteration.step, f"give a number of at most {LARGEST_NUMBER}")


def check_requests(columns: RequestColumns, path: str, limits: EngineLimits) -> None:
    """Checks the facts of requests: equal lengths, ranges, finite numbers."""
    count = len(columns.handles)
    _check_length(columns.arrival_seconds, count, f"{path}.arrival_seconds", required=True)
    _check_length(columns.prompt_tokens, count, f"{path}.prompt_tokens", required=True)
    for name in _OPTIONAL_COLUMNS:
        _check_length(getattr(columns, name), count, f"{path}.{name}")
    if len(columns.request_ids) not in (0, count):
        raise _invalid(
            f"{path}.request_ids", f"{len(columns.request_ids)} ids", f"give one for each of {count} handles"
        )
    _check_all(columns.handles, 0, LARGEST_HANDLE, f"{path}.handles", "give a 32-bit unsigned number")
    _check_all(
        columns.arrival_seconds, -LARGEST_SECONDS, LARGEST_SECONDS, f"{path}.arrival_seconds", "give finite seconds"
    )
    longest = longest_prompt(limits)
    _check_all(
        columns.prompt_tokens,
        1,
        longest,
        f"{path}.prompt_tokens",
        f"a prompt has 1 to {longest} tokens; leave empty or longer requests out",
    )
    for name in ("ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds"):
        _check_all(
            getattr(columns, name),
            0.0,
            LARGEST_SECONDS,
            f"{path}.{name}",
            "give finite seconds above 0, or 0 for the session's default",
        )
    _check_all(columns.weight, np.nextafter(0.0, 1.0), LARGEST_WEIGHT, f"{path}.weight", "give a finite weight above 0")
    for name in ("max_output_tokens", "speculative_tokens", "class_index", "tenant_index", "cached_prefix_tokens"):
        _check_all(getattr(columns, name), 0, LARGEST_COUNT, f"{path}.{name}", _COUNT_REMEDY)
    if len(columns.cached_prefix_tokens):
        _refuse_first(
            columns.cached_prefix_tokens >= columns.prompt_tokens,
            columns.cached_prefix_tokens,
            f"{path}.cached_prefix_tokens",
            lambda row: f"less than the prompt of {int(columns.prompt_tokens[row])} tokens can be cached",
            ErrorReason.IMPOSSIBLE_PROGRESS,
        )


def check_arrivals(columns: RequestColumns, path: str, limits: EngineLimits, last_handle: int) -> None:
    """Checks new requests: their handles ascend from above ``last_handle``, so that none is known or was ever used."""
    check_requests(columns, path, limits)
    previous = np.concatenate([np.array([last_handle], np.int64), columns.handles[:-1]])
    _refuse_first(
        columns.handles <= previous,
        columns.handles,
        f"{path}.handles",
        lambda row: (
            f"a new handle is larger than every handle before it in the session (the last was {int(previous[row])})"
        ),
        ErrorReason.DUPLICATE_HANDLE,
    )


def check_known(handles: Ints, path: str, queues: Queues) -> None:
    """Checks that handles name live requests, each once."""
    seen: set[int] = set()
    for row, handle in enumerate(handles.tolist()):
        if handle not in queues:
            raise Refusal(
                ErrorReason.UNKNOWN_HANDLE,
                f"{path}[{row}]",
                handle,
                "no live request has this handle; send a Snapshot to start from the engine's state",
            )
        if handle in seen:
            raise Refusal(ErrorReason.DUPLICATE_HANDLE, f"{path}[{row}]", handle, "name each request once")
        seen.add(handle)


def check_names(columns: RequestColumns, path: str, classes: int, tenants: int) -> None:
    """Checks indices against the counts of names known before (``classes``, ``tenants``) and the names sent along."""
    for name, known in (
        ("class_index", classes + len(columns.class_names)),
        ("tenant_index", tenants + len(columns.tenant_names)),
    ):
        if known > MOST_NAMES:
            field = f"{path}.{name.removesuffix('_index')}_names"
            raise _invalid(
                field, f"{known} names", f"a session takes {MOST_NAMES}; send each name once, when first used"
            )
        column = getattr(columns, name)
        if len(column) and column.max() >= known:
            row = int(column.argmax())
            remedy = f"only indices below {known} have a name; send new names along, in order"
            raise _invalid(f"{path}.{name}[{row}]", int(column[row]), remedy)


def check_progress(progress: ProgressColumns, path: str, prompt_tokens: Ints) -> None:
    """Checks absolute progress against the prompts of the same requests."""
    count = len(prompt_tokens)
    for name in ("computed_tokens", "output_tokens"):
        _check_length(getattr(progress, name), count, f"{path}.{name}", required=True)
        _check_all(getattr(progress, name), 0, LARGEST_COUNT, f"{path}.{name}", _COUNT_REMEDY)
    _check_length(progress.in_flight_tokens, count, f"{path}.in_flight_tokens")
    _check_all(progress.in_flight_tokens, 0, LARGEST_COUNT, f"{path}.in_flight_tokens", _COUNT_REMEDY)
    _refuse_first(
        progress.computed_tokens > prompt_tokens + progress.output_tokens,
        progress.computed_tokens,
        f"{path}.computed_tokens",
        lambda row: (
            f"the request has {int(prompt_tokens[row])} prompt and {int(progress.output_tokens[row])} output tokens"
        ),
        ErrorReason.IMPOSSIBLE_PROGRESS,
    )


def check_applied(applied: AppliedBatch, path: str, queues: Queues) -> None:
    """Checks the batch that the engine executed against what each request can take."""
    _check_length(applied.tokens, len(applied.handles), f"{path}.tokens", required=True)
    check_known(applied.handles, f"{path}.handles", queues)
    check_known(applied.preempted_handles, f"{path}.preempted_handles", queues)
    _refuse_first(
        queues.requests["state"][queues.slots(applied.preempted_handles)] != RUNNING,
        applied.preempted_handles,
        f"{path}.preempted_handles",
        lambda row: "only a running request can be preempted",
    )
    rows = queues.requests[queues.slots(applied.handles)]
    anew = np.isin(applied.handles, applied.preempted_handles) | (rows["state"] == WAITING)  # no prefix is promised
    missing = rows["target"] - np.where(anew, 0, rows["computed"]) + rows["speculative"]
    _refuse_first(
        (applied.tokens < 1) | (applied.tokens > missing),
        applied.tokens,
        f"{path}.tokens",
        lambda row: f"request {int(applied.handles[row])} can take 1 to {int(missing[row])} tokens",
        ErrorReason.IMPOSSIBLE_PROGRESS,
    )


def check_snapshot(snapshot: Snapshot, limits: EngineLimits) -> None:
    """Checks a snapshot's rows."""
    columns = snapshot.requests
    check_requests(columns, "snapshot.requests", limits)
    count = len(columns.handles)
    if len(np.unique(columns.handles)) != count:
        values, counts = np.unique(columns.handles, return_counts=True)
        raise Refusal(
            ErrorReason.DUPLICATE_HANDLE,
            "snapshot.requests.handles",
            int(values[counts > 1][0]),
            "name each request once",
        )
    if not 0 <= snapshot.running_count <= count:
        raise _invalid("snapshot.running_count", snapshot.running_count, f"the snapshot has {count} requests")
    if len(snapshot.progress.handles) and not np.array_equal(snapshot.progress.handles, columns.handles):
        raise _invalid(
            "snapshot.progress.handles",
            f"{len(snapshot.progress.handles)} handles",
            "name the requests in the order of snapshot.requests, or leave the column out",
        )
    check_progress(snapshot.progress, "snapshot.progress", columns.prompt_tokens)


_OPTIONAL_COLUMNS = (
    "cached_prefix_tokens",
    "ttft_slo_seconds",
    "tbt_slo_seconds",
    "ttlt_slo_seconds",
    "priority",
    "class_index",
    "tenant_index",
    "weight",
    "max_output_tokens",
    "speculative_tokens",
)


def _invalid(field: str, value: object, remedy: str) -> Refusal:
    return Refusal(ErrorReason.INVALID_FIELD, field, value, remedy)


def _check_length(column: Ints | Floats, count: int, path: str, *, required: bool = False) -> None:
    if len(column) != count and (required or len(column)):
        raise _invalid(path, f"{len(column)} entries", f"give one for each of {count} handles")


def _check_all(
    column: NDArray[np.int64] | NDArray[np.float64], low: float, high: float, path: str, remedy: str
) -> None:
    right = (column >= low) & (column <= high)  # NaN is not
    _refuse_first(~right, column, path, lambda row: remedy)


def _refuse_first(
    wrong: NDArray[np.bool_],
    column: NDArray[np.int64] | NDArray[np.float64],
    path: str,
    remedy: Callable[[int], str],
    reason: ErrorReason = ErrorReason.INVALID_FIELD,
) -> None:
    """Refuses the first wrong entry of a column, if there is one; ``remedy`` tells what to do about its row."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        row = int(rows[0])
        raise Refusal(reason, f"{path}[{row}]", column[row].item(), remedy(row))


def _not_a_member(path: str, value: object, kind: type[IntEnum]) -> Refusal:
    known = ", ".join(f"{member.value} ({member.name})" for member in kind)
    return _invalid(path, value, f"give one of {known}")
