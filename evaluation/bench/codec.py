"""The codec alone: the messages of one iteration, to bytes and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from evaluation.results import Tail, tail
from slidingserve.contract.codec import decode_request, decode_response, encode_request, encode_response
from slidingserve.contract.values import (
    BatchAllocation,
    IterationState,
    PhaseTimings,
    Request,
    RequestColumns,
    Response,
    Step,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

T = TypeVar("T")

ARRIVALS = 4
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What the messages of an iteration of ``requests`` requests cost; seconds, and bytes on the wire.

    Attributes:
        requests: entries of the allocation; the step has ARRIVALS arrivals and as many that finished.
        step_bytes: length of the step.
        allocation_bytes: length of the allocation.
        encode_step: value to bytes, on the engine's side.
        decode_step: bytes to value, in the sidecar.
        encode_allocation: value to bytes, in the sidecar.
        decode_allocation: bytes to value, on the engine's side.
    """

    requests: int
    step_bytes: int
    allocation_bytes: int
    encode_step: Tail
    decode_step: Tail
    encode_allocation: Tail
    decode_allocation: Tail


def measure_codec(sizes: tuple[int, ...], repeats: int, progress: Callable[[str], None]) -> Iterator[CodecCost]:
    """Yields the cost of each size."""
    for requests in sizes:
        progress(f"codec: {requests} requests")
        step, allocation = iteration_messages(requests)
        step_bytes, allocation_bytes = _encode_step(step), _encode_allocation(allocation)
        yield CodecCost(
            requests,
            len(step_bytes),
            len(allocation_bytes),
            encode_step=_timed(repeats, _encode_step, step),
            decode_step=_timed(repeats, _decode_step, step_bytes),
            encode_allocation=_timed(repeats, _encode_allocation, allocation),
            decode_allocation=_timed(repeats, _decode_allocation, allocation_bytes),
        )


def iteration_messages(requests: int) -> tuple[Step, BatchAllocation]:
    """Returns a step with ARRIVALS arrivals, and an allocation of so many requests; handles as of a long session."""
    first = 1_000_000
    handles = np.arange(first, first + requests)
    new = np.arange(first + requests, first + requests + ARRIVALS)
    step = Step(
        IterationState(3, 250_000, 4711.25, 12_345, 0.0213),
        finished_handles=handles[:: max(1, requests // ARRIVALS)][:ARRIVALS].copy(),
        arrived=RequestColumns(
            new,
            np.linspace(4711.2, 4711.25, ARRIVALS),
            np.arange(100, 100 + ARRIVALS),
            ttft_slo_seconds=np.full(ARRIVALS, 2.0),
            tbt_slo_seconds=np.full(ARRIVALS, 0.05),
        ),
    )
    tokens = np.ones(requests, np.int64)
    tokens[-max(1, requests // 16) :] = 200
    allocation = BatchAllocation(
        3,
        250_000,
        handles,
        tokens,
        predicted_seconds=0.0213,
        policy_version="slidingserve/1-robust",
        model_version="h100-tp1/paper7-table/1@0123abcd",
        decision_path="chunker",
        phase_timings=PhaseTimings(1e-5, 1e-5, 1e-5, 1e-5),
    )
    return step, allocation


def _encode_step(step: Step) -> bytes:
    return encode_request(step).SerializeToString()


def _decode_step(wire: bytes) -> Request | None:
    return decode_request(pb.ScheduleRequest.FromString(wire))


def _encode_allocation(allocation: BatchAllocation) -> bytes:
    return encode_response(allocation).SerializeToString()


def _decode_allocation(wire: bytes) -> Response | None:
    return decode_response(pb.ScheduleResponse.FromString(wire))


def _timed(repeats: int, call: Callable[[T], object], argument: T) -> Tail:
    seconds = np.zeros(repeats)
    for number in range(-WARM_UP, repeats):
        started = time.perf_counter()
        call(argument)
        taken = time.perf_counter() - started
        if number >= 0:
            seconds[number] = taken
    return tail(seconds)
