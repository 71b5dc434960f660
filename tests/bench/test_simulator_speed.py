"""Iterations per second of engine, mirror and policy in one process: ``pytest -m bench tests/bench``.

One round is 2000 iterations; iterations/s = 2000 / the time shown.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bench.loads import Load, make_load, open_source
from evaluation.bench.states import engine_limits
from slidingserve.contract.values import OpenSession

pytestmark = pytest.mark.bench
ITERATIONS = 2000
ROUNDS = 5
PROFILE = "h100-tp1"


@pytest.mark.parametrize("live", [10, 100, 256, 1000])
@pytest.mark.parametrize("load", ["turnover", "decoding"])
@pytest.mark.parametrize("policy", ["vllm", "slidingserve"])
def test_iterations(benchmark: Any, policy: str, load: Load, live: int) -> None:
    """With turnover requests come and go (150 output tokens on average); without, the same ones decode all the time."""
    opening = OpenSession(engine_limits(live), policy=policy, profile=PROFILE)
    timer = ProfileTimer(load_profile(PROFILE))
    feed = make_load(load, live, (ROUNDS + 2) * ITERATIONS, opening, timer)
    engine = SimulatedEngine(feed, opening.limits, timer, open_source(opening))

    def run() -> None:
        for _ in range(ITERATIONS):
            assert engine.step(), "the feed is too short"

    run()  # fill the engine, compile
    benchmark.pedantic(run, rounds=ROUNDS, iterations=1)
    benchmark.extra_info["iterations_per_second"] = round(ITERATIONS / benchmark.stats.stats.min)
    benchmark.extra_info["live"] = engine.live
    print(f"\n{policy}, {live} live, {load}: {benchmark.extra_info}")
