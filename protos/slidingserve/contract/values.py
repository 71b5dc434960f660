"""The contract's messages as plain values: what `scheduler.proto` says, without protobuf.

Both sides and the decision core speak these; only `codec` and the gRPC shell know the wire form. The messages that pass
in every iteration, and columns, are NamedTuples (a frozen dataclass of that size costs 1-2 us more to make); the others
are frozen dataclasses. Integer columns are int64 arrays and real ones float64 arrays, all of one length; a column that
was left out has length 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 1

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Left-out columns. Not read-only: kernels would be compiled once more for each column that is.
NO_INTS: Ints = np.zeros(0, np.int64)
NO_FLOATS: Floats = np.zeros(0, np.float64)


class Mode(IntEnum):
    """How far allocations are obeyed."""

    UNSPECIFIED = 0
    OFF = 1
    SHADOW = 2
    ACTIVE = 3


class PauseState(IntEnum):
    """Whether the engine takes work."""

    RUNNING = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


_NOT_PAUSED = PauseState.RUNNING  # a look-up of an enum's member costs 0.2 us


class ResyncReason(IntEnum):
    """Why a snapshot is needed."""

    STEP_MISMATCH = 1
    EPOCH_MISMATCH = 2
    AFTER_ERROR = 3


class ErrorReason(IntEnum):
    """What kind of mistake a message holds."""

    INVALID_FIELD = 1
    UNKNOWN_HANDLE = 2
    DUPLICATE_HANDLE = 3
    IMPOSSIBLE_PROGRESS = 4
    UNSUPPORTED_PROTOCOL = 5
    UNKNOWN_POLICY = 6
    INVALID_POLICY_PARAMETER = 7
    OUT_OF_TURN = 8
    UNAVAILABLE = 9
    INTERNAL = 10
    UNKNOWN_PROFILE = 11


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one iteration may hold; tokens, requests, blocks."""

    max_tokens_per_iteration: int
    max_sequences: int
    kv_blocks: int
    kv_block_tokens: int
    max_model_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SloDefaults:
    """SLOs in seconds for requests that bring none; 0 = none."""

    ttft_slo_seconds: float = 0.0
    tbt_slo_seconds: float = 0.0
    ttlt_slo_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describes the engine, for traces and journals."""

    name: str = ""
    version: str = ""
    instance: str = ""
    model: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    data_parallel_rank: int = 0


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a session."""

    limits: EngineLimits
    protocol_version: int = PROTOCOL_VERSION
    engine: EngineInfo = field(default_factory=EngineInfo)
    slo_defaults: SloDefaults = field(default_factory=SloDefaults)
    policy: str = ""
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    mode: Mode = Mode.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Accepts a session."""

    session: str
    protocol_version: int
    sidecar_version: str
    policy: str
    policy_version: str
    model_version: str
    limits: EngineLimits
    slo_defaults: SloDefaults
    mode: Mode


class TraceContext(NamedTuple):
    """W3C trace context in binary form."""

    trace_id: bytes
    span_id: bytes
    trace_flags: int = 0
    trace_state: str = ""


class IterationState(NamedTuple):
    """What the engine knows at the start of an iteration; seconds on its monotonic clock."""

    epoch: int
    step: int
    now_seconds: float
    free_kv_blocks: int
    last_iteration_seconds: float = 0.0
    last_iteration_censored: bool = False
    pause_state: PauseState = PauseState.RUNNING
    pipeline_depth: int = 0
    answer_within_seconds: float = 0.0
    trace_context: TraceContext | None = None

    @property
    def may_admit(self) -> bool:
        """Whether waiting requests may be given tokens."""
        return self.pause_state is _NOT_PAUSED


class RequestColumns(NamedTuple):
    """Facts of requests that never change; see the message of that name."""

    handles: Ints
    arrival_seconds: Floats
    prompt_tokens: Ints
    cached_prefix_tokens: Ints = NO_INTS
    ttft_slo_seconds: Floats = NO_FLOATS
    tbt_slo_seconds: Floats = NO_FLOATS
    ttlt_slo_seconds: Floats = NO_FLOATS
    priority: Ints = NO_INTS
    class_index: Ints = NO_INTS
    tenant_index: Ints = NO_INTS
    weight: Floats = NO_FLOATS
    max_output_tokens: Ints = NO_INTS
    speculative_tokens: Ints = NO_INTS
    request_ids: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    tenant_names: tuple[str, ...] = ()


class ProgressColumns(NamedTuple):
    """How far requests have come, absolute; tokens."""

    handles: Ints
    computed_tokens: Ints
    output_tokens: Ints
    in_flight_tokens: Ints = NO_INTS


class AppliedBatch(NamedTuple):
    """What the engine really scheduled in its last iteration."""

    handles: Ints
    tokens: Ints
    preempted_handles: Ints = NO_INTS


class Step(NamedTuple):
    """What changed since the last answer."""

    iteration: IterationState
    applied_exactly: bool = True
    applied: AppliedBatch | None = None
    progress: ProgressColumns | None = None
    finished_handles: Ints = NO_INTS
    arrived: RequestColumns | None = None


class Snapshot(NamedTuple):
    """Everything that the engine holds: running requests in order, then waiting ones in order."""

    iteration: IterationState
    requests: RequestColumns
    running_count: int
    progress: ProgressColumns


class PhaseTimings(NamedTuple):
    """Seconds that one answer took inside the sidecar, by phase."""

    decode_seconds: float
    mirror_seconds: float
    policy_seconds: float
    guard_seconds: float

    @property
    def core_seconds(self) -> float:
        """Time in the decision core: mirror, policy and guard."""
        return self.mirror_seconds + self.policy_seconds + self.guard_seconds


class BatchAllocation(NamedTuple):
    """The batch of one iteration, A*: ``handles[i]`` gets ``tokens[i]`` tokens."""

    epoch: int
    step: int
    handles: Ints
    tokens: Ints
    preempted_handles: Ints = NO_INTS
    demoted_handles: Ints = NO_INTS
    predicted_seconds: float = 0.0
    policy_version: str = ""
    model_version: str = ""
    decision_path: str = ""
    mode: Mode = Mode.ACTIVE
    phase_timings: PhaseTimings | None = None
    draining: bool = False


class ResyncRequired(NamedTuple):
    """The sidecar cannot decide before it has a Snapshot."""

    epoch: int
    step: int
    reason: ResyncReason
    expected_epoch: int
    expected_step: int
    message: str


class SessionError(NamedTuple):
    """A message that was refused; it changed nothing."""

    reason: ErrorReason
    field: str
    value: str
    remedy: str
    message: str
    epoch: int = 0
    step: int = 0


Request: TypeAlias = OpenSession | Snapshot | Step
Response: TypeAlias = SessionOpened | BatchAllocation | ResyncRequired | SessionError
