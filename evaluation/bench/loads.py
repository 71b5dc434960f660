"""Steady loads of a simulated engine."""

from __future__ import annotations

from typing import Literal

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.timing import IterationTimer
from evaluation.inprocess import InProcessSource
from evaluation.workloads import Workload
from slidingserve.contract.values import Floats, Ints, OpenSession

Load = Literal["decoding", "turnover"]
LOADS: tuple[Load, ...] = ("decoding", "turnover")

OUTPUT_TOKENS = 150  # mean
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 800
TTFT_SLO_SECONDS, TBT_SLO_SECONDS = 2.0, 0.05
_TRIALS = 10
_FLOODED = 4  # times as many as wanted; no need to look any longer
_TRIAL_ITERATIONS, _TRIAL_ITERATIONS_PER_REQUEST = 2500, 4  # many requests have a longer way to a balance


def make_load(load: Load, live: int, iterations: int, opening: OpenSession, timer: IterationTimer) -> Workload:
    """Returns requests for at least ``iterations`` iterations of an engine that holds about ``live`` of them."""
    if load == "decoding":
        return decoding_feed(live, iterations + 10)
    return steady_feed(live, iterations, opening, timer)


def steady_feed(live: int, iterations: int, opening: OpenSession, timer: IterationTimer, seed: int = 0) -> Workload:
    """Returns requests that come and go, about ``live`` of them at a time, for ``iterations``.

    So many are there at the beginning, amid their outputs; the others arrive at random, at the rate at which the engine
    of ``opening`` (under its policy) neither drains nor fills up. Trial runs find it by bisection.
    """
    random = np.random.default_rng(seed)
    count = 8 * live + 2 * iterations * live // OUTPUT_TOKENS
    prompts = random.integers(SHORTEST_PROMPT, LONGEST_PROMPT, count)
    outputs = random.integers(1, 2 * OUTPUT_TOKENS, count)
    prompts[:live] = SHORTEST_PROMPT
    left = 2 * OUTPUT_TOKENS * (1.0 - np.sqrt(random.random(live)))  # of a uniform length, looked at at any time
    outputs[:live] = np.maximum(left.astype(np.int64), 1)
    gaps = np.cumsum(random.exponential(1.0, count - live))

    def feed(seconds_between: float) -> Workload:
        return workload(np.concatenate([np.zeros(live), seconds_between * gaps]), prompts, outputs)

    longest = _TRIAL_ITERATIONS + _TRIAL_ITERATIONS_PER_REQUEST * live

    def held(seconds_between: float) -> float:
        """Returns how many requests the engine holds on average in the second half of a trial."""
        trial = SimulatedEngine(feed(seconds_between), opening.limits, timer, open_source(opening))
        held_at = []
        while trial.iterations < min(iterations, longest) and trial.step():
            held_at.append(trial.live)
            if trial.live > _FLOODED * live:
                return float(trial.live)
        return float(np.mean(held_at[len(held_at) // 2 :]))

    low, high = 1e-4, 3.0  # seconds between arrivals: too many and too few
    for _ in range(_TRIALS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if held(middle) > live else (low, middle)
    return feed(high)


def open_source(opening: OpenSession) -> InProcessSource:
    """Returns a session in this process, open."""
    source = InProcessSource()
    source.open(opening)
    return source


def decoding_feed(live: int, output_tokens: int) -> Workload:
    """Returns requests that all arrive at once and then only decode."""
    return workload(np.zeros(live), np.full(live, 8), np.full(live, output_tokens))


def workload(arrivals: Floats, prompts: Ints, outputs: Ints) -> Workload:
    """Returns a workload without classes, TTFT SLO 2 s, TBT SLO 50 ms."""
    count = len(arrivals)
    return Workload(
        name="bench",
        arrival_seconds=arrivals,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft_slo_seconds=np.full(count, TTFT_SLO_SECONDS),
        tbt_slo_seconds=np.full(count, TBT_SLO_SECONDS),
        ttlt_slo_seconds=np.zeros(count),
        class_index=np.zeros(count, np.int64),
        class_names=(),
        rate=0.0,
    )
