"""Timelines of simulated runs: what is recorded, when, and that recording changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.timelines import record_timeline
from slidingserve.contract.values import EngineLimits
from tests.strategies import LinearTimer, feed, random_feed

LIMITS = EngineLimits(max_tokens_per_iteration=64, max_sequences=8, kv_blocks=40, kv_block_tokens=4)
TIGHT = EngineLimits(max_tokens_per_iteration=32, max_sequences=6, kv_blocks=24, kv_block_tokens=4)


def test_iterations_by_hand() -> None:
    # A prompt of 10 (20 ms); its decode beside a prompt of 5 (16 ms, and 10 us for 10 of context); idle; a prompt of 4.
    rows = record_timeline(feed([(0.0, 10, 2), (0.01, 5, 1), (1.0, 4, 1)]), LIMITS, LinearTimer(), None, 0.0, 10.0)
    assert [row[2:4] for row in rows] == [[10, 0], [5, 1], [4, 0]]
    assert [row[0] for row in rows] == pytest.approx([0.0, 0.02, 1.0])
    assert [row[1] for row in rows] == pytest.approx([0.02, 0.01601, 0.014])


def test_a_window_holds_the_iterations_that_begin_in_it() -> None:
    requests = random_feed(1, 60, 40, 12, 0.02)
    whole = record_timeline(requests, TIGHT, LinearTimer(), None, 0.0, 1e6)
    start = whole[len(whole) // 3][0]
    part = record_timeline(requests, TIGHT, LinearTimer(), None, start, 0.4)
    assert len(part) > 3
    assert part == [row for row in whole if start <= row[0] < start + 0.4]
    assert record_timeline(requests, TIGHT, LinearTimer(), None, 1e5, 1.0) == []


def test_tokens_time_and_misses_are_those_of_the_run() -> None:
    requests = random_feed(1, 60, 40, 12, 0.02)
    engine = SimulatedEngine(requests, TIGHT, LinearTimer())
    outcome = engine.run()
    rows = np.array(record_timeline(requests, TIGHT, LinearTimer(), None, 0.0, 1e6))
    assert len(rows) == outcome.iterations
    assert rows[-1, 0] + rows[-1, 1] == outcome.makespan_seconds
    assert rows[:, 4].sum() == engine.missed_deadlines() > 0
    # Each request decodes all its tokens but the first; what preemptions lost is computed anew, as prefill.
    assert outcome.preemptions > 0
    assert rows[:, 2].sum() > requests.prompt_tokens.sum()
    assert rows[:, 2].sum() + rows[:, 3].sum() > (requests.prompt_tokens + requests.output_tokens - 1).sum()
    assert 0 < rows[:, 3].sum() <= (requests.output_tokens - 1).sum()


@pytest.mark.parametrize(("start", "length"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_a_window_that_never_begins_is_refused(start: float, length: float) -> None:
    with pytest.raises(ValueError, match="a length above 0"):
        record_timeline(feed([(0.0, 1, 1)]), LIMITS, LinearTimer(), None, start, length)
