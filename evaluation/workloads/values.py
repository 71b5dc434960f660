"""The requests of a workload, as columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evaluation.workloads.arrivals import Switching
from evaluation.workloads.checks import WorkloadError, check_rate
from slidingserve.contract.values import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival; all columns have one length n, times in seconds, lengths in tokens.

    An SLO of 0 means none. ``class_index`` counts from 1 into ``class_names``. ``rate`` is in requests/s (0 where a
    trace is too short to have one). ``switching`` is the load pattern, where the load has one that keeps its period
    whatever the rate.
    """

    name: str
    arrival_seconds: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_slo_seconds: Floats
    tbt_slo_seconds: Floats
    ttlt_slo_seconds: Floats
    class_index: Ints
    class_names: tuple[str, ...]
    rate: float
    switching: Switching | None = None

    def __len__(self) -> int:
        """Returns the number of requests."""
        return self.arrival_seconds.size

    def at_rate(self, rate: float) -> Workload:
        """Returns the same requests at another mean rate, in requests/s: only the arrival times differ. O(n).

        Raises:
            WorkloadError: the rate is out of range, or there is no rate to start from.
        """
        check_rate(rate)
        if self.rate == 0.0 and len(self) > 1:
            raise WorkloadError(
                f"rate {rate:g}: all {len(self)} requests of {self.name} arrive at once; leave the rate out"
            )
        steady = self.arrival_seconds if self.switching is None else self.switching.steadied(self.arrival_seconds)
        steady = steady * self.rate / rate
        arrival = steady if self.switching is None else self.switching.delayed(steady)
        return replace(self, arrival_seconds=arrival, rate=float(rate))
