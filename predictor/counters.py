"""How far predictions were off, while the engine runs: running sums by scenario, O(1) for each iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from predictor.features import Scenario


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of one scenario.

    Iterations counted; mean absolute, root mean square and mean signed error in seconds (positive: predicted too long);
    mean relative error as a fraction of the measured time.
    """

    iterations: int
    mae_seconds: float
    rmse_seconds: float
    bias_seconds: float
    mape: float


class ErrorCounters:
    """Running error sums.

    Attributes:
        ignored: measurements that could not be compared (no prediction, or a time that is not a positive number).
    """

    def __init__(self) -> None:
        self.ignored = 0
        self._sums = [[0.0] * 5 for _ in Scenario]

    def add(self, scenario: int, predicted_seconds: float, measured_seconds: float) -> None:
        """Counts one iteration."""
        if not (0.0 < measured_seconds < math.inf and 0.0 < predicted_seconds < math.inf):
            self.ignored += 1
            return
        error = predicted_seconds - measured_seconds
        sums = self._sums[scenario]
        sums[0] += 1.0
        sums[1] += abs(error)
        sums[2] += error * error
        sums[3] += error
        sums[4] += abs(error) / measured_seconds

    def summary(self, scenario: Scenario | None = None) -> ErrorSummary:
        """Returns the errors of one scenario, or of all iterations; zeros where nothing was measured."""
        chosen = self._sums if scenario is None else [self._sums[scenario]]
        count, absolute, squared, signed, relative = (sum(column) for column in zip(*chosen, strict=True))
        if count == 0.0:
            return ErrorSummary(0, 0.0, 0.0, 0.0, 0.0)
        return ErrorSummary(int(count), absolute / count, math.sqrt(squared / count), signed / count, relative / count)
