"""Round trips of the real client to a real sidecar, Unix socket, back to back: ``pytest -m bench tests/bench``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_adapter.client import ClientSettings, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.recording import RecordingSource
from evaluation.sidecar_process import SidecarProcess
from evaluation.simulate import open_client
from slidingserve.contract.values import EngineLimits, OpenSession
from tests.bench.feeds import decoding_feed

pytestmark = pytest.mark.bench
WARM_UP, ITERATIONS = 300, 3000


@pytest.mark.parametrize("live", [32, 256, 1024])
def test_round_trip(benchmark: Any, live: int) -> None:
    limits = EngineLimits(16384, live, 200 * live, 16)
    opening = OpenSession(limits)
    seconds: list[float] = []
    with SidecarProcess() as sidecar:
        client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None), on_round_trip=seconds.append)
        try:
            open_client(client, opening, sidecar)
            source = RecordingSource(client)
            feed = decoding_feed(live, WARM_UP + ITERATIONS + 10)
            engine = SimulatedEngine(feed, limits, ProfileTimer(load_profile("h100-tp1")), source)

            def run() -> None:
                seconds.clear()
                for _ in range(ITERATIONS):
                    engine.step()

            for _ in range(WARM_UP):
                engine.step()
            benchmark.pedantic(run, rounds=1, iterations=1)
        finally:
            client.close()
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    core = np.percentile(source.decision_seconds()[WARM_UP:], 50) * 1e6
    benchmark.extra_info.update(
        p50_ms=round(float(p50), 3), p99_ms=round(float(p99), 3), core_p50_us=round(float(core), 1)
    )
    print(f"\n{live} requests: {benchmark.extra_info}")
    assert client.counters.total_fallbacks == 0
