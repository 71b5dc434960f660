"""A latency model as a value: an expert for each scenario, and a table over total tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from predictor.features import FEATURES, Scenario
from predictor.forecast import predicted_seconds
from slidingserve.contract.values import Floats

EXPERTS = (*(scenario.name.lower() for scenario in Scenario), "global")
"""Names of the experts; the last one answers where a scenario has none."""


@dataclass(frozen=True, slots=True)
class Expert:
    """T = intercept + weights . (x1 .. x7), in seconds; ``samples`` is how many iterations it was fitted to."""

    intercept_seconds: float
    weights: tuple[float, ...]
    samples: int = 0


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Predicts how long an iteration takes.

    Attributes:
        name: kind and version, such as ``paper7/1``.
        profile: the hardware profile that it was fitted for.
        experts: by name (`EXPERTS`); ``global`` must be there, a scenario without one of its own falls back to it.
        table_seconds: seconds by total tokens, index 0 on, added to the expert's; the paper's model has none.
        errors: held-out errors by scenario and metric (``mae_ms``, ``rmse_ms``, ``r2``, ``mape_percent``).
        provenance: what it was fitted to, and how.
        digest: SHA-256 of its file's content; empty for a model that was never in one.
    """

    name: str
    profile: str
    experts: Mapping[str, Expert]
    table_seconds: tuple[float, ...] = ()
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    provenance: str = ""
    digest: str = ""

    @property
    def version(self) -> str:
        """Profile, kind and the digest's beginning, as decisions carry it."""
        return f"{self.profile}/{self.name}@{self.digest[:8] or 'unsaved'}"

    def expert(self, scenario: Scenario) -> Expert:
        """Returns the expert that answers for a scenario."""
        return self.experts.get(scenario.name.lower(), self.experts["global"])

    def pack(self) -> Floats:
        """Returns the array that the kernels of `predictor.forecast` take."""
        table = np.array(self.table_seconds or (0.0, 0.0), np.float64)
        half = len(table) // 2
        beyond = max(0.0, float(table[-1] - table[half]) / max(1, len(table) - 1 - half))
        experts = [self.expert(scenario) for scenario in Scenario]
        rows = [(expert.intercept_seconds, *expert.weights) for expert in experts]
        return np.concatenate([np.array([len(table), beyond], np.float64), np.array(rows, np.float64).ravel(), table])

    def predict(self, features: Floats) -> Floats:
        """Returns the predicted seconds of each row of features, float64[n, 8]."""
        packed = self.pack()
        return np.array([predicted_seconds(row, packed) for row in np.ascontiguousarray(features)])


def linear_model(profile: str, intercept_seconds: float, **weights: float) -> LatencyModel:
    """Returns a model with one expert for everything, for tests and examples: weights by feature name."""
    expert = Expert(intercept_seconds, tuple(weights.get(name, 0.0) for name in FEATURES))
    return LatencyModel("linear/1", profile, {"global": expert})
