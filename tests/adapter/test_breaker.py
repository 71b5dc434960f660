"""The circuit breaker against a clock that the tests turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.client import BreakerSettings, BreakerState, CircuitBreaker


def opened_at(now_seconds: float) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.failed(now_seconds)
    return breaker


def test_it_starts_closed() -> None:
    breaker = CircuitBreaker()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows(0.0)


def test_it_opens_after_three_misses_in_a_row() -> None:
    breaker = CircuitBreaker()
    breaker.missed(0.0)
    breaker.missed(0.1)
    assert breaker.allows(0.2)
    breaker.missed(0.2)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0.2)


def test_an_answer_between_misses_starts_the_count_again() -> None:
    breaker = CircuitBreaker()
    for now_seconds in range(20):
        breaker.missed(now_seconds)
        breaker.missed(now_seconds)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_one_failure_opens_it() -> None:
    assert opened_at(0.0).state is BreakerState.OPEN


def test_it_is_half_open_once_the_backoff_is_over() -> None:
    breaker = opened_at(10.0)
    assert not breaker.allows(10.2499)
    assert breaker.allows(10.25)
    assert breaker.state is BreakerState.HALF_OPEN


def test_an_answer_to_the_trial_closes_it() -> None:
    breaker = opened_at(0.0)
    assert breaker.allows(1.0)
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_one_miss_of_the_trial_opens_it_again() -> None:
    breaker = opened_at(0.0)
    assert breaker.allows(1.0)
    breaker.missed(1.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(1.4999)
    assert breaker.allows(1.5)


def test_the_backoff_doubles_up_to_its_limit_and_starts_small_after_an_answer() -> None:
    breaker = CircuitBreaker()
    now_seconds, backoffs = 0.0, []
    for _ in range(8):
        breaker.failed(now_seconds)
        opened = now_seconds
        while not breaker.allows(now_seconds):
            now_seconds += 0.0625
        backoffs.append(now_seconds - opened)
    assert backoffs == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    breaker.succeeded()
    breaker.failed(now_seconds)
    assert breaker.allows(now_seconds + 0.25)


@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "miss", "fail"]), st.floats(0.0, 10.0))))
def test_it_is_never_shut_longer_than_the_longest_backoff(events: list[tuple[str, float]]) -> None:
    breaker, now_seconds = CircuitBreaker(), 0.0
    for event, seconds in events:
        now_seconds += seconds
        if event == "answer":
            breaker.succeeded()
            assert breaker.allows(now_seconds)
        elif event == "miss":
            breaker.missed(now_seconds)
        elif event == "fail":
            breaker.failed(now_seconds)
            assert not breaker.allows(now_seconds)
    assert breaker.allows(now_seconds + 5.0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"misses_in_a_row": 0}, "misses_in_a_row"),
        ({"first_backoff_seconds": 0.0}, "first_backoff_seconds"),
        ({"first_backoff_seconds": 6.0}, "longest_backoff_seconds"),
    ],
)
def test_settings_out_of_range_are_named(arguments: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BreakerSettings(**arguments)  # type: ignore[arg-type]
