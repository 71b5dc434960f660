"""Protobuf to values.

No function here raises on a well-formed message, whatever it holds: a submessage that is left out reads as its defaults
or, where the value's type allows it, as None. Enum numbers that this version does not know are kept as plain integers
in what an engine sends, so that the session can refuse them by value, and become the most cautious known reading in
what a sidecar answers. Cost is linear in the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    PROTOCOL_VERSION,
    AppliedBatch,
    BatchAllocation,
    EngineInfo,
    EngineLimits,
    ErrorReason,
    Floats,
    Ints,
    IterationState,
    Mode,
    OpenSession,
    PauseState,
    PhaseTimings,
    ProgressColumns,
    Request,
    RequestColumns,
    Response,
    ResyncReason,
    ResyncRequired,
    SessionError,
    SessionOpened,
    SloDefaults,
    Snapshot,
    Step,
    TraceContext,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

E = TypeVar("E")

# A dictionary look-up costs a tenth of calling the enum class.
_MODES = {int(mode): mode for mode in Mode}
_PAUSE_STATES = {int(state): state for state in PauseState}
_RESYNC_REASONS = {int(reason): reason for reason in ResyncReason}
_ERROR_REASONS = {int(reason): reason for reason in ErrorReason}

# protobuf 7 hands out a column as an array (3 us, however long), 6.33 only entry by entry (10 us for 256 rows).
_COLUMNS_ARE_ARRAYS = hasattr(type(pb.BatchAllocation().handles), "__array__")
_LONG_COLUMN = 64


def decode_request(message: pb.ScheduleRequest) -> Request | None:
    """Returns what the engine sent; None if the message has no payload."""
    payload = message.WhichOneof("payload")
    if payload == "step":
        return _step(message.step)
    if payload == "snapshot":
        return _snapshot(message.snapshot)
    if payload == "open_session":
        return _open_session(message.open_session)
    return None


def decode_response(message: pb.ScheduleResponse) -> Response | None:
    """Returns what the sidecar answered; None if the message has no payload."""
    payload = message.WhichOneof("payload")
    if payload == "batch_allocation":
        return _batch_allocation(message.batch_allocation)
    if payload == "resync_required":
        return _resync_required(message.resync_required)
    if payload == "session_error":
        return _session_error(message.session_error)
    if payload == "session_opened":
        return _session_opened(message.session_opened)
    return None


def decode_decide_request(message: pb.DecideRequest) -> tuple[OpenSession, Snapshot | None]:
    """Returns the session that the unary request stands for, and its state; None if that was left out."""
    session = OpenSession(
        limits=_limits(message.limits),
        protocol_version=PROTOCOL_VERSION,
        slo_defaults=_slo_defaults(message.slo_defaults),
        policy=message.policy,
        policy_parameters=dict(message.policy_parameters),
        profile=message.profile,
    )
    return session, _snapshot(message.snapshot) if message.HasField("snapshot") else None


def decode_decide_response(message: pb.DecideResponse) -> BatchAllocation:
    """Returns the allocation of the unary answer; an empty one if it was left out."""
    return _batch_allocation(message.allocation)


def _known(names: dict[int, E], number: int) -> E:
    """Returns the enum's member, or the number itself; see the module's docstring."""
    return names.get(number, cast(E, number))


def _array(column: Sequence[Any], dtype: type[np.int64] | type[np.float64]) -> Any:
    rows = len(column)
    if _COLUMNS_ARE_ARRAYS and rows >= _LONG_COLUMN:
        return np.asarray(column, dtype)
    return np.fromiter(column, dtype, rows)


def _ints(column: Sequence[int]) -> Ints:
    return cast(Ints, _array(column, np.int64)) if column else NO_INTS


def _floats(column: Sequence[float]) -> Floats:
    return cast(Floats, _array(column, np.float64)) if column else NO_FLOATS


def _texts(column: Iterable[str]) -> tuple[str, ...]:
    return tuple(column) if column else ()


def _open_session(message: pb.OpenSession) -> OpenSession:
    return OpenSession(
        limits=_limits(message.limits),
        protocol_version=message.protocol_version,
        engine=_engine(message.engine),
        slo_defaults=_slo_defaults(message.slo_defaults),
        policy=message.policy,
        policy_parameters=dict(message.policy_parameters),
        profile=message.profile,
        mode=_known(_MODES, message.mode),
    )


def _engine(message: pb.EngineInfo) -> EngineInfo:
    return EngineInfo(
        name=message.name,
        version=message.version,
        instance=message.instance,
        model=message.model,
        tensor_parallel=message.tensor_parallel,
        pipeline_parallel=message.pipeline_parallel,
        data_parallel_rank=message.data_parallel_rank,
    )


def _limits(message: pb.EngineLimits) -> EngineLimits:
    return EngineLimits(
        max_tokens_per_iteration=message.max_tokens_per_iteration,
        max_sequences=message.max_sequences,
        kv_blocks=message.kv_blocks,
        kv_block_tokens=message.kv_block_tokens,
        max_model_tokens=message.max_model_tokens,
    )


def _slo_defaults(message: pb.SloDefaults) -> SloDefaults:
    return SloDefaults(message.ttft_slo_seconds, message.tbt_slo_seconds, message.ttlt_slo_seconds)


def _session_opened(message: pb.SessionOpened) -> SessionOpened:
    return SessionOpened(
        session=message.session,
        protocol_version=message.protocol_version,
        sidecar_version=message.sidecar_version,
        policy=message.policy,
        policy_version=message.policy_version,
        model_version=message.model_version,
        limits=_limits(message.limits),
        slo_defaults=_slo_defaults(message.slo_defaults),
        # Not obeying a mode that is not understood is always safe.
        mode=_MODES.get(message.mode, Mode.OFF),
    )


def _iteration(message: pb.IterationState) -> IterationState:
    return IterationState(
        message.epoch,
        message.step,
        message.now_seconds,
        message.free_kv_blocks,
        message.last_iteration_seconds,
        message.last_iteration_censored,
        _known(_PAUSE_STATES, message.pause_state),
        message.pipeline_depth,
        message.answer_within_seconds,
        _trace_context(message.trace_context) if message.HasField("trace_context") else None,
    )


def _trace_context(message: pb.TraceContext) -> TraceContext:
    return TraceContext(message.trace_id, message.span_id, message.trace_flags, message.trace_state)


def _step(message: pb.Step) -> Step:
    return Step(
        _iteration(message.iteration),
        message.applied_exactly,
        _applied(message.applied) if message.HasField("applied") else None,
        _progress(message.progress) if message.HasField("progress") else None,
        _ints(message.finished_handles),
        _request_columns(message.arrived) if message.HasField("arrived") else None,
    )


def _applied(message: pb.AppliedBatch) -> AppliedBatch:
    return AppliedBatch(_ints(message.handles), _ints(message.tokens), _ints(message.preempted_handles))


def _progress(message: pb.ProgressColumns) -> ProgressColumns:
    return ProgressColumns(
        _ints(message.handles),
        _ints(message.computed_tokens),
        _ints(message.output_tokens),
        _ints(message.in_flight_tokens),
    )


def _snapshot(message: pb.Snapshot) -> Snapshot:
    return Snapshot(
        _iteration(message.iteration),
        _request_columns(message.requests),
        message.running_count,
        _progress(message.progress),
    )


def _request_columns(message: pb.RequestColumns) -> RequestColumns:
    return RequestColumns(
        handles=_ints(message.handles),
        arrival_seconds=_floats(message.arrival_seconds),
        prompt_tokens=_ints(message.prompt_tokens),
        cached_prefix_tokens=_ints(message.cached_prefix_tokens),
        ttft_slo_seconds=_floats(message.ttft_slo_seconds),
        tbt_slo_seconds=_floats(message.tbt_slo_seconds),
        ttlt_slo_seconds=_floats(message.ttlt_slo_seconds),
        priority=_ints(message.priority),
        class_index=_ints(message.class_index),
        tenant_index=_ints(message.tenant_index),
        weight=_floats(message.weight),
        max_output_tokens=_ints(message.max_output_tokens),
        speculative_tokens=_ints(message.speculative_tokens),
        request_ids=_texts(message.request_ids),
        class_names=_texts(message.class_names),
        tenant_names=_texts(message.tenant_names),
    )


def _batch_allocation(message: pb.BatchAllocation) -> BatchAllocation:
    return BatchAllocation(
        message.epoch,
        message.step,
        _ints(message.handles),
        _ints(message.tokens),
        _ints(message.preempted_handles),
        _ints(message.demoted_handles),
        message.predicted_seconds,
        message.policy_version,
        message.model_version,
        message.decision_path,
        _MODES.get(message.mode, Mode.OFF),
        _phase_timings(message.phase_timings) if message.HasField("phase_timings") else None,
        message.draining,
    )


def _phase_timings(message: pb.PhaseTimings) -> PhaseTimings:
    return PhaseTimings(message.decode_seconds, message.mirror_seconds, message.policy_seconds, message.guard_seconds)


def _resync_required(message: pb.ResyncRequired) -> ResyncRequired:
    return ResyncRequired(
        message.epoch,
        message.step,
        _RESYNC_REASONS.get(message.reason, ResyncReason.AFTER_ERROR),
        message.expected_epoch,
        message.expected_step,
        message.message,
    )


def _session_error(message: pb.SessionError) -> SessionError:
    return SessionError(
        _ERROR_REASONS.get(message.reason, ErrorReason.INTERNAL),
        message.field,
        message.value,
        message.remedy,
        message.message,
        message.epoch,
        message.step,
    )
