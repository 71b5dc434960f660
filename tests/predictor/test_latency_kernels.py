"""The kernels of features and forecasts, held against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.features import ROW, Scenario, add_decode, scenario_of
from predictor.forecast import (
    features_at,
    features_between,
    fill_seconds,
    predicted_seconds,
    row_of_budget,
    time_to_budget,
)
from predictor.model import Expert, LatencyModel, linear_model
from slidingserve.contract.values import Floats
from tests.predictor.reference import Fill, build, fills, kernel_row, models, row_of, seconds_of

entries = st.lists(st.tuples(st.integers(0, 2048), st.integers(0, 16_000)), max_size=30)
unhurried = settings(deadline=None)


@unhurried
@given(entries)
def test_features_are_those_of_the_paper(batch: list[tuple[int, int]]) -> None:
    row = kernel_row(batch)
    assert row.tolist() == row_of(batch)
    kinds = {c <= 1 for c, _ in batch if c > 0}
    expected = {frozenset([False]): Scenario.PREFILL, frozenset([True, False]): Scenario.MIXED}
    assert scenario_of(row) == expected.get(frozenset(kinds), Scenario.DECODE)


def test_a_decode_with_drafts_counts_its_tokens() -> None:
    row = np.zeros(ROW)
    add_decode(row, 4.0, 100.0)
    add_decode(row, 1.0, 50.0)
    assert row.tolist() == [5, 0, 0, 150, 5, 150, 0, 0]
    assert scenario_of(row) == Scenario.DECODE


@unhurried
@given(models(), entries)
@example(linear_model("none", 1.0, decodes=2.0), [])
def test_predictions(model: LatencyModel, batch: list[tuple[int, int]]) -> None:
    row = kernel_row(batch)
    expected = seconds_of(model, row_of(batch))
    assert predicted_seconds(row, model.pack()) == pytest.approx(expected, rel=1e-12, abs=1e-6)
    assert model.predict(np.array([row, np.zeros(ROW)])).tolist() == [predicted_seconds(row, model.pack()), 0.0]


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 3.0), (4, 6.0), (5, 8.0), (7, 12.0)])
def test_beyond_the_table_its_upper_half_goes_on(tokens: int, seconds: float) -> None:
    model = LatencyModel("t/1", "none", {"global": Expert(1.0, (0.0,) * 7)}, (0.0, 2.0, 1.0, 1.0, 5.0))
    assert predicted_seconds(kernel_row([(1, 0)] * tokens), model.pack()) == seconds


def test_beyond_a_falling_table_time_stays() -> None:
    model = LatencyModel("t/1", "none", {"global": Expert(1.0, (0.0,) * 7)}, (0.0, 2.0, 1.0))
    assert predicted_seconds(kernel_row([(9, 0)]), model.pack()) == 2.0


def filled(fill: Fill, budget: float) -> Floats:
    row = np.full(ROW, np.nan)
    at = row_of_budget(fill.table, fill.rows, budget)
    features_at(fill.table, fill.rows, at, budget, row)
    return row


@unhurried
@given(fills, models(), st.integers(-5, 600))
def test_a_budget_is_spent_in_order(fill: Fill, model: LatencyModel, budget: int) -> None:
    expected = row_of(fill.at(max(budget, fill.base_tokens)))
    assert filled(fill, budget).tolist() == expected
    row, packed = np.full(ROW, np.nan), model.pack()
    seconds = fill_seconds(fill.table, fill.rows, budget, row, packed)
    assert row.tolist() == expected
    assert seconds == predicted_seconds(row, packed)


@unhurried
@given(fills, st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_the_iteration_after(fill: Fill, first: int, second: int, new_decodes: bool) -> None:
    low = fill.base_tokens + first
    row = np.full(ROW, np.nan)
    features_between(fill.table, fill.rows, low, low + second, new_decodes, row)
    assert row.tolist() == row_of(fill.after(low, low + second, new_decodes))


def budget_of(fill: Fill, model: Floats, limit: float, highest: float, step: int) -> float:
    return time_to_budget(limit, highest, step, fill.table, fill.rows, np.zeros(ROW), model)


def by_trying_all(fill: Fill, model: Floats, limit: float, highest: float, step: int) -> float:
    """The largest budget of the grid that fits, else the base."""
    top = min(highest, fill.tokens)
    grid = [top, *(float(b) for b in range(0, max(math.ceil(top), 0), step))]
    fitting = [b for b in grid if b > fill.base_tokens and predicted_seconds(filled(fill, b), model) <= limit]
    return max(fitting, default=fill.base_tokens)


@unhurried
@given(fills, models(), st.integers(0, 600), st.sampled_from([1, 4, 16]), st.data())
def test_time_to_budget_is_an_exhaustive_search(
    fill: Fill, model: LatencyModel, highest: int, step: int, data: st.DataObject
) -> None:
    packed = model.pack()
    tried = sorted({predicted_seconds(filled(fill, float(b)), packed) for b in range(0, fill.tokens + 1, step)})
    limit = data.draw(st.sampled_from([*tried, tried[0] - 1.0, -1.0, 0.0, math.inf, -math.inf, math.nan]))
    found = budget_of(fill, packed, limit, float(highest), step)
    assert found == by_trying_all(fill, packed, limit, float(highest), step)


STAIRS = LatencyModel("t/1", "none", {"global": Expert(0.0, (0.0,) * 7)}, tuple(0.25 * (n // 64) for n in range(400)))


@pytest.mark.parametrize(
    ("base", "limit", "budget"),
    [
        ([], 0.5, 176),  # up to 191 tokens fit, in steps of 16
        ([], 0.24, 48),
        ([(1, 9)] * 20, 0.24, 48),
        ([(1, 9)] * 70, 0.24, 70),  # the base itself takes longer: it runs all the same
        ([(1, 9)] * 20, 9.0, 320),
        ([(1, 9)] * 20, math.inf, 320),
        ([(1, 9)] * 20, math.nan, 20),
        ([(1, 9)] * 20, -1.0, 20),
    ],
)
def test_budgets_on_a_staircase(base: list[tuple[int, int]], limit: float, budget: int) -> None:
    fill = build(base, [(300 - len(base), 0), (20, 0)])
    assert budget_of(fill, STAIRS.pack(), limit, 4096.0, 16) == budget


def test_a_budget_beyond_where_the_scenario_changes_is_found() -> None:
    """Iterations with decodes alone are slow here, mixed ones fast: the first prompt tokens pay for themselves."""
    dear, cheap = Expert(9.0, (0.0,) * 7), Expert(1.0, (0.0,) * 7)
    model = LatencyModel("t/1", "none", {"global": dear, "mixed": cheap})
    one_token_prompts = build([(1, 5)], [(1, 0), (1, 0), (30, 0)])
    assert budget_of(one_token_prompts, model.pack(), 2.0, 100.0, 1) == 33
    assert budget_of(one_token_prompts, model.pack(), 2.0, 4.0, 1) == 1  # four tokens: all of them decode
    assert budget_of(one_token_prompts, model.pack(), 2.0, 5.0, 1) == 5


def test_a_model_without_numbers_gets_the_base() -> None:
    fill = build([(1, 5), (1, 7)], [(50, 0)])
    packed = np.full_like(STAIRS.pack(), np.nan)
    packed[0] = 400.0
    assert budget_of(fill, packed, 1.0, 100.0, 1) == 2.0
    assert budget_of(fill, packed, math.inf, 100.0, 1) == 2.0


def test_no_prompts_and_no_budget_leave_the_base() -> None:
    packed = STAIRS.pack()
    assert budget_of(build([], []), packed, 1.0, 100.0, 16) == 0.0
    assert budget_of(build([(1, 3)], []), packed, 1.0, 100.0, 16) == 1.0
    assert budget_of(build([(1, 3)], [(10, 0)]), packed, 1.0, 0.0, 16) == 1.0
    assert budget_of(build([(1, 3)], [(10, 0)]), packed, 1.0, math.nan, 16) == 1.0
