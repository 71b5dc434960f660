"""Fitting experts: known laws are found, no physical cost is negative, too few iterations fall back."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.hardware.batches import draw_batches
from evaluation.hardware.latency_models import feature_rows
from predictor.features import (
    CONTEXT,
    DECODE_CONTEXT,
    DECODES,
    LONGEST_CHUNK,
    PREFILL_SQUARES,
    PREFILL_TOKENS,
    PREFILL_WORK,
    ROW,
    Scenario,
)
from predictor.model import Expert, LatencyModel
from predictor.training import MINIMUM_SAMPLES, fit_experts
from slidingserve.contract.values import Floats
from tests.predictor.reference import kernel_row

DRAWN = feature_rows(draw_batches(1200, np.random.default_rng(11), kv_tokens=200_000))
SCENARIOS = np.where(DRAWN[:, PREFILL_TOKENS] == 0, 0, np.where(DRAWN[:, DECODES] == 0, 1, 2))
LAW = {
    "token_context": 2e-9,
    "square": 5e-9,
    "prefill_context": 1e-6,
    "decode_context": 8e-8,
    "decode": 5e-5,
    "token": 6e-5,
    "longest": 4e-6,
}
INTERCEPT = 0.009


def weights_of(law: dict[str, float]) -> Floats:
    """The paper's weights of physical costs."""
    weights = np.zeros(ROW)
    weights[PREFILL_WORK] = law["token_context"]
    weights[PREFILL_SQUARES] = law["square"] - law["token_context"]
    weights[CONTEXT] = law["prefill_context"]
    weights[DECODE_CONTEXT] = law["decode_context"] - law["prefill_context"]
    weights[DECODES] = law["decode"]
    weights[PREFILL_TOKENS] = law["token"]
    weights[LONGEST_CHUNK] = law["longest"]
    return weights


def costs_of(expert: Expert) -> list[float]:
    """The physical costs of an expert, and its intercept."""
    w = dict(enumerate(expert.weights, start=1))
    decode_context = w[CONTEXT] + w[DECODE_CONTEXT]
    return [
        expert.intercept_seconds,
        *(w[PREFILL_WORK], w[PREFILL_WORK] + w[PREFILL_SQUARES], w[CONTEXT], decode_context),
        *(w[DECODES], w[PREFILL_TOKENS], w[LONGEST_CHUNK]),
    ]


def test_a_known_linear_law_is_found() -> None:
    seconds = INTERCEPT + DRAWN @ weights_of(LAW)
    experts = fit_experts(DRAWN, seconds)
    assert set(experts) == {"decode", "prefill", "mixed", "global"}
    predicted = LatencyModel("t/1", "none", experts).predict(DRAWN)
    assert np.abs(predicted / seconds - 1.0).max() < 0.01
    found, expected = costs_of(experts["mixed"]), [INTERCEPT, *LAW.values()]
    assert found[:-1] == pytest.approx(expected[:-1], rel=0.03)
    assert found[-1] == pytest.approx(LAW["longest"], rel=0.3)  # it shares with the prefill tokens
    assert experts["decode"].weights[DECODES - 1] == pytest.approx(LAW["decode"], rel=0.01)


def test_features_that_a_scenario_does_not_have_weigh_nothing() -> None:
    experts = fit_experts(DRAWN, INTERCEPT + DRAWN @ weights_of(LAW))
    decode, prefill = experts["decode"].weights, experts["prefill"].weights
    assert [decode[i - 1] for i in (PREFILL_WORK, PREFILL_SQUARES, PREFILL_TOKENS, LONGEST_CHUNK)] == [0.0] * 4
    assert [prefill[i - 1] for i in (DECODES, DECODE_CONTEXT)] == [0.0] * 2
    assert decode[CONTEXT - 1] + decode[DECODE_CONTEXT - 1] == pytest.approx(LAW["decode_context"], rel=0.01)


def adverse(seed: int) -> tuple[Floats, Floats]:
    """Iterations whose times are noisy and follow a law with some costs below zero."""
    rng = np.random.default_rng(seed)
    rows = DRAWN[rng.choice(len(DRAWN), 400, replace=False)]
    law = {name: cost * rng.choice([-0.3, 0.0, 1.0]) for name, cost in LAW.items()}
    seconds = np.maximum(INTERCEPT + rows @ weights_of(law), 0.002) * rng.lognormal(0.0, 0.4, len(rows))
    return rows, seconds


GROWING = [
    ([(100, 500)], [(101, 500)]),
    ([(100, 500)], [(100, 501)]),
    ([(100, 500), (30, 0)], [(100, 500), (31, 0)]),
    ([(1, 100)], [(1, 100), (1, 0)]),
    ([(1, 100)], [(1, 101)]),
    ([(1, 100), (50, 0)], [(1, 100), (50, 1)]),
    ([(1, 100), (50, 0)], [(1, 101), (50, 0)]),
    ([(1, 100), (50, 0)], [(1, 100), (51, 0)]),
    ([(1, 100), (50, 0)], [(1, 100), (1, 0), (50, 0)]),
]


@pytest.mark.parametrize("seed", range(25))
def test_no_cost_is_negative_so_no_prediction_falls_when_a_batch_grows(seed: int) -> None:
    experts = fit_experts(*adverse(seed), minimum_samples=30)
    for name, expert in experts.items():
        assert min(costs_of(expert)) >= 0.0, name
    model = LatencyModel("t/1", "none", experts)
    for smaller, larger in GROWING:
        before, after = model.predict(np.array([kernel_row(smaller), kernel_row(larger)]))
        assert after >= before * (1.0 - 1e-12)


def test_a_scenario_below_the_threshold_falls_back() -> None:
    seconds = INTERCEPT + DRAWN @ weights_of(LAW)
    few = np.concatenate(
        [
            np.flatnonzero(SCENARIOS == Scenario.DECODE)[: MINIMUM_SAMPLES - 1],
            np.flatnonzero(SCENARIOS == Scenario.PREFILL)[:MINIMUM_SAMPLES],
        ]
    )
    experts = fit_experts(DRAWN[few], seconds[few])
    assert set(experts) == {"prefill", "global"}
    assert experts["prefill"].samples == MINIMUM_SAMPLES
    assert experts["global"].samples == 2 * MINIMUM_SAMPLES - 1
    model = LatencyModel("t/1", "none", experts)
    assert model.expert(Scenario.DECODE) is model.expert(Scenario.MIXED) is experts["global"]
    assert model.expert(Scenario.PREFILL) is experts["prefill"]
    assert set(fit_experts(DRAWN[few], seconds[few], minimum_samples=50)) == {"decode", "prefill", "global"}


def test_the_same_iterations_give_the_same_experts() -> None:
    rows, seconds = adverse(3)
    assert fit_experts(rows, seconds) == fit_experts(rows.copy(), seconds.copy())


def test_one_iteration_is_enough_for_a_model() -> None:
    experts = fit_experts(DRAWN[:1], np.array([0.02]))
    assert set(experts) == {"global"}
    assert LatencyModel("t/1", "none", experts).predict(DRAWN[:1]) == pytest.approx([0.02], rel=0.02)


@pytest.mark.parametrize(
    ("features", "seconds", "says"),
    [
        (np.ones((2, 7)), np.ones(2), r"\(2, 7\)"),
        (np.ones((2, 8)), np.ones(3), r"\(3,\)"),
        (np.ones((0, 8)), np.ones(0), "at least one"),
        (np.full((2, 8), np.nan), np.ones(2), "features"),
        (-np.ones((2, 8)), np.ones(2), "features"),
        (np.ones((2, 8)), np.array([1.0, 0.0]), "seconds"),
        (np.ones((2, 8)), np.array([1.0, np.inf]), "seconds"),
        (np.ones((2, 8)), np.array([1.0, np.nan]), "seconds"),
    ],
)
def test_what_cannot_be_fitted_is_refused(features: Floats, seconds: Floats, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_experts(features, seconds)
