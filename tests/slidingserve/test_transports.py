"""The policy decides the same over gRPC and in process, token by token."""

from __future__ import annotations

import pytest

from evaluation.results import RunResult
from evaluation.simulate import SimulationRequest, simulate

POLICIES = ("slidingserve", "slidingserve:mode=paper", "slidingserve:window=3,fill_remainder=true")


@pytest.fixture(scope="module")
def runs() -> dict[str, list[RunResult]]:
    """Each policy on the same requests, by transport."""
    return {
        "grpc": simulate(request("grpc")),
        "inprocess": simulate(request("inprocess")),
    }


def request(transport: str) -> SimulationRequest:
    return SimulationRequest(
        policies=POLICIES,
        workload="mixed-v1",
        rate=3.0,
        requests=30,
        profile="rtx3090-tp2",
        transport="grpc" if transport == "grpc" else "inprocess",
    )


@pytest.mark.parametrize("place", range(len(POLICIES)), ids=POLICIES)
def test_both_transports_give_the_same_allocations(runs: dict[str, list[RunResult]], place: int) -> None:
    wire, process = runs["grpc"][place], runs["inprocess"][place]
    assert wire.allocation_digest == process.allocation_digest
    assert wire.scores == process.scores
    assert (wire.iterations, wire.fallbacks) == (process.iterations, process.fallbacks)
    assert wire.round_trip_seconds is not None
    assert process.round_trip_seconds is None


def test_the_parameters_reach_the_policy(runs: dict[str, list[RunResult]]) -> None:
    for results in runs.values():
        assert len({result.allocation_digest for result in results}) == len(POLICIES)
        assert [result.policy for result in results] == ["slidingserve"] * len(POLICIES)
