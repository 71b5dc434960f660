"""Sarathi-Serve and its orders: one budget for all tokens, decodes first, then prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.policies.registry import PolicyParameterError
from slidingserve.contract.values import PauseState
from tests.policies.rivals import LIMITS, Req, World, decode, due, made, served

FAMILY = ("sarathi", "sarathi-edf", "sarathi-srpf")


@pytest.mark.parametrize(("name", "budget"), [("sarathi", 512), ("sarathi-edf", 256), ("sarathi-srpf", 256)])
def test_default_budget_counts_decodes(name: str, budget: int) -> None:
    tokens = served(made(name), [decode(), decode(), Req(1000)])
    assert tokens == {0: 1, 1: 1, 2: budget - 2}
    assert served(made(name, max_tokens=0), [decode(), Req(9000)]) == {0: 1, 1: 4095}, "0: the engine's limit"


@pytest.mark.parametrize("name", FAMILY)
def test_a_cap_below_the_decodes_is_raised(name: str) -> None:
    """To 16 tokens above them, or no prompt would ever be served; not above the engine's limit."""
    requests = [decode()] * 20 + [Req(100)]
    assert served(made(name, max_tokens=8), requests) == {**dict.fromkeys(range(20), 1), 20: 16}
    few = replace(LIMITS, max_tokens_per_iteration=24)
    assert served(made(name, few, max_tokens=8), requests, few)[20] == 4


def test_sarathi_goes_by_arrival_started_prompts_first() -> None:
    """Deadlines and lengths do not matter."""
    requests = [Req(300), due(50, 0.1), Req(200, 20), decode(), Req(100, 60)]
    assert list(served(made("sarathi", max_tokens=400), requests).items()) == [(3, 1), (2, 180), (4, 40), (0, 179)]


def test_sarathi_admits_nobody_behind_one_that_does_not_fit() -> None:
    """10 blocks: the first needs 13. The other orders pass it over."""
    requests = [due(200, 1.0), due(20, 2.0)]
    assert served(made("sarathi"), requests, free=10) == {}
    assert served(made("sarathi-edf"), requests, free=10) == {1: 20}
    one_seat = replace(LIMITS, max_sequences=1)
    assert served(made("sarathi", one_seat), requests, one_seat) == {0: 200}


def test_nobody_is_admitted_where_the_engine_may_not() -> None:
    for name in FAMILY:
        assert served(made(name), [Req(20, 5), Req(7)], pause_state=PauseState.PAUSED_NEW) == {0: 15}


def test_earliest_deadline_first_started_or_not() -> None:
    requests = [due(100, 3.0), due(100, 1.0), due(100, 2.0, context=16), decode()]
    assert list(served(made("sarathi-edf", max_tokens=251), requests).items()) == [(3, 1), (1, 100), (2, 100), (0, 50)]


def test_expired_go_last_shortest_first() -> None:
    requests = [due(30, -1.0), due(20, -0.5), due(100, 9.0), due(50, 0.0)]
    world = World(requests)
    decision = world.decide(made("sarathi-edf"))
    assert list(decision.tokens.items()) == [(2, 100), (1, 20), (0, 30), (3, 50)]
    assert decision.demoted == {0, 1, 3}
    original = World(requests).decide(made("sarathi-edf", expired_last=False))
    assert list(original.tokens) == [0, 1, 3, 2]
    assert original.demoted == set()


def test_a_preempted_request_is_due_when_its_next_token_is() -> None:
    """3 tokens of output at 50 ms: due 0.15 s later than its first token was."""
    again = Req(100, 0, 3, age=1.0, ttft=1.1, running=False)
    assert list(served(made("sarathi-edf"), [again, due(50, 0.2), due(50, 0.3)])) == [1, 0, 2]


@pytest.mark.parametrize(
    ("max_output", "order"),
    [(0, [1, 0, 2]), (25, [0, 1, 2])],  # 60 - 15 x 0.4 = 54 s; 60 - 25 x 0.4 = 50 s
)
def test_time_to_last_token_has_a_derived_deadline(max_output: int, order: list[int]) -> None:
    batch = Req(40, ttft=0.0, tbt=0.0, ttlt=60.0, max_output=max_output)
    others = [due(40, 53.0, ttft=100.0), due(40, 55.0, ttft=100.0)]
    assert list(served(made("sarathi-edf"), [batch, *others])) == order


def test_shortest_remaining_prompt_first() -> None:
    requests = [due(60, 1.0), due(50, 9.0, context=400), due(70, 0.1), due(50, 2.0), due(10, -1.0)]
    assert list(served(made("sarathi-srpf", max_tokens=110), requests).items()) == [(1, 50), (3, 50), (0, 10)]
    assert list(served(made("sarathi-srpf"), requests)) == [1, 3, 0, 2, 4]
    assert list(served(made("sarathi-srpf", expired_last=False), requests)) == [4, 1, 3, 0, 2]


@pytest.mark.parametrize("name", [*FAMILY, "orca", "qoserve", "slidingserve+relegation"])
def test_a_wrong_cap_is_named(name: str) -> None:
    with pytest.raises(PolicyParameterError, match=r"'max_tokens' = '-1': give a number from 0 to 1e\+06"):
        made(name, max_tokens=-1)
