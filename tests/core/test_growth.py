"""The mirror's tables grow with the live requests and with nothing else."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import EngineLimits, OpenSession
from tests.strategies import LinearTimer, batch, columns, decide, feed, ints, mirror_rows, opened, snapshot, step

WIDE = EngineLimits(max_tokens_per_iteration=1 << 20, max_sequences=5000, kv_blocks=1 << 20, kv_block_tokens=4)


@pytest.mark.parametrize("count", [255, 256, 257, 300, 1100, 2500])
def test_many_requests_arrive_at_once(count: int) -> None:
    session = opened(WIDE)
    handles = list(range(count))
    allocation = decide(session, step(0, free=WIDE.kv_blocks, arrived=columns(handles, [3] * count)))
    assert batch(allocation) == [(handle, 3) for handle in handles]
    allocation = decide(session, step(1, free=WIDE.kv_blocks - count))
    assert batch(allocation) == [(handle, 1) for handle in handles]
    rows = mirror_rows(session)
    assert [row.handle for row in rows] == handles
    assert {(row.running, row.computed, row.output) for row in rows} == {(True, 3, 1)}


def test_many_requests_arrive_little_by_little() -> None:
    narrow = EngineLimits(64, 40, 1 << 20, 4)
    session = opened(narrow)
    expected_running: list[int] = []
    for number in range(60):
        handles = list(range(20 * number, 20 * number + 20))
        allocation = decide(session, step(number, free=narrow.kv_blocks - 40, arrived=columns(handles, [4] * 20)))
        rows = mirror_rows(session)
        assert [row.handle for row in rows] == list(range(20 * number + 20))
        assert [row.handle for row in rows if row.running] == expected_running
        expected_running += [handle for handle, _ in batch(allocation) if handle not in expected_running]
    assert len(expected_running) == 40
    assert len(session.mirror.queues) == 1200


def test_many_requests_leave_from_the_middle() -> None:
    session = opened(WIDE)
    decide(session, step(0, free=WIDE.kv_blocks, arrived=columns(range(1500), [3] * 1500)))
    gone = [handle for handle in range(1500) if handle % 3 != 1]
    decide(session, step(1, free=WIDE.kv_blocks, finished_handles=ints(*gone[::-1])))
    assert [row.handle for row in mirror_rows(session)] == list(range(1, 1500, 3))
    again = decide(session, step(2, free=WIDE.kv_blocks, arrived=columns(range(2000, 2900), [2] * 900)))
    assert again.handles.tolist() == [*range(1, 1500, 3), *range(2000, 2900)]
    assert session.mirror.queues.capacity <= 2048


def test_large_snapshot_and_back() -> None:
    session = opened(WIDE)
    rows = [(handle, 9, 4 if handle < 1200 else 0, 0) for handle in range(3000)]
    allocation = decide(session, snapshot(rows, running=1200, free=WIDE.kv_blocks - 1200))
    assert len(allocation.handles) == 3000
    decide(session, snapshot(rows[:2], running=1, free=WIDE.kv_blocks - 1, epoch=2))
    assert [(row.handle, row.running) for row in mirror_rows(session)] == [(0, True), (1, False)]


def test_many_victims_of_one_iteration() -> None:
    """More than there is room for before the head of the waiting queue, several times in a row."""
    session = opened(WIDE)
    handles = list(range(900))
    decide(session, step(0, free=WIDE.kv_blocks, arrived=columns(handles, [3] * 900)))
    full = snapshot([(handle, 3, 3, 1) for handle in handles], running=900, free=0)
    number = 0
    for epoch in range(1, 4):
        full = full._replace(iteration=full.iteration._replace(epoch=epoch, step=number, free_kv_blocks=0))
        allocation = decide(session, full)
        assert len(allocation.handles) == 900, "the fourth token fits into the first block"
        one_more = decide(session, step(number + 1, free=0, epoch=epoch))
        assert one_more.preempted_handles.tolist() == handles[:449:-1]
        decide(session, step(number + 2, free=0, epoch=epoch))
        rows = mirror_rows(session)
        assert [row.handle for row in rows] == handles
        assert sum(row.running for row in rows) == 450
        number += 3


def test_tables_do_not_grow_with_time() -> None:
    """20,000 iterations and 9,000 requests that come and go, about 300 of them live at once."""
    limits = EngineLimits(max_tokens_per_iteration=16, max_sequences=4, kv_blocks=12, kv_block_tokens=4)
    rng = np.random.default_rng(7)
    arrivals = np.repeat(np.arange(30) * 16.0, 300)
    rows = zip(arrivals.tolist(), rng.integers(1, 12, 9000).tolist(), rng.integers(1, 20, 9000).tolist(), strict=True)
    source = InProcessSource()
    source.open(OpenSession(limits, policy="vllm"))
    engine = SimulatedEngine(feed(list(rows)), limits, LinearTimer(), source)
    queues = source.session.mirror.queues
    most_live, capacity, objects = 0, 0, 0
    while engine.step():
        most_live = max(most_live, engine.live)
        if engine.iterations == 2000:
            capacity = queues.capacity
            objects = len(gc.get_objects())
        if engine.iterations % 2000 == 0:
            assert len(mirror_rows(source.session)) <= most_live + 8
    assert engine.iterations > 20_000
    assert engine.outcome().finished.all()
    assert engine.outcome().preemptions > 100, most_live
    assert queues.capacity == capacity <= 2 * most_live + 256
    assert len(queues) <= 8, "only those of the last batch, whose end has not been told"
    assert len(gc.get_objects()) < objects + 1000
