"""The answer to "which policy for my traffic, and what can I promise?", as values and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.goodput.intervals import CLAIMED
from evaluation.goodput.provenance import Provenance
from evaluation.tuning.traffic import Traffic

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Lead:
    """How much more goodput the chosen settings have in the same futures.

    A ratio minus 1, median and 95 % interval; None where the other has no goodput.
    """

    median: float | None
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0 and the lead is at least 3 %, the least that is claimed."""
        return self.low is None or (self.low > 0.0 and (self.median or 0.0) >= CLAIMED)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Settings that came into the last round.

    Attributes:
        policy: as it is written in settings and on the command line.
        promised_rate: requests/s; 0: none down to ``lowest_rate`` can be promised.
        lowest_rate: the lowest that was looked at, requests/s.
        goodput: requests/s in the part that was chosen on.
        low, high: between these the goodput of another window is expected, requests/s; see `promise`.
        lead: of the chosen settings over these; None for the chosen ones.
    """

    policy: str
    promised_rate: float
    goodput: float
    low: float
    high: float
    lowest_rate: float
    lead: Lead | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What the chosen settings did at the promised rate in the part that was held out.

    Attributes:
        requests: how many.
        missed: share of them that missed a deadline.
        held: whether that is within the limit.
        default_missed: share that missed with the default settings at the same rate.
        rate_that_holds: requests/s, not above the promise, at which this part holds; the promise where it held.
    """

    requests: int
    missed: float
    held: bool
    default_missed: float
    rate_that_holds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """All of it.

    ``tested`` and ``engines`` are None where nothing can be promised, ``engines`` also without a recorded rate.
    ``screened``: goodput of every setting that was looked at in the first round, with few requests.
    """

    profile: str
    traffic: Traffic
    slos: str
    least_ttft_seconds: float
    least_tbt_seconds: float
    limit: float
    best: Contestant
    default: Contestant
    others: tuple[Contestant, ...]
    tested: Trial | None
    engines: int | None
    warnings: tuple[str, ...]
    screened: Mapping[str, float]
    left_out: tuple[str, ...]
    origin: Provenance

    @property
    def lost_with_default(self) -> float | None:
        """Share of the promised rate that the default does not reach, at least; None without a promise."""
        if self.best.promised_rate <= 0:
            return None
        reached = self.default.promised_rate or self.default.lowest_rate
        return max(0.0, 1.0 - reached / self.best.promised_rate)


def to_json(answer: Answer) -> dict[str, Any]:
    """Returns the document; what is not known is null."""
    values = asdict(answer)
    origin = values.pop("origin")
    return {
        "schema": SCHEMA,
        "kind": "tune",
        "commit": origin["commit"],
        "version": origin["version"],
        "code": origin["code"],
        "profiles": origin["profiles"],
        "lost_with_default": answer.lost_with_default,
        **values,
    }
