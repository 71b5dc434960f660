"""Round trips of the real client to a real sidecar, back to back: ``pytest -m bench tests/bench``."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bench.loads import decoding_feed
from evaluation.bench.states import engine_limits
from evaluation.bench.transport import WARM_UP, Transport, free_address, measure_run
from evaluation.sidecar_process import SidecarProcess
from slidingserve.contract.values import OpenSession

pytestmark = pytest.mark.bench
ITERATIONS = 3000
PROFILE = "h100-tp1"


@pytest.mark.parametrize("live", [32, 256, 1024])
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("policy", ["vllm", "slidingserve"])
def test_round_trip(benchmark: Any, policy: str, transport: Transport, live: int) -> None:
    """The same requests decode all the time."""
    opening = OpenSession(engine_limits(live), policy=policy, profile=PROFILE)
    feed = decoding_feed(live, WARM_UP + ITERATIONS + 10)
    timer = ProfileTimer(load_profile(PROFILE))
    with SidecarProcess(address="" if transport == "unix" else free_address()) as sidecar:
        arguments = ("decoding", transport, feed, opening, timer, sidecar, ITERATIONS)
        cost = benchmark.pedantic(measure_run, arguments, rounds=1, iterations=1)
    benchmark.extra_info.update(
        p50_ms=round(1e3 * cost.round_trip.p50, 3),
        p99_ms=round(1e3 * cost.round_trip.p99, 3),
        core_p50_us=round(1e6 * cost.core.p50, 1),
    )
    print(f"\n{policy}, {transport}, {live} requests: {benchmark.extra_info}")
    assert cost.batch == live
