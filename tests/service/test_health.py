"""Health, reflection, and the second address for probes."""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from evaluation.sidecar_process import SidecarProcess
from tests.service.support import (
    LONG_SECONDS,
    SERVICE,
    RawStream,
    channel_to,
    health_status,
)

CONTROL = "slidingserve.control.v1.ControlService"
NAMES = ("", SERVICE, CONTROL, "readiness", "liveness")


def test_health_by_name(channel: grpc.Channel) -> None:
    assert [health_status(channel, name) for name in NAMES] == ["SERVING"] * 5
    assert health_status(channel, "nope") == "NOT_FOUND"


def services(channel: grpc.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = stub.ServerReflectionInfo(iter([question]), timeout=LONG_SECONDS)
    return [entry.name for entry in next(answers).list_services_response.service]


def test_reflection_lists_the_services_and_knows_the_contract(channel: grpc.Channel) -> None:
    assert sorted(services(channel)) == sorted(
        [SERVICE, CONTROL, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    )
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    answer = next(stub.ServerReflectionInfo(iter([question]), timeout=LONG_SECONDS))
    assert any(b"IterationState" in file for file in answer.file_descriptor_response.file_descriptor_proto)


def test_second_address_serves_health_alone(sidecar: SidecarProcess, probes: str) -> None:
    with channel_to(probes) as channel:
        assert [health_status(channel, name) for name in NAMES] == ["SERVING"] * 5
        assert SERVICE not in services(channel)
        with RawStream(channel) as stream:
            assert stream.ends_with() == "UNIMPLEMENTED"
