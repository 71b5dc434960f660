"""SlidingServe with relegation: who cannot be in time leaves P, and gets what P leaves. T = 1 ms per token."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from predictor.model import LatencyModel
from sidecar.policies.slidingserve.policy import SlidingServePolicy
from tests.policies.rivals import Decision, Req, World, decode, due, per_token, with_relegation
from tests.policies.sessions import decided, session_of
from tests.slidingserve.scenes import State, make_policy, states

MODEL = per_token()
SLOW = due(500, 0.4)  # takes half a second


def decided_by(requests: list[Req], model: LatencyModel = MODEL, **parameters: Any) -> Decision:
    return World(requests).decide(with_relegation(model, **{"max_tokens": 256, **parameters}))


def test_relegated_get_what_is_left_of_the_cap() -> None:
    decision = decided_by([SLOW, due(100, 5.0), due(30, -1.0)])
    assert list(decision.tokens.items()) == [(1, 100), (2, 30), (0, 126)], "shortest first"
    assert decision.demoted == {0, 2}
    assert decision.predicted_seconds == 0.256


def test_nothing_is_left_where_others_want_more() -> None:
    decision = decided_by([SLOW, due(400, 5.0)])
    assert decision.tokens == {1: 256}
    assert decision.demoted == {0}


def test_what_is_left_ends_where_decodes_wait() -> None:
    assert decided_by([decode(slack=0.201), SLOW, due(100, 5.0)]).tokens == {0: 1, 2: 100, 1: 91}


def test_what_is_left_ends_where_others_would_be_late() -> None:
    assert decided_by([SLOW, due(100, 0.151)]).tokens == {1: 100, 0: 44}


def test_alone_they_are_served() -> None:
    assert decided_by([due(500, -1.0)]).tokens == {0: 256}
    assert decided_by([due(500, -1.0)], per_token(-1.0)).tokens == {0: 256}, "by a model that says nonsense"


def test_seats_and_blocks_go_to_the_others_first() -> None:
    world = World([SLOW, due(100, 5.0)])
    assert world.decide(with_relegation(MODEL, max_tokens=256), free=37).tokens == {1: 100}
    assert world.decide(with_relegation(MODEL, max_tokens=256), free=39).tokens == {1: 100, 0: 156}


def test_rules() -> None:
    """An iteration filled up to the cap takes 0.256 s."""
    requests = [SLOW, due(50, 0.2), due(10, -1.0)]
    for rule, demoted in (("off", {2}), ("violated", {2}), ("iteration", {1, 2}), ("throughput", {0, 2})):
        assert decided_by(requests, relegation=rule).demoted == demoted, rule


@settings(max_examples=30, deadline=None, derandomize=True)
@given(states())
def test_without_a_rule_it_is_slidingserve(state: State) -> None:
    """Expired ones are demoted by slidingserve itself."""

    def plain(limits: object) -> SlidingServePolicy:
        return make_policy(MODEL, state.limits)

    ours = decided(session_of(lambda limits: with_relegation(MODEL, limits, relegation="off"), state), state)
    theirs = decided(session_of(plain, state), state)
    assert ours.handles.tolist() == theirs.handles.tolist()
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.demoted_handles.tolist() == theirs.demoted_handles.tolist()
    assert ours.predicted_seconds == theirs.predicted_seconds
