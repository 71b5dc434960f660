"""What a workload may be asked for, and the words for what it may not."""

from __future__ import annotations

MAX_REQUESTS = 10_000_000
MAX_RATE = 1e6
MAX_FLOOR_SECONDS = 3600.0
MAX_SLO_SECONDS = 86_400.0


class WorkloadError(ValueError):
    """A workload was asked for that cannot be made; the message names the value and the remedy."""


class InfeasibleWorkload(WorkloadError):
    """A workload with too many requests whose SLOs even an idle engine cannot keep."""


def check_number(what: str, value: float, low: float, high: float, unit: str, *, above: bool = False) -> None:
    """Raises WorkloadError unless low <= value <= high (low < value with ``above``)."""
    fits = low < value <= high if above else low <= value <= high
    if not fits:
        bound = f"above {low:g}" if above else f"at least {low:g}"
        of_unit = f" {unit}" if unit else ""
        raise WorkloadError(
            f"{what} {value:g}{of_unit} is out of range; choose one {bound} and at most {high:g}{of_unit}"
        )


def check_rate(rate: float) -> None:
    """Raises WorkloadError unless the rate, in requests/s, is above 0 and at most MAX_RATE."""
    check_number("rate", rate, 0.0, MAX_RATE, "requests/s", above=True)


def check_requests(requests: int) -> None:
    """Raises WorkloadError unless the number of requests is from 1 to MAX_REQUESTS."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise WorkloadError(f"{requests} requests are out of range; choose from 1 to {MAX_REQUESTS}")


def check_seed(seed: int) -> None:
    """Raises WorkloadError for a negative seed."""
    if seed < 0:
        raise WorkloadError(f"seed {seed} is negative; choose 0 or more")


def check_slo_overrides(ttft_seconds: float | None, tbt_seconds: float | None) -> None:
    """Raises WorkloadError unless each given SLO is above 0 and at most MAX_SLO_SECONDS."""
    for what, value in (("TTFT SLO", ttft_seconds), ("TBT SLO", tbt_seconds)):
        if value is not None:
            check_number(what, value, 0.0, MAX_SLO_SECONDS, "s", above=True)
