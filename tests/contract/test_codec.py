"""Values to protobuf and back, for every message; strategies are derived from the contract's descriptors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_type_hints

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from slidingserve.contract import codec, values
from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    BatchAllocation,
    EngineLimits,
    IterationState,
    Mode,
    OpenSession,
    ProgressColumns,
    RequestColumns,
    Snapshot,
    Step,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SMALL = settings(max_examples=60, deadline=None)
REQUESTS = ("OpenSession", "Snapshot", "Step")
RESPONSES = ("SessionOpened", "BatchAllocation", "ResyncRequired", "SessionError")


def ints(*entries: int) -> values.Ints:
    return np.array(entries, np.int64)


def request(**payload: Any) -> pb.ScheduleRequest:
    return pb.ScheduleRequest(**payload)


def response(**payload: Any) -> pb.ScheduleResponse:
    return pb.ScheduleResponse(**payload)


def scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in INTEGERS:
        return st.integers(*INTEGERS[field.type])
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.floats()
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.type == FieldDescriptor.TYPE_ENUM:
        assert field.enum_type is not None
        return st.sampled_from(list(getattr(values, field.enum_type.name)))
    assert field.type == FieldDescriptor.TYPE_STRING
    return TEXTS


def column(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    # Up to 80 rows: long columns are decoded in another way than short ones.
    entries = st.integers(0, 80).flatmap(lambda rows: st.lists(scalar(field), min_size=rows, max_size=rows))
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.lists(TEXTS, max_size=3).map(tuple)
    dtype = np.float64 if field.type == FieldDescriptor.TYPE_DOUBLE else np.int64
    return entries.map(lambda rows: np.array(rows, dtype))


def value_of(message: Descriptor) -> st.SearchStrategy[Any]:
    """Any value of the class that is named as the message."""
    value_class = getattr(values, message.name)
    hints = get_type_hints(value_class)
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in message.fields:
        if field.message_type is None:
            fields[field.name] = column(field) if field.is_repeated else scalar(field)
        elif field.message_type.GetOptions().map_entry:
            fields[field.name] = st.dictionaries(TEXTS, TEXTS, max_size=3)
        else:
            inner = value_of(field.message_type)
            optional = type(None) in getattr(hints[field.name], "__args__", ())
            fields[field.name] = st.none() | inner if optional else inner
    return st.builds(value_class, **fields)


def any_of(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.one_of([value_of(pb.DESCRIPTOR.message_types_by_name[name]) for name in names])


def message_of(message: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments for any well-formed message: each field set or not, columns of unequal length, any enum number."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in message.fields:
        if field.message_type is None:
            one = st.integers(-(2**31), 2**31 - 1) if field.enum_type is not None else scalar(field)
            fields[field.name] = st.lists(one, max_size=4) if field.is_repeated else one
        elif not field.message_type.GetOptions().map_entry:
            fields[field.name] = message_of(field.message_type)
    return st.fixed_dictionaries({}, optional=fields)


def same(left: Any, right: Any) -> bool:
    """Equality that knows arrays, their types, and NaN."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype == np.float64)
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, Mapping):
        return bool(left == right)
    names = getattr(left, "_fields", None) or list(getattr(left, "__dataclass_fields__", ()))
    if names:
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    return type(left) is type(right) and bool(left == right)


@SMALL
@given(any_of(REQUESTS))
def test_requests_survive_the_wire(value: values.Request) -> None:
    wire = codec.encode_request(value).SerializeToString()
    assert same(value, codec.decode_request(pb.ScheduleRequest.FromString(wire)))


@SMALL
@given(any_of(RESPONSES))
def test_responses_survive_the_wire(value: values.Response) -> None:
    wire = codec.encode_response(value).SerializeToString()
    assert same(value, codec.decode_response(pb.ScheduleResponse.FromString(wire)))


@SMALL
@given(any_of(("OpenSession",)), any_of(("Snapshot",)))
def test_the_unary_request_survives_the_wire(session: OpenSession, snapshot: Snapshot) -> None:
    wire = codec.encode_decide_request(session, snapshot).SerializeToString()
    got_session, got_snapshot = codec.decode_decide_request(pb.DecideRequest.FromString(wire))
    assert same(snapshot, got_snapshot)
    for name in ("limits", "slo_defaults", "policy", "policy_parameters", "profile"):
        assert same(getattr(session, name), getattr(got_session, name))


@SMALL
@given(any_of(("BatchAllocation",)))
def test_the_unary_answer_survives_the_wire(value: BatchAllocation) -> None:
    wire = codec.encode_decide_response(value).SerializeToString()
    assert same(value, codec.decode_decide_response(pb.DecideResponse.FromString(wire)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_decoding_takes_every_well_formed_message(data: st.DataObject) -> None:
    kinds: list[Any] = [pb.ScheduleRequest, pb.ScheduleResponse, pb.DecideRequest, pb.DecideResponse]
    kind = data.draw(st.sampled_from(kinds))
    fields = data.draw(message_of(kind.DESCRIPTOR))
    oneof = kind.DESCRIPTOR.oneofs_by_name.get("payload")
    if oneof is not None:
        fields = dict(list(fields.items())[:1])
    message = kind.FromString(kind(**fields).SerializeToString())
    if isinstance(message, pb.ScheduleRequest):
        sent = codec.decode_request(message)
        if sent is not None:
            assert same(sent, codec.decode_request(codec.encode_request(sent)))
    elif isinstance(message, pb.ScheduleResponse):
        answered = codec.decode_response(message)
        if answered is not None:
            assert same(answered, codec.decode_response(codec.encode_response(answered)))
    elif isinstance(message, pb.DecideRequest):
        codec.decode_decide_request(message)
    else:
        codec.decode_decide_response(message)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_special_floats_survive(special: float) -> None:
    iteration = IterationState(0, 0, special, 0, special)
    requests = RequestColumns(ints(1), np.array([special]), ints(1), weight=np.array([special]))
    got = codec.decode_request(codec.encode_request(Step(iteration, arrived=requests)))
    assert isinstance(got, Step)
    assert got.arrived is not None
    for number in (got.iteration.now_seconds, got.arrived.arrival_seconds[0], got.arrived.weight[0]):
        assert same(float(number), special)
        assert math.copysign(1, number) == math.copysign(1, special)


def test_left_out_columns_are_the_constants() -> None:
    got = codec.decode_request(
        codec.encode_request(Step(IterationState(0, 0, 0.0, 0), arrived=RequestColumns(NO_INTS, NO_FLOATS, NO_INTS)))
    )
    assert isinstance(got, Step)
    assert got.arrived is not None
    assert got.finished_handles is NO_INTS
    assert got.arrived.handles is NO_INTS
    assert got.arrived.weight is NO_FLOATS
    assert got.arrived.request_ids == ()


def test_absent_and_empty_submessages_differ() -> None:
    iteration = IterationState(0, 0, 0.0, 0)
    empty = Step(
        iteration,
        False,
        values.AppliedBatch(NO_INTS, NO_INTS),
        ProgressColumns(NO_INTS, NO_INTS, NO_INTS),
        NO_INTS,
        None,
    )
    got = codec.decode_request(pb.ScheduleRequest.FromString(codec.encode_request(empty).SerializeToString()))
    assert isinstance(got, Step)
    assert got.applied is not None
    assert got.progress is not None
    assert got.arrived is None


def test_a_message_without_payload_is_none() -> None:
    assert codec.decode_request(pb.ScheduleRequest()) is None
    assert codec.decode_response(pb.ScheduleResponse()) is None


def test_a_unary_request_without_snapshot_is_told_apart() -> None:
    assert codec.decode_decide_request(pb.DecideRequest())[1] is None


def test_unknown_enum_numbers_of_the_engine_are_kept_for_the_session_to_refuse() -> None:
    session = codec.decode_request(request(open_session={"mode": 9}))
    step = codec.decode_request(request(step={"iteration": {"pause_state": 7}}))
    assert isinstance(session, OpenSession)
    assert isinstance(step, Step)
    assert (session.mode, isinstance(session.mode, Mode)) == (9, False)
    assert step.iteration.pause_state == 7


def test_unknown_enum_numbers_of_the_sidecar_are_read_with_caution() -> None:
    allocation = codec.decode_response(response(batch_allocation={"mode": 9}))
    resync = codec.decode_response(response(resync_required={"reason": 99}))
    error = codec.decode_response(response(session_error={"reason": 99}))
    assert isinstance(allocation, BatchAllocation)
    assert isinstance(resync, values.ResyncRequired)
    assert isinstance(error, values.SessionError)
    assert allocation.mode is Mode.OFF
    assert resync.reason is values.ResyncReason.AFTER_ERROR
    assert error.reason is values.ErrorReason.INTERNAL


@pytest.mark.parametrize("rows", [3, 100])
def test_decoded_columns_are_their_own(rows: int) -> None:
    message = response(batch_allocation={"handles": range(rows), "tokens": [1] * rows})
    got = codec.decode_response(message)
    assert isinstance(got, BatchAllocation)
    message.Clear()
    got.tokens[0] = 5
    np.testing.assert_array_equal(got.handles, np.arange(rows))


STATE = IterationState(1, 2, 0.5, 3)
COLUMNS = RequestColumns(ints(1, 2), np.array([0.0, 1.0]), ints(1, 1))


@pytest.mark.parametrize(
    ("value", "field", "shown"),
    [
        (Step(STATE._replace(free_kv_blocks=-3)), "IterationState.free_kv_blocks", "-3"),
        (Step(STATE._replace(step=2**64)), "IterationState.step", str(2**64)),
        (Step(STATE._replace(now_seconds=cast(float, "soon"))), "IterationState.now_seconds", "soon"),
        (Step(STATE, finished_handles=ints(1, -1)), "Step.finished_handles[1]", "-1"),
        (
            Step(STATE, arrived=COLUMNS._replace(prompt_tokens=ints(4, 2**32))),
            "RequestColumns.prompt_tokens[1]",
            "4294967296",
        ),
        (
            Step(STATE, arrived=COLUMNS._replace(priority=ints(-(2**31) - 1, 0))),
            "RequestColumns.priority[0]",
            "-2147483649",
        ),
        (Step(STATE, arrived=COLUMNS._replace(handles=np.array([0.5]))), "RequestColumns.handles[0]", "0.5"),
        (Step(STATE, arrived=COLUMNS._replace(request_ids=("a", "\ud800"))), "RequestColumns.request_ids[1]", "ud800"),
        (OpenSession(EngineLimits(-1, 1, 1, 1)), "EngineLimits.max_tokens_per_iteration", "-1"),
        (
            OpenSession(EngineLimits(1, 1, 1, 1), policy_parameters={"a": cast(str, 1)}),
            "OpenSession.policy_parameters",
            "'a': 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(value: values.Request, field: str, shown: str) -> None:
    with pytest.raises(codec.ContractError) as caught:
        codec.encode_request(value)
    assert field in str(caught.value)
    assert shown in str(caught.value)


def test_what_does_not_fit_is_named_in_answers_and_unary_calls() -> None:
    allocation = BatchAllocation(1, 2, ints(1), ints(-1))
    session = OpenSession(EngineLimits(1, 1, 1, 1))
    snapshot = Snapshot(STATE, COLUMNS, -1, ProgressColumns(ints(), ints(), ints()))
    with pytest.raises(codec.ContractError, match=r"BatchAllocation\.tokens\[0\]"):
        codec.encode_response(allocation)
    with pytest.raises(codec.ContractError, match=r"BatchAllocation\.tokens\[0\]"):
        codec.encode_decide_response(allocation)
    with pytest.raises(codec.ContractError, match=r"Snapshot\.running_count"):
        codec.encode_decide_request(session, snapshot)


def test_values_are_named_as_the_messages() -> None:
    wrappers = {"ScheduleRequest", "ScheduleResponse", "DecideRequest", "DecideResponse"}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        if name not in wrappers:
            assert set(get_type_hints(getattr(values, name))) == {field.name for field in message.fields}, name
    for name, enum in pb.DESCRIPTOR.enum_types_by_name.items():
        numbers = {int(member) for member in getattr(values, name)}
        assert numbers | {0} == {entry.number for entry in enum.values}, name
