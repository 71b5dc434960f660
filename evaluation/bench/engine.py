"""Whole iterations in one process: simulated engine, mirror and policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.timing import IterationTimer
from evaluation.bench.loads import LOADS, Load, make_load, open_source
from evaluation.bench.transport import run_iterations
from slidingserve.contract.values import OpenSession


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Simulated iterations per second of one core.

    Attributes:
        policy: its name.
        load: see `loads`.
        requests: seats of the engine.
        live: requests that it held on average, those that wait included.
        median: iterations per second in the median round.
        slowest: in the slowest.
        fastest: in the fastest.
    """

    policy: str
    load: Load
    requests: int
    live: float
    median: float
    slowest: float
    fastest: float


def measure_engine(
    openings: tuple[OpenSession, ...],
    timer: IterationTimer,
    iterations: int,
    rounds: int,
    progress: Callable[[str], None],
) -> Iterator[EngineSpeed]:
    """Yields the speed under each policy and load; the limits of an opening say how many seats there are."""
    for opening in openings:
        requests = opening.limits.max_sequences
        for load in LOADS:
            progress(f"iterations in one process: {opening.policy}, {load}, {requests} requests")
            feed = make_load(load, requests, (rounds + 1) * iterations, opening, timer)
            engine = SimulatedEngine(feed, opening.limits, timer, open_source(opening))
            run_iterations(engine, iterations)  # fill the engine, compile
            yield _speed(engine, opening.policy, load, requests, iterations, rounds)


def _speed(
    engine: SimulatedEngine, policy: str, load: Load, requests: int, iterations: int, rounds: int
) -> EngineSpeed:
    seconds = np.zeros(rounds)
    live = np.zeros(rounds)
    for number in range(rounds):
        started = time.perf_counter()
        live[number] = run_iterations(engine, iterations)
        seconds[number] = time.perf_counter() - started
    rates = iterations / seconds
    return EngineSpeed(
        policy,
        load,
        requests,
        float(live.mean()),
        float(np.median(rates)),
        float(rates.min()),
        float(rates.max()),
    )
