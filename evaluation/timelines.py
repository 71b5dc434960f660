"""A window of one run, iteration by iteration: what is in each batch, and which deadlines are missed in it."""

from __future__ import annotations

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.feed import RequestFeed
from engine_adapter.simulated.timing import IterationTimer
from engine_adapter.source import DecisionSource
from slidingserve.contract.values import EngineLimits


def record_timeline(
    workload: RequestFeed,
    limits: EngineLimits,
    timer: IterationTimer,
    source: DecisionSource | None,
    start_seconds: float,
    limit_seconds: float,
) -> list[list[float]]:
    """Runs a simulated engine and records the iterations that begin in a window of its time.

    The run is the one that `SimulatedEngine.run` makes; it is left where the window ends. A request counts as missed
    once: in the iteration that ends behind its first token's deadline, come or not, or gives it a later token late.

    Args:
        workload: the requests.
        limits: of the engine.
        timer: how long a batch takes.
        source: who decides; None: the engine's own policy. It must be open.
        start_seconds: of the window, virtual time; what happens before is simulated but not recorded.
        limit_seconds: length of the window.

    Returns:
        One row for each iteration: start and duration in seconds, prefill tokens, decode tokens, and how many requests
        missed their first deadline in it. Empty if nothing runs in the window.

    Raises:
        ValueError: a window that is negative or never begins.

    Time: that of the run, plus O(requests that have arrived) for each recorded iteration.
    """
    if not (start_seconds >= 0.0 and limit_seconds > 0.0):
        raise ValueError(
            f"a timeline from {start_seconds} s for {limit_seconds} s: give a start of 0 or later and a length above 0"
        )
    engine = SimulatedEngine(workload, limits, timer, source)
    stop_seconds = start_seconds + limit_seconds
    rows: list[list[float]] = []
    missed = None
    running = True
    while running:
        begins, before = engine.now_seconds, engine.iterations
        if begins >= stop_seconds:
            break
        if missed is None and begins >= start_seconds:
            missed = engine.missed_deadlines()
        running = engine.step()
        if missed is None or engine.iterations == before:
            continue
        now_missed = engine.missed_deadlines()
        prefill, decode = engine.last_batch_tokens()
        rows.append([begins, engine.now_seconds - begins, prefill, decode, now_missed - missed])
        missed = now_missed
    return rows
