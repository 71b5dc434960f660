"""What the adapter by itself adds to an iteration, beside plain vLLM: ``pytest -m "bench and vllm" tests/vllm -s``.

Both schedulers go through the same iterations by turns, so both meet the same machine. Whoever decides answers at once:
what is measured is asking, keeping the books, following the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")

from slidingserve.contract.values import BatchAllocation, Mode, OpenSession, Snapshot, Step
from tests.vllm.scheduler_objects import EngineLoop, Setup, make_request, make_scheduler
from tests.vllm.sources import Source, advised_loop

pytestmark = [pytest.mark.vllm, pytest.mark.bench]
ROUNDS = 600
WARM_UP = 100


class AtOnce(Source):
    """Lets everybody decode who runs."""

    def __init__(self, mode: Mode = Mode.ACTIVE) -> None:
        super().__init__()
        self.plan: tuple[Any, Any] | None = None
        self.mode = mode

    def open(self, message: OpenSession) -> Any:
        self.opening = message

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        if step.arrived is not None:
            self.handles.update(zip(step.arrived.request_ids, step.arrived.handles.tolist(), strict=True))
        if self.plan is None:
            return BatchAllocation(0, step.iteration.step, *_columns(self.handles, 0), mode=Mode.SHADOW)
        return BatchAllocation(0, step.iteration.step, *self.plan, mode=self.mode)

    def settle(self, running: list[str]) -> None:
        handles = [self.handles[name] for name in running]
        self.plan = (np.array(handles, np.int64), np.ones(len(handles), np.int64))


def _columns(handles: dict[str, int], count: int) -> tuple[Any, Any]:
    return np.array(list(handles.values())[:count], np.int64), np.ones(count, np.int64)


@pytest.mark.parametrize(("running", "waiting"), [(8, 0), (64, 0), (64, 200), (256, 744)])
def test_adapter_alone(benchmark: Any, running: int, waiting: int) -> None:
    setup = Setup(max_sequences=running, max_tokens=8192, blocks=40_000, prefix_caching=False)
    source = AtOnce()
    loops = {"plain": EngineLoop(make_scheduler(setup)), "advised": advised_loop(setup, source)}
    for loop in loops.values():
        loop.add(*(make_request(f"r{n}", 24, 3000) for n in range(running + waiting)))
        for _ in range(3):
            loop.step()
        assert len(loop.scheduler.running) == running
    source.settle([request.request_id for request in loops["advised"].scheduler.running])
    seconds: dict[str, list[float]] = {name: [] for name in loops}

    def turn(name: str) -> None:
        scheduler, runner = loops[name].scheduler, loops[name].runner
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        result = runner.execute(output)
        executed = time.perf_counter()
        scheduler.update_from_output(output, result)
        seconds[name].append(time.perf_counter() - executed + scheduled - started)
        assert output.total_num_scheduled_tokens == running

    def run() -> None:
        for _ in range(ROUNDS):
            turn("plain")
            turn("advised")

    benchmark.pedantic(run, rounds=1, iterations=1)
    medians = {name: 1e6 * float(np.median(values[WARM_UP:])) for name, values in seconds.items()}
    added = np.array(seconds["advised"][WARM_UP:]) - np.array(seconds["plain"][WARM_UP:])
    print(
        f"\n{running} running, {waiting} waiting: plain {medians['plain']:.0f} us, "
        f"advised {medians['advised']:.0f} us, added p50 {1e6 * np.median(added):.0f} us"
    )
    assert loops["advised"].scheduler._staff is not None
