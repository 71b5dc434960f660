"""A predictor that returns nonsense stops nothing: decisions stay within the limits and every request ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import InProcessSource
from predictor.model import Expert, LatencyModel
from sidecar.policies.base import PolicyContext
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.parameters import MODES, SlidingServeParameters
from sidecar.session.machine import Session
from slidingserve.contract.values import (
    BatchAllocation,
    EngineLimits,
    Snapshot,
    Step,
)
from tests.slidingserve.scenes import LIMITS, Scene, State, decoding, make_policy, prompt, session_with, states
from tests.strategies import (
    LinearTimer,
    assert_within_limits,
    batch,
    decide,
    engine_rows,
    random_feed,
    run_to_end,
)


def uniform(value: float) -> LatencyModel:
    """Every weight and the intercept are this number."""
    return LatencyModel("nonsense/1", "none", {"global": Expert(value, (value,) * 7)})


def apart(decode: float, prefill: float, mixed: float) -> LatencyModel:
    """Each scenario takes a time of its own, whatever it holds."""
    times = {"decode": decode, "prefill": prefill, "mixed": mixed, "global": mixed}
    return LatencyModel("apart/1", "none", {name: Expert(seconds, (0.0,) * 7) for name, seconds in times.items()})


NAN, INF = math.nan, math.inf
ALTERNATING = LatencyModel("odd/1", "none", {"global": Expert(0.01, (0.0,) * 7)}, (-1.0, 1.0) * 300)
HUGE, SUBNORMAL = 1e308, 5e-324
NONSENSE: dict[str, LatencyModel] = {
    "nan": uniform(NAN),
    "infinite": uniform(INF),
    "minus infinite": uniform(-INF),
    "zero": uniform(0.0),
    "huge": uniform(HUGE),
    "minus huge": uniform(-HUGE),
    "minus a little": uniform(-1e-6),
    "subnormal": uniform(SUBNORMAL),
    "hours": uniform(3600.0),
    "alternating": ALTERNATING,
    "signs": LatencyModel("odd/1", "none", {"global": Expert(1.0, (1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0))}),
    "nan of decodes": apart(NAN, 0.02, 0.02),
    "nan of prompts": apart(0.01, NAN, 0.02),
    "nan of both": apart(0.01, 0.02, NAN),
    "infinite both": apart(0.01, 0.02, INF),
    "minus of both": apart(0.01, 0.02, -5.0),
    "nan in the table": LatencyModel("odd/1", "none", {"global": Expert(0.01, (0.0,) * 7)}, (0.0, NAN) * 300),
    "no time at first": LatencyModel("odd/1", "none", {"global": Expert(0.0, (0.0,) * 7)}, (0.0,) * 200 + (9.0,) * 20),
}
UNPREDICTABLE = ("nan", "infinite", "minus infinite", "zero", "minus huge", "minus a little")
with_nonsense = pytest.mark.parametrize("name", NONSENSE)
in_both_modes = pytest.mark.parametrize("mode", MODES)


class WatchingSource(InProcessSource):
    """Holds every allocation against the engine's limits, and decodes against it; refusals are raised."""

    def __init__(self, session: Session, limits: EngineLimits) -> None:
        super().__init__()
        self.session = session
        self._limits = limits
        self.paths: set[str] = set()

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        allocation = super().decide(step, snapshot)
        full = snapshot()
        assert_served(allocation, State(full, self._limits))
        assert math.isfinite(allocation.predicted_seconds)
        assert allocation.predicted_seconds >= 0.0
        self.paths.add(allocation.decision_path)
        return allocation


def assert_served(allocation: BatchAllocation, state: State) -> None:
    """Within the limits; as far as the budget goes decodes have their tokens, and they come first."""
    assert_within_limits(allocation, state.full, state.limits)
    victims = allocation.preempted_handles.tolist()
    decodes = [
        row.handle
        for row in engine_rows(state.full, state.limits)
        if row.running and row.output and row.prompt + row.output - row.computed == 1 and row.handle not in victims
    ]
    given_tokens = dict(batch(allocation))
    handles, column = state.full.requests.handles.tolist(), state.full.requests.speculative_tokens.tolist()
    drafts = dict(zip(handles, column or [0] * len(handles), strict=True))
    if sum(1 + drafts[handle] for handle in decodes) <= state.limits.max_tokens_per_iteration:
        assert [given_tokens.get(handle) for handle in decodes] == [1 + drafts[handle] for handle in decodes]


@with_nonsense
@in_both_modes
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(state=states())
def test_any_state_is_decided_within_the_limits(name: str, mode: str, state: State) -> None:
    session = session_with(lambda limits: make_policy(NONSENSE[name], limits, mode=mode), state.limits)
    assert_served(decide(session, state.full), state)


@with_nonsense
@pytest.mark.parametrize(
    "how", [{}, {"mode": "paper"}, {"window": 1}, {"window": 4}, {"objective": "max_tokens"}], ids=str
)
def test_every_request_ends(name: str, how: dict[str, Any]) -> None:
    requests = random_feed(5, 15, prompt=300, output=10, gap_seconds=0.05)
    session = session_with(lambda limits: make_policy(NONSENSE[name], limits, **how), LIMITS)
    source = WatchingSource(session, LIMITS)
    engine = SimulatedEngine(requests, LIMITS, LinearTimer(), source)
    run_to_end(engine, most_steps=2000)
    assert engine.outcome().finished.all()
    if name in UNPREDICTABLE:
        assert source.paths <= {"unpredicted", "decode"}
        assert engine.outcome().fallbacks == 0


@pytest.mark.parametrize("name", UNPREDICTABLE)
@in_both_modes
def test_where_no_time_is_predicted_b_alone_counts(name: str, mode: str) -> None:
    scene = Scene([prompt(3000, 0.001), prompt(700, -1.0), *[decoding(0.02)] * 4])
    decision = scene.decide(NONSENSE[name], mode=mode, max_tokens=1024)
    assert (decision.path, decision.total, decision.predicted_seconds) == ("unpredicted", 1024, 0.0)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -1e-6, -HUGE])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(limit=st.integers(1, 5000))
def test_a_cap_by_a_model_of_nonsense_is_a_cap(value: float, limit: int) -> None:
    limits = EngineLimits(limit, max_sequences=8, kv_blocks=100, kv_block_tokens=16)
    policy = SlidingServePolicy(SlidingServeParameters(), PolicyContext(limits), uniform(value))
    assert 1 <= policy.max_tokens <= limit
