"""Iterations per second of engine, mirror and policy in one process: ``pytest -m bench tests/bench``.

One round is 2000 iterations; iterations/s = 2000 / the time shown.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import EngineLimits, OpenSession
from tests.bench.feeds import decoding_feed, steady_feed

pytestmark = pytest.mark.bench
ITERATIONS = 2000
ROUNDS = 5


@pytest.mark.parametrize("live", [10, 100, 256, 1000])
@pytest.mark.parametrize("turnover", [True, False], ids=["turnover", "decoding"])
def test_iterations(benchmark: Any, live: int, turnover: bool) -> None:
    """With turnover requests come and go (150 output tokens on average); without, the same ones decode all the time."""
    limits = EngineLimits(4096, live, 1000 * live, 16)
    source = InProcessSource()
    source.open(OpenSession(limits))
    timer = ProfileTimer(load_profile("h100-tp1"))
    iterations = (ROUNDS + 2) * ITERATIONS
    feed = steady_feed(live, iterations, limits, timer) if turnover else decoding_feed(live, iterations)
    engine = SimulatedEngine(feed, limits, timer, source)

    def run() -> None:
        for _ in range(ITERATIONS):
            assert engine.step(), "the feed is too short"

    run()  # fill the engine, compile
    benchmark.pedantic(run, rounds=ROUNDS, iterations=1)
    benchmark.extra_info["iterations_per_second"] = round(ITERATIONS / benchmark.stats.stats.min)
    benchmark.extra_info["live"] = engine.live
    print(f"\n{live} live, turnover {turnover}: {benchmark.extra_info}")
