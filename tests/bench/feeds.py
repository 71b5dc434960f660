"""Steady loads for benchmarks."""

from __future__ import annotations

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.timing import IterationTimer
from evaluation.inprocess import InProcessSource
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits, OpenSession

OUTPUT_TOKENS = 150  # mean


def steady_feed(live: int, iterations: int, limits: EngineLimits, timer: IterationTimer, seed: int = 0) -> Workload:
    """Returns requests that keep an engine of ``live`` seats full for ``iterations``, with constant turnover.

    They arrive 5 % faster than a saturated engine serves them, which a trial run measures, so the queue stays short.
    """
    random = np.random.default_rng(seed)
    count = 8 * live + 2 * iterations * live // OUTPUT_TOKENS
    prompts, outputs = random.integers(16, 800, count), random.integers(1, 2 * OUTPUT_TOKENS, count)
    source = InProcessSource()
    source.open(OpenSession(limits))
    trial = SimulatedEngine(workload(np.zeros(count), prompts, outputs), limits, timer, source)
    while trial.finished < 2 * live:
        trial.step()
    finished, seconds = trial.finished, trial.now_seconds
    while trial.finished < 4 * live:
        trial.step()
    per_second = 1.05 * (trial.finished - finished) / (trial.now_seconds - seconds)
    arrivals = np.concatenate([np.zeros(live), np.cumsum(random.exponential(1 / per_second, count - live))])
    return workload(arrivals, prompts, outputs)


def decoding_feed(live: int, output_tokens: int) -> Workload:
    """Returns requests that all arrive at once and then only decode."""
    return workload(np.zeros(live), np.full(live, 8), np.full(live, output_tokens))


def workload(arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> Workload:
    """Returns a workload without classes, TTFT SLO 2 s, TBT SLO 50 ms."""
    count = len(arrivals)
    return Workload(
        name="bench",
        arrival_seconds=arrivals,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft_slo_seconds=np.full(count, 2.0),
        tbt_slo_seconds=np.full(count, 0.05),
        ttlt_slo_seconds=np.zeros(count),
        class_index=np.zeros(count, np.int64),
        class_names=(),
        rate=0.0,
    )
