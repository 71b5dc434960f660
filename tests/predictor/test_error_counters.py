from __future__ import annotations

import math

import numpy as np
import pytest

from predictor.counters import ErrorCounters, ErrorSummary
from predictor.features import Scenario


def test_sums_are_those_of_numpy_by_scenario_and_together() -> None:
    rng = np.random.default_rng(5)
    scenarios = rng.integers(0, 3, 500)
    measured = rng.uniform(0.01, 0.3, 500)
    predicted = measured * rng.uniform(0.7, 1.4, 500)
    counters = ErrorCounters()
    for row in zip(scenarios.tolist(), predicted.tolist(), measured.tolist(), strict=True):
        counters.add(*row)
    for scenario in (None, *Scenario):
        at = scenarios >= 0 if scenario is None else scenarios == scenario
        error = (predicted - measured)[at]
        summary = counters.summary(scenario)
        assert summary.iterations == at.sum()
        assert summary.mae_seconds == pytest.approx(np.abs(error).mean())
        assert summary.rmse_seconds == pytest.approx(np.sqrt((error**2).mean()))
        assert summary.bias_seconds == pytest.approx(error.mean())
        assert summary.mape == pytest.approx((np.abs(error) / measured[at]).mean())
    assert counters.ignored == 0


@pytest.mark.parametrize("odd", [0.0, -0.1, math.nan, math.inf, -math.inf])
def test_what_cannot_be_compared_is_counted_as_ignored(odd: float) -> None:
    counters = ErrorCounters()
    counters.add(Scenario.MIXED, odd, 0.02)
    counters.add(Scenario.MIXED, 0.02, odd)
    assert counters.ignored == 2
    assert counters.summary() == counters.summary(Scenario.MIXED) == ErrorSummary(0, 0.0, 0.0, 0.0, 0.0)


def test_a_prediction_that_is_too_long_is_a_positive_bias() -> None:
    counters = ErrorCounters()
    counters.add(Scenario.DECODE, 0.030, 0.020)
    summary = counters.summary(Scenario.DECODE)
    assert summary.bias_seconds == pytest.approx(0.010)
    assert summary.mape == pytest.approx(0.5)
    assert counters.summary(Scenario.PREFILL).iterations == 0
