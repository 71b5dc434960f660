"""How sure a mean over few pairs of runs is."""

from __future__ import annotations

import numpy as np

from slidingserve.contract.values import Floats

_RESAMPLES = 10_000


def mean_interval(values: Floats, draw: np.random.Generator) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the mean; ``values`` is float64[n], one for each pair."""
    means = values[draw.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
