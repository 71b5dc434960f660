"""Keeps what the answers tell: the time that the sidecar's core took, and how far its predictions were off."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import numpy as np

from engine_adapter.source import DecisionSource
from predictor.counters import ErrorCounters
from predictor.features import Scenario
from slidingserve.contract.values import BatchAllocation, Floats, OpenSession, SessionOpened, Snapshot, Step


class RecordingSource:
    """Passes everything on to another source; 8 bytes per decision are kept.

    Attributes:
        prediction_errors: predictions against the durations that the next step tells, where the engine executed the
            allocation to the letter. All of them count as one scenario.
        busy_seconds: what all iterations but the last took.
    """

    def __init__(self, source: DecisionSource) -> None:
        self._source = source
        self._seconds = array("d")
        self._predicted_seconds = 0.0
        self.prediction_errors = ErrorCounters()
        self.busy_seconds = 0.0

    def open(self, message: OpenSession) -> SessionOpened:
        """See `DecisionSource.open`."""
        return self._source.open(message)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """See `DecisionSource.decide`."""
        measured = step.iteration.last_iteration_seconds
        self.busy_seconds += measured
        if self._predicted_seconds > 0.0 and step.applied_exactly and not step.iteration.last_iteration_censored:
            self.prediction_errors.add(Scenario.MIXED, self._predicted_seconds, measured)
        allocation = self._source.decide(step, snapshot)
        self._predicted_seconds = 0.0 if allocation is None else allocation.predicted_seconds
        if allocation is not None and allocation.phase_timings is not None:
            self._seconds.append(allocation.phase_timings.core_seconds)
        return allocation

    def close(self) -> None:
        """See `DecisionSource.close`."""
        self._source.close()

    def mean_relative_error(self) -> float:
        """Returns the mean relative error of the predictions; NaN where there was none."""
        summary = self.prediction_errors.summary()
        return summary.mape if summary.iterations else math.nan

    def decision_seconds(self) -> Floats:
        """Returns the core's time for each decision."""
        return np.array(self._seconds)
