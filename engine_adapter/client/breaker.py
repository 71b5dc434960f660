"""When not to ask the sidecar: a circuit breaker without clock, threads or I/O.

========= ================================== ===========================================
state     asks?                              leaves when
========= ================================== ===========================================
CLOSED    yes                                misses in a row, or one failure -> OPEN
OPEN      no                                 the back-off is over -> HALF_OPEN
HALF_OPEN yes, as a trial                    an answer -> CLOSED; a miss, a failure -> OPEN
========= ================================== ===========================================

The back-off doubles with every opening that no answer came between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether the sidecar is asked."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """How much is too much. An incident costs the engine at most ``misses_in_a_row`` deadlines."""

    misses_in_a_row: int = 3
    """Misses (late, refused or useless answers) after which the sidecar is left alone."""
    first_backoff_seconds: float = 0.25
    """How long, the first time."""
    longest_backoff_seconds: float = 5.0
    """How long at most."""

    def __post_init__(self) -> None:
        if self.misses_in_a_row < 1:
            raise ValueError(f"misses_in_a_row = {self.misses_in_a_row}: must be at least 1")
        if not 0 < self.first_backoff_seconds <= self.longest_backoff_seconds:
            raise ValueError(
                f"first_backoff_seconds = {self.first_backoff_seconds}: must be positive and at most "
                f"longest_backoff_seconds = {self.longest_backoff_seconds}"
            )


class CircuitBreaker:
    """Counts misses and says when to ask again; all times are seconds on the caller's clock."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._state = BreakerState.CLOSED
        self._misses = 0
        self._backoff_seconds = self._settings.first_backoff_seconds
        self._retry_at_seconds = 0.0

    @property
    def state(self) -> BreakerState:
        """The state as of the last call."""
        return self._state

    def allows(self, now_seconds: float) -> bool:
        """Whether to ask now."""
        if self._state is BreakerState.OPEN and now_seconds >= self._retry_at_seconds:
            self._state = BreakerState.HALF_OPEN
        return self._state is not BreakerState.OPEN

    def succeeded(self) -> None:
        """A good answer came in time."""
        self._state = BreakerState.CLOSED
        self._misses = 0
        self._backoff_seconds = self._settings.first_backoff_seconds

    def missed(self, now_seconds: float) -> None:
        """No good answer came in time."""
        self._misses += 1
        if self._state is BreakerState.HALF_OPEN or self._misses >= self._settings.misses_in_a_row:
            self._open(now_seconds)

    def failed(self, now_seconds: float) -> None:
        """The call itself failed."""
        self._open(now_seconds)

    def _open(self, now_seconds: float) -> None:
        self._state = BreakerState.OPEN
        self._misses = 0
        self._retry_at_seconds = now_seconds + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, self._settings.longest_backoff_seconds)
