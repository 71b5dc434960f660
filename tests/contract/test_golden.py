"""The golden messages: bytes, JSON twin and codec agree, and every message type has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from slidingserve.contract import codec
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.contract.make_golden import FOLDER, golden_messages, to_bytes, to_json

NAMES = sorted(path.stem for path in FOLDER.glob("*.binpb"))


def read(name: str) -> tuple[bytes, str, Message]:
    wire = (FOLDER / f"{name}.binpb").read_bytes()
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    message: Message = getattr(pb, name.split(".")[0]).FromString(wire)
    return wire, text, message


def through_codec(message: Message) -> Message | None:
    """Decodes and encodes again; None for a part that the codec does not do on its own."""
    if isinstance(message, pb.ScheduleRequest):
        request = codec.decode_request(message)
        assert request is not None
        return codec.encode_request(request)
    if isinstance(message, pb.ScheduleResponse):
        response = codec.decode_response(message)
        assert response is not None
        return codec.encode_response(response)
    if isinstance(message, pb.DecideRequest):
        session, snapshot = codec.decode_decide_request(message)
        assert snapshot is not None
        return codec.encode_decide_request(session, snapshot)
    if isinstance(message, pb.DecideResponse):
        return codec.encode_decide_response(codec.decode_decide_response(message))
    return None


def set_fields(message: Message) -> Iterator[str]:
    for field, content in message.ListFields():
        yield field.full_name
        if isinstance(content, Message):
            yield from set_fields(content)


def test_every_message_type_has_a_golden_message() -> None:
    assert {name.split(".")[0] for name in NAMES} == set(pb.DESCRIPTOR.message_types_by_name)


def test_the_files_are_those_that_the_script_writes() -> None:
    assert set(NAMES) == set(golden_messages())
    for name, message in golden_messages().items():
        wire, text, _ = read(name)
        assert (wire, text) == (to_bytes(message), to_json(message)), name


def test_the_golden_messages_set_every_field() -> None:
    seen = {path for name in NAMES for path in set_fields(read(name)[2])}
    fields = {f.full_name for message in pb.DESCRIPTOR.message_types_by_name.values() for f in message.fields}
    assert fields <= seen


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_json_twin_say_the_same(name: str) -> None:
    wire, text, message = read(name)
    twin = json_format.Parse(text, type(message)())
    assert twin == message
    assert to_bytes(twin) == wire


@pytest.mark.parametrize("name", NAMES)
def test_the_codec_gives_the_same_bytes(name: str) -> None:
    wire, _, message = read(name)
    again = through_codec(message)
    if again is not None:
        assert to_bytes(again) == wire
