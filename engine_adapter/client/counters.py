"""What the client counts, in bounded memory."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class FallbackReason(StrEnum):
    """Why a decision was left to the engine's own policy."""

    DEADLINE = "deadline"
    BREAKER_OPEN = "breaker_open"
    RPC_ERROR = "rpc_error"
    SESSION_ERROR = "session_error"
    INVALID_ANSWER = "invalid_answer"
    DISCONNECTED = "disconnected"
    CLIENT_ERROR = "client_error"
    """The engine's message could not be made or encoded, or its callback failed; the log has the first such error."""


class RoundTrips:
    """A uniform sample of all round trips, in seconds: the first ``size``, then each later one with equal chance.

    Source: Vitter's algorithm R. Adding is O(1).
    """

    def __init__(self, size: int = 16384, seed: int = 0) -> None:
        self._size = size
        self._sample = array("d")
        self._seen = 0
        self._random = random.Random(seed)  # noqa: S311 - a sample, not a secret

    def __len__(self) -> int:
        return self._seen

    def add(self, seconds: float) -> None:
        """Takes one round trip into account."""
        self._seen += 1
        if len(self._sample) < self._size:
            self._sample.append(seconds)
            return
        slot = int(self._random.random() * self._seen)
        if slot < self._size:
            self._sample[slot] = seconds

    def seconds(self) -> NDArray[np.float64]:
        """Returns the sample, shape (min(size, added),), in no particular order."""
        return np.array(self._sample, np.float64)


def _no_fallbacks() -> dict[FallbackReason, int]:
    return dict.fromkeys(FallbackReason, 0)


@dataclass(slots=True)
class ClientCounters:
    """What happened since the client was made."""

    decisions: int = 0
    """Allocations returned to the engine."""
    fallbacks: dict[FallbackReason, int] = field(default_factory=_no_fallbacks)
    """Calls that returned none, by reason."""
    resyncs: int = 0
    """Snapshots sent because sidecar and engine were not in step."""
    reconnects: int = 0
    """Sessions opened after the first."""
    late_answers: int = 0
    """Answers dropped because they came after their iteration had begun."""
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    """What each decision cost the engine's loop: from the call to the checked allocation."""

    @property
    def total_fallbacks(self) -> int:
        """Calls that returned no allocation."""
        return sum(self.fallbacks.values())
