"""How requests arrive: as a Poisson process, in bursts, under a load that switches, or as recorded.

The generated processes are drawn at a mean of 1 request/s and then put to the wanted mean rate, so the same draws serve
every rate. NumPy fills its samples one after the other, so fewer draws are the first of more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from evaluation.workloads.checks import MAX_RATE, WorkloadError, check_number
from slidingserve.contract.values import Floats

MAX_CV = 100.0
MAX_PERIOD_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Poisson:
    """Exponential gaps."""

    kind: ClassVar[str] = "poisson"

    def arrivals(self, random: np.random.Generator, requests: int, rate: float) -> Floats:
        """Returns ascending arrival times in s, float64[requests], at a mean of ``rate`` requests/s. O(requests)."""
        return np.cumsum(random.standard_exponential(requests)) / rate


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma distributed gaps with this coefficient of variation; above 1 requests come in bursts."""

    cv: float = 5.0
    kind: ClassVar[str] = "gamma"

    def __post_init__(self) -> None:
        """Raises WorkloadError for a cv out of range."""
        check_number("cv", self.cv, 0.0, MAX_CV, "", above=True)

    def arrivals(self, random: np.random.Generator, requests: int, rate: float) -> Floats:
        """See `Poisson.arrivals`. The mean of n gaps has a relative standard error of cv / sqrt(n)."""
        gaps = self.cv**2 * random.standard_gamma(1 / self.cv**2, requests)
        return np.cumsum(gaps) / rate


@dataclass(frozen=True, slots=True)
class Switching:
    """A Poisson process whose rate is low for a period, high for the next, and so on.

    Only the ratio of ``low`` and ``high`` counts once a mean rate is given; at their mean they are requests/s. The
    period stays what it is at any rate.
    """

    period_seconds: float = 120.0
    low: float = 1.0
    high: float = 2.5
    kind: ClassVar[str] = "switching"

    def __post_init__(self) -> None:
        """Raises WorkloadError for a value out of range."""
        check_number("period_s", self.period_seconds, 0.0, MAX_PERIOD_SECONDS, "s", above=True)
        for what, value in (("low", self.low), ("high", self.high)):
            check_number(what, value, 0.0, MAX_RATE, "requests/s", above=True)
        if self.low > self.high:
            raise WorkloadError(f"low {self.low:g} is above high {self.high:g}; exchange them")

    @property
    def mean_rate(self) -> float:
        """Requests/s at which ``low`` and ``high`` are rates themselves."""
        return (self.low + self.high) / 2

    def arrivals(self, random: np.random.Generator, requests: int, rate: float) -> Floats:
        """See `Poisson.arrivals`; over whole pairs of periods the mean is ``rate``."""
        return self.delayed(Poisson().arrivals(random, requests, rate))

    def delayed(self, steady: Floats) -> Floats:
        """Moves arrivals of a steady load to where as many have arrived under the switching one; seconds. O(n)."""
        low, high = self.low / self.mean_rate, self.high / self.mean_rate
        pairs, rest = np.divmod(steady, 2 * self.period_seconds)
        at_low = low * self.period_seconds
        seconds = np.where(rest < at_low, rest / low, self.period_seconds + (rest - at_low) / high)
        return 2 * self.period_seconds * pairs + seconds

    def steadied(self, arrival_seconds: Floats) -> Floats:
        """Undoes `delayed`. O(n)."""
        low, high = self.low / self.mean_rate, self.high / self.mean_rate
        pairs, rest = np.divmod(arrival_seconds, 2 * self.period_seconds)
        in_high = np.maximum(rest - self.period_seconds, 0.0)
        return 2 * self.period_seconds * pairs + low * np.minimum(rest, self.period_seconds) + high * in_high


@dataclass(frozen=True, slots=True)
class Recorded:
    """As a trace has them."""

    kind: ClassVar[str] = "recorded"


Generated: TypeAlias = Poisson | Gamma | Switching
Arrivals: TypeAlias = Generated | Recorded

GENERATED: dict[str, type[Generated]] = {kind.kind: kind for kind in (Poisson, Gamma, Switching)}
