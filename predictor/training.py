"""Fits the experts of a latency model to measured iterations, with scikit-learn (extra ``fit``).

What is fitted are physical costs, none of them negative: per token x context and per squared token of a chunk, per
context token of a prefill and of a decode, per decode, per prefill token, per token of the longest chunk, and an
intercept. The paper's weights follow (x1 holds the squares as well, x3 the decodes' contexts as well), so w2 and w5 may
be negative while no prediction falls when a chunk, a context or the number of decodes grows.

Iterations are weighted by 1 / T. Unweighted, mixed batches of at most 128 tokens (where TBT binds) are 6.5 to 12.8 %
off on the six built-in profiles; weighted 4.5 to 10.3 %, while the mean absolute error over all is 9 % lower to 4 %
higher and R2 at most 0.007 lower. Weighted by 1 / T^2 they are 3.5 to 9.4 % off, but the mean absolute error of all is
up to 33 % higher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    scenario_of,
)
from predictor.model import Expert
from slidingserve.contract.values import Floats

MINIMUM_SAMPLES = 100
"""Fitted to 100 iterations, an expert's mean error is within 9 % of one fitted to thousands; 20 may double it."""

PENALTY = 1e-4
"""Ridge: mean squared seconds per squared second that a cost contributes (root mean square over the iterations).

To explain all of T by one cost is as dear as being 1 % off. That changes no error by more than 0.3 % and settles what
the iterations leave open, such as how prefill tokens and the longest chunk share the time where each chunk is alone;
1e-2 raises the mean absolute error by up to 17 %. An L1 penalty of the same size gave the same errors.
"""

_SIGNIFICANT_DIGITS = 6


def fit_experts(features: Floats, seconds: Floats, *, minimum_samples: int = MINIMUM_SAMPLES) -> dict[str, Expert]:
    """Returns ``global``, fitted to all iterations, and an expert for each scenario with enough of them.

    ``features`` is float64[n, 8], one `predictor.features` row for each iteration, ``seconds`` float64[n] their times.
    Deterministic. Raises ValueError if there is none, or one whose features or time cannot be.
    """
    if features.ndim != 2 or features.shape[1] != ROW or seconds.shape != features.shape[:1]:
        raise ValueError(f"features {features.shape} and seconds {seconds.shape}: expected (n, {ROW}) and (n,)")
    if not len(seconds):
        raise ValueError("no iterations: give at least one")
    if not (np.isfinite(features).all() and (features >= 0.0).all()):
        raise ValueError("features hold a number that is negative or not finite: leave that iteration out")
    if not ((seconds > 0.0) & (seconds < np.inf)).all():
        raise ValueError("seconds hold a time that is not positive and finite: leave that iteration out")
    scenarios = np.array([scenario_of(row) for row in features])
    experts = {}
    for scenario in Scenario:
        at = scenarios == scenario
        if at.sum() >= max(minimum_samples, 1):
            experts[scenario.name.lower()] = _fit(features[at], seconds[at])
    experts["global"] = _fit(features, seconds)
    return experts


def _fit(features: Floats, seconds: Floats) -> Expert:
    intercept, costs = _costs(_physical(features), seconds)
    token_context, square, prefill_context, decode_context, decode, token, longest = costs
    weights = np.zeros(ROW)
    weights[PREFILL_WORK] = token_context
    weights[PREFILL_SQUARES] = square - token_context
    weights[CONTEXT] = prefill_context
    weights[DECODE_CONTEXT] = decode_context - prefill_context
    weights[DECODES] = decode
    weights[PREFILL_TOKENS] = token
    weights[LONGEST_CHUNK] = longest
    weights[~features.any(axis=0)] = 0.0
    return Expert(_rounded(intercept), tuple(_rounded(weight) for weight in weights[1:]), len(seconds))


def _physical(features: Floats) -> Floats:
    """Returns what each physical cost multiplies, float64[n, 7], none negative."""
    x = features.T
    prefill_context = x[CONTEXT] - x[DECODE_CONTEXT]
    token_context = x[PREFILL_WORK] - x[PREFILL_SQUARES]
    columns = (token_context, x[PREFILL_SQUARES], prefill_context, x[DECODE_CONTEXT])
    return np.column_stack((*columns, x[DECODES], x[PREFILL_TOKENS], x[LONGEST_CHUNK]))


def _costs(amounts: Floats, seconds: Floats) -> tuple[float, NDArray[np.float64]]:
    """Returns intercept and costs >= 0 of the weighted least squares with the penalty; the intercept is free of it.

    Columns are scaled to a root mean square of 1. The penalty is one more row for each cost: scikit-learn then solves
    for non-negative coefficients exactly, where its `Ridge(positive=True)` stops at a tolerance.
    """
    from sklearn.linear_model import LinearRegression

    weights = 1.0 / seconds
    weights /= weights.mean()
    scale = np.sqrt(np.mean(weights[:, None] * amounts**2, axis=0))
    scale[scale == 0.0] = np.inf
    root = np.sqrt(weights)
    rows = np.column_stack((root, amounts / scale * root[:, None]))
    penalty = np.sqrt(PENALTY * len(seconds)) * np.eye(rows.shape[1])[1:]
    solver = LinearRegression(positive=True, fit_intercept=False)
    solver.fit(np.vstack((rows, penalty)), np.concatenate((seconds * root, np.zeros(len(penalty)))))
    return float(solver.coef_[0]), solver.coef_[1:] / scale


def _rounded(value: float) -> float:
    """Rounds without changing which of two values is larger, so sums of weights that are costs stay non-negative."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
