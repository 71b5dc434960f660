"""A session's memory does not grow, however long it lasts and however many requests come and go."""

from __future__ import annotations

import gc
import tracemalloc

import psutil
import pytest

from evaluation.sidecar_process import SidecarProcess
from sidecar.answering import answer_request
from sidecar.session.machine import Session
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import BatchAllocation, OpenSession, SessionOpened, Snapshot, Step
from tests.service.support import OPEN, client_of, engine_for, wait_ready
from tests.strategies import Feed, random_feed

MEGABYTE = 2**20


def feed_for(iterations: int) -> Feed:
    """Requests that keep the engine busy for at least so many iterations; in about every second one leaves."""
    return random_feed(seed=7, count=iterations, prompt=30, output=6, gap_seconds=0.2)


class WireSource:
    """A session in this process, with the codec of both sides and without the wire."""

    def __init__(self) -> None:
        self._session = Session("memory")

    def open(self, message: OpenSession) -> SessionOpened:
        answer = self._answer(message)
        assert isinstance(answer, SessionOpened)
        return answer

    def decide(self, step: Step, snapshot: object) -> BatchAllocation:
        answer = self._answer(step)
        assert isinstance(answer, BatchAllocation), answer
        return answer

    def close(self) -> None:
        pass

    def _answer(self, message: OpenSession | Step | Snapshot) -> object:
        return decode_response(answer_request(self._session, encode_request(message))[1])


def test_session_in_process() -> None:
    source = WireSource()
    source.open(OPEN)
    engine = engine_for(feed_for(20_000), source)
    while engine.iterations < 5_000:
        assert engine.step()
    gc.collect()
    tracemalloc.start()
    try:
        before, finished = tracemalloc.get_traced_memory()[0], engine.finished
        while engine.iterations < 20_000:
            assert engine.step()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert engine.finished - finished > 5_000, "requests are meant to come and go"
    assert grown < 0.1 * MEGABYTE


@pytest.mark.long
def test_sidecar_process() -> None:
    with SidecarProcess() as sidecar:
        wait_ready(sidecar)
        process = psutil.Process(sidecar.process.pid)
        sizes = {}
        with client_of(sidecar) as client:
            engine = engine_for(feed_for(200_000), client)
            for goal in range(20_000, 200_001, 20_000):
                while engine.iterations < goal:
                    assert engine.step()
                sizes[goal] = process.memory_info().rss / MEGABYTE
            assert client.counters.total_fallbacks == 0
        print(f"\nresident megabytes by iteration: { {goal: round(size, 2) for goal, size in sizes.items()} }")
        assert sizes[200_000] - sizes[20_000] < 3, sizes
