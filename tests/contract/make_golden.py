"""Writes the golden messages: ``python tests/contract/make_golden.py``.

A golden message is a file of wire bytes (``.binpb``) and its JSON twin. They are part of the contract: an engine in any
language can be tested against them, and a change of one is a change of the contract. Every message type has one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from slidingserve.contract import codec
from slidingserve.contract import values as v

FOLDER = Path(__file__).parent / "golden"


def ints(*entries: int) -> v.Ints:
    return np.array(entries, np.int64)


def floats(*entries: float) -> v.Floats:
    return np.array(entries, np.float64)


LIMITS = v.EngineLimits(2048, 256, 27000, 16, 8192)
SLOS = v.SloDefaults(1.5, 0.05, 30.0)
TRACE = v.TraceContext(bytes(range(16)), bytes(range(8)), 1, "vendor=1")
ITERATION = v.IterationState(2, 41, 12.5, 26900, 0.03125, True, v.PauseState.PAUSED_NEW, 1, 0.004, TRACE)
OPEN_SESSION = v.OpenSession(
    limits=LIMITS,
    engine=v.EngineInfo("vllm", "0.32.0", "pod-0/rank-1", "llama-3-8b", 2, 1, 1),
    slo_defaults=SLOS,
    policy="vllm",
    policy_parameters={"budget": "2048", "order": "fcfs"},
    profile="rtxpro6000-tp1",
    mode=v.Mode.ACTIVE,
)
SESSION_OPENED = v.SessionOpened("s-1", 1, "0.1.0", "vllm", "1", "table-3", LIMITS, SLOS, v.Mode.ACTIVE)
REQUESTS = v.RequestColumns(
    handles=ints(7, 4294967295),
    arrival_seconds=floats(11.0, 12.25),
    prompt_tokens=ints(512, 1),
    cached_prefix_tokens=ints(128, 0),
    ttft_slo_seconds=floats(0.5, 0.0),
    tbt_slo_seconds=floats(0.025, 0.0),
    ttlt_slo_seconds=floats(0.0, 20.0),
    priority=ints(-1, 3),
    class_index=ints(1, 0),
    tenant_index=ints(1, 2),
    weight=floats(2.0, 1.0),
    max_output_tokens=ints(256, 0),
    speculative_tokens=ints(3, 0),
    request_ids=("cmpl-1", "cmpl-2"),
    class_names=("chat",),
    tenant_names=("acme", "zürich"),
)
PROGRESS = v.ProgressColumns(ints(7, 4294967295), ints(300, 0), ints(2, 0), ints(1, 0))
SNAPSHOT = v.Snapshot(ITERATION, REQUESTS, 1, PROGRESS)
STEP = v.Step(
    ITERATION,
    applied_exactly=False,
    applied=v.AppliedBatch(ints(7, 9), ints(1, 500), ints(3)),
    progress=PROGRESS,
    finished_handles=ints(5, 6),
    arrived=REQUESTS,
)
EXACT_STEP = v.Step(
    v.IterationState(0, 1, 0.125, 27000),
    arrived=v.RequestColumns(ints(1), floats(0.1), ints(100)),
    finished_handles=ints(0),
)
ALLOCATION = v.BatchAllocation(
    2,
    41,
    ints(7, 4294967295),
    ints(1, 2047),
    preempted_handles=ints(8),
    demoted_handles=ints(9, 10),
    predicted_seconds=0.0625,
    policy_version="1",
    model_version="table-3",
    decision_path="fcfs",
    mode=v.Mode.SHADOW,
    phase_timings=v.PhaseTimings(0.000015, 0.00001, 0.00002, 0.000005),
    draining=True,
)
RESYNC = v.ResyncRequired(2, 41, v.ResyncReason.STEP_MISMATCH, 2, 40, "step 41 came, 40 was expected: send a Snapshot")
ERROR = v.SessionError(
    v.ErrorReason.INVALID_FIELD,
    "step.arrived.prompt_tokens[1]",
    "0",
    "send at least 1",
    "step.arrived.prompt_tokens[1] = 0: a prompt has at least 1 token; send at least 1",
    2,
    41,
)


def golden_messages() -> dict[str, Message]:
    """Returns the messages by file name; the part before the first dot is the message type."""
    requests: dict[str, v.Request] = {
        "open_session": OPEN_SESSION,
        "snapshot": SNAPSHOT,
        "step": STEP,
        "step_exact": EXACT_STEP,
    }
    responses: dict[str, v.Response] = {
        "session_opened": SESSION_OPENED,
        "batch_allocation": ALLOCATION,
        "resync_required": RESYNC,
        "session_error": ERROR,
    }
    request = {name: codec.encode_request(value) for name, value in requests.items()}
    response = {name: codec.encode_response(value) for name, value in responses.items()}
    whole: dict[str, Message] = {
        **{f"ScheduleRequest.{name}": message for name, message in request.items()},
        **{f"ScheduleResponse.{name}": message for name, message in response.items()},
        "DecideRequest": codec.encode_decide_request(OPEN_SESSION, SNAPSHOT),
        "DecideResponse": codec.encode_decide_response(ALLOCATION),
    }
    parts: list[Message] = [
        request["open_session"].open_session,
        request["open_session"].open_session.engine,
        request["open_session"].open_session.limits,
        request["open_session"].open_session.slo_defaults,
        request["snapshot"].snapshot,
        request["step"].step,
        request["step"].step.iteration,
        request["step"].step.iteration.trace_context,
        request["step"].step.applied,
        request["step"].step.progress,
        request["step"].step.arrived,
        response["session_opened"].session_opened,
        response["batch_allocation"].batch_allocation,
        response["batch_allocation"].batch_allocation.phase_timings,
        response["resync_required"].resync_required,
        response["session_error"].session_error,
    ]
    return {**whole, **{part.DESCRIPTOR.name: part for part in parts}}


def to_bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def to_json(message: Message) -> str:
    return MessageToJson(message, preserving_proto_field_name=True, sort_keys=True, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    for name, message in golden_messages().items():
        (folder / f"{name}.binpb").write_bytes(to_bytes(message))
        (folder / f"{name}.json").write_text(to_json(message), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
