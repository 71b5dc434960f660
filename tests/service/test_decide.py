"""The unary call: one decision without a session, and google.rpc.ErrorInfo for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sidecar.session.machine import one_decision
from slidingserve.contract.codec import decode_decide_response, encode_decide_request
from slidingserve.contract.values import EngineLimits
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from slidingserve.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.service.support import LONG_SECONDS, OPEN
from tests.strategies import LIMITS, snapshot

ROWS = [(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)]


def request() -> pb.DecideRequest:
    return encode_decide_request(OPEN, snapshot(ROWS, running=2, free=37))


def test_decides_as_a_session_does(channel: grpc.Channel) -> None:
    answer = decode_decide_response(SchedulerServiceStub(channel).Decide(request(), timeout=LONG_SECONDS))
    expected = one_decision(snapshot(ROWS, running=2, free=37), OPEN)
    assert np.array_equal(answer.handles, expected.handles)
    assert np.array_equal(answer.tokens, expected.tokens)
    assert (answer.epoch, answer.step) == (1, 0)
    assert (answer.policy_version, answer.decision_path) == ("vllm/1", "fcfs")
    assert not answer.draining


def test_parameters_of_the_policy_count(channel: grpc.Channel) -> None:
    message = request()
    message.policy = "vllm"
    message.policy_parameters["max_tokens"] = "3"
    answer = SchedulerServiceStub(channel).Decide(message, timeout=LONG_SECONDS)
    assert sum(answer.allocation.tokens) == 3


def no_state(message: pb.DecideRequest) -> None:
    message.ClearField("snapshot")


def no_limits(message: pb.DecideRequest) -> None:
    message.ClearField("limits")


def unknown_policy(message: pb.DecideRequest) -> None:
    message.policy = "nope"


def unknown_parameter(message: pb.DecideRequest) -> None:
    message.policy_parameters["nope"] = "1"


def nan_clock(message: pb.DecideRequest) -> None:
    message.snapshot.iteration.now_seconds = math.nan


def empty_prompt(message: pb.DecideRequest) -> None:
    message.snapshot.requests.prompt_tokens[1] = 0


def duplicate_handle(message: pb.DecideRequest) -> None:
    message.snapshot.requests.handles[1] = 7


def short_column(message: pb.DecideRequest) -> None:
    del message.snapshot.requests.prompt_tokens[2]


def too_far(message: pb.DecideRequest) -> None:
    message.snapshot.progress.computed_tokens[0] = 99


def negative_slo(message: pb.DecideRequest) -> None:
    message.slo_defaults.tbt_slo_seconds = -1


@pytest.mark.parametrize(
    ("spoil", "reason", "field", "value"),
    [
        (no_state, "INVALID_FIELD", "snapshot", "nothing"),
        (no_limits, "INVALID_FIELD", "limits.max_tokens_per_iteration", "0"),
        (unknown_policy, "UNKNOWN_POLICY", "policy", "nope"),
        (unknown_parameter, "INVALID_POLICY_PARAMETER", "policy_parameters['nope']", "1"),
        (nan_clock, "INVALID_FIELD", "snapshot.iteration.now_seconds", "nan"),
        (empty_prompt, "INVALID_FIELD", "snapshot.requests.prompt_tokens[1]", "0"),
        (duplicate_handle, "DUPLICATE_HANDLE", "snapshot.requests.handles", "7"),
        (short_column, "INVALID_FIELD", "snapshot.requests.prompt_tokens", "2 entries"),
        (too_far, "IMPOSSIBLE_PROGRESS", "snapshot.progress.computed_tokens[0]", "99"),
        (negative_slo, "INVALID_FIELD", "slo_defaults.tbt_slo_seconds", "-1.0"),
    ],
)
def test_bad_input_is_named(
    spoil: Callable[[pb.DecideRequest], None], reason: str, field: str, value: str, channel: grpc.Channel
) -> None:
    message = request()
    spoil(message)
    with pytest.raises(grpc.RpcError) as caught:
        SchedulerServiceStub(channel).Decide(message, timeout=LONG_SECONDS)
    call = caught.value
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = rpc_status.from_call(call).details
    assert len(details) == 1
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "slidingserve.dev")
    assert (info.metadata["field"], info.metadata["value"]) == (field, value)
    assert len(info.metadata["remedy"].split()) >= 3
    assert call.details() == f"{field} = {value}: {info.metadata['remedy']}"
    named = field.partition("[")[0].partition(".")[0]
    assert named in pb.DecideRequest.DESCRIPTOR.fields_by_name, "the field is one of this request"


@pytest.mark.parametrize("letter", ["x", "ü", "😀", "%"])
def test_long_value_is_shortened_and_still_named(channel: grpc.Channel, letter: str) -> None:
    """gRPC takes 8 kB of status, up to 16 kB by chance; more reaches the caller as an error of the transport."""
    message = request()
    message.policy = letter * 100_000
    for _ in range(20):
        with pytest.raises(grpc.RpcError) as caught:
            SchedulerServiceStub(channel).Decide(message, timeout=LONG_SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith(f"policy = {3 * letter}")
        trailers: Any = caught.value.trailing_metadata()
        size = 3 * len(str(caught.value.details()).encode()) + 4 / 3 * len(dict(trailers)["grpc-status-details-bin"])
        assert size < 8000


def test_oversized_request_is_refused_alone(channel: grpc.Channel) -> None:
    message = request()
    message.profile = "x" * 5_000_000
    with pytest.raises(grpc.RpcError) as caught:
        SchedulerServiceStub(channel).Decide(message, timeout=LONG_SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    SchedulerServiceStub(channel).Decide(request(), timeout=LONG_SECONDS)


def test_limits_come_from_the_request(channel: grpc.Channel) -> None:
    message = request()
    assert message.limits.max_tokens_per_iteration == LIMITS.max_tokens_per_iteration
    small = EngineLimits(2, 8, 40, 4)
    message.limits.max_tokens_per_iteration = small.max_tokens_per_iteration
    answer = SchedulerServiceStub(channel).Decide(message, timeout=LONG_SECONDS)
    assert sum(answer.allocation.tokens) == 2
