"""What the tests of the traps share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from predictor.model import LatencyModel, linear_model
from tests.slidingserve.scenes import Decision, Scene, linear

# 5 ms and 20 us for each token: a budget of 50 tokens for each millisecond above 5.
LINEAR = linear(0.005, 20e-6)


def bent(quadratic: float, **weights: float) -> LatencyModel:
    """5 ms, 10 us for each token, and a term in the square of all tokens: two halves take less than all and nothing."""
    tokens = np.arange(8193)
    table = tuple((10e-6 * tokens + quadratic * tokens**2).tolist())
    return replace(linear_model("none", 0.005, **weights), table_seconds=table)


def in_paper(scene: Scene, model: LatencyModel, **parameters: Any) -> Decision:
    return scene.decide(model, mode="paper", **parameters)


def to_prompts(decision: Decision, scene: Scene) -> int:
    """Tokens that were not the decodes'."""
    return sum(tokens for place, tokens in decision.tokens.items() if scene.requests[place].output == 0)
