"""Keeps the time that the sidecar's core took, as its answers tell it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from engine_adapter.source import DecisionSource
from slidingserve.contract.values import BatchAllocation, Floats, OpenSession, SessionOpened, Snapshot, Step


class RecordingSource:
    """Passes everything on to another source; 8 bytes per decision are kept."""

    def __init__(self, source: DecisionSource) -> None:
        self._source = source
        self._seconds = array("d")

    def open(self, message: OpenSession) -> SessionOpened:
        """See `DecisionSource.open`."""
        return self._source.open(message)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """See `DecisionSource.decide`."""
        allocation = self._source.decide(step, snapshot)
        if allocation is not None and allocation.phase_timings is not None:
            self._seconds.append(allocation.phase_timings.core_seconds)
        return allocation

    def close(self) -> None:
        """See `DecisionSource.close`."""
        self._source.close()

    def decision_seconds(self) -> Floats:
        """Returns the core's time for each decision."""
        return np.array(self._seconds)
