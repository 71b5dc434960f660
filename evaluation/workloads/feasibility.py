"""Whether the SLOs of a workload can be kept at all: what an idle engine cannot do, no policy can."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.timing import IterationTimer
from evaluation.workloads.checks import InfeasibleWorkload
from evaluation.workloads.solo import solo_ttft
from evaluation.workloads.values import Workload
from slidingserve.contract.values import EngineLimits, Floats

TOLERATED_SHARE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """An SLO, what an idle engine takes for it, and the words for that; seconds[n], SLO 0: none."""

    slo: str
    slo_seconds: Floats
    least_seconds: Floats
    of: str

    @property
    def too_short(self) -> NDArray[np.bool_]:
        """Which requests have an SLO that an idle engine cannot keep."""
        below: NDArray[np.bool_] = (self.slo_seconds > 0) & (self.slo_seconds < self.least_seconds)
        return below


def check_feasible(
    workload: Workload,
    timer: IterationTimer,
    *,
    profile: str = "this hardware",
    limits: EngineLimits | None = None,
    tolerated: float = TOLERATED_SHARE,
) -> float:
    """Returns the share of requests with an SLO that an idle engine cannot keep.

    That is a TTFT SLO below the prefill of the prompt alone, a TBT SLO below an iteration that decodes the request
    alone with its shortest context, a TTLT SLO below prefill and decodes together; with ``limits`` also a request that
    does not fit into the KV blocks. No policy meets such a request, with one exception: where only TBT is too short, no
    gap can be that short, but few tokens may still be in by the papers' deadlines, on the time that TTFT leaves.
    O(distinct lengths) timings.

    Raises:
        InfeasibleWorkload: the share is above ``tolerated``; names the SLO, the time, ``profile`` and the remedy.
    """
    bounds = _bounds(workload, timer)
    too_short = np.logical_or.reduce([bound.too_short for bound in bounds])
    reasons = [_reason(bound, workload) for bound in bounds if bound.too_short.any()]
    if limits is not None:
        room = limits.kv_blocks * limits.kv_block_tokens
        tokens = workload.prompt_tokens + workload.output_tokens
        if np.any(tokens > room):
            too_short |= tokens > room
            reasons.append(
                f"{_percent(tokens > room)} of the requests have more tokens than the {room} that fit into the KV cache"
            )
    share = float(too_short.mean())
    if share > tolerated:
        raise InfeasibleWorkload(
            f"workload {workload.name!r} on {profile}: even an idle engine cannot keep the SLOs of "
            f"{_percent(too_short)} of its requests, so no policy can at any rate; "
            f"at most {100 * tolerated:g} % may be like that. "
            f"{'; '.join(reasons)}. Give longer SLOs (ttft_ms, tbt_ms) or a faster profile."
        )
    return share


def _bounds(workload: Workload, timer: IterationTimer) -> tuple[_Bound, ...]:
    prompts, place = np.unique(workload.prompt_tokens, return_inverse=True)
    place = place.reshape(-1)
    # One iteration for the whole prompt may be faster than chunks.
    prefill = np.minimum(solo_ttft(timer, prompts), [_seconds(timer, tokens, 0) for tokens in prompts.tolist()])[place]
    decode = np.array([_seconds(timer, 1, tokens) for tokens in prompts.tolist()])[place]
    later_tokens = workload.output_tokens - 1
    return (
        _Bound("TTFT", workload.ttft_slo_seconds, prefill, "the prefill of {} tokens takes alone"),
        _Bound(
            "TBT",
            workload.tbt_slo_seconds,
            np.where(later_tokens > 0, decode, 0.0),
            "an iteration takes that decodes one request of {} tokens alone",
        ),
        _Bound(
            "TTLT",
            workload.ttlt_slo_seconds,
            prefill + later_tokens * decode,
            "a request of {} prompt tokens takes alone",
        ),
    )


def _seconds(timer: IterationTimer, chunk: int, context: int) -> float:
    return timer.seconds(np.array([chunk], np.int64), np.array([context], np.int64), 1)


def _reason(bound: _Bound, workload: Workload) -> str:
    """Says for how many an SLO is too short, shows one of them, and what would do for nearly all."""
    example = int(np.flatnonzero(bound.too_short)[0])
    of = bound.of.format(int(workload.prompt_tokens[example]))
    enough = float(np.quantile(bound.least_seconds[bound.slo_seconds > 0], 1 - TOLERATED_SHARE / 2, method="higher"))
    slo, least = (_duration(seconds[example]) for seconds in (bound.slo_seconds, bound.least_seconds))
    return (
        f"{bound.slo} SLO {slo} is below the {least} that {of} "
        f"({_percent(bound.too_short)} of the requests; {_duration(enough, up=True)} would do for nearly all)"
    )


def _percent(chosen: NDArray[np.bool_]) -> str:
    return f"{100 * float(chosen.mean()):.3g} %"


def _duration(seconds: float, *, up: bool = False) -> str:
    """Returns ms or s with three digits, rounded up where it is a bound."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    if up and float(f"{value:.3g}") < value:
        value += 0.5 * 10.0 ** (np.floor(np.log10(value)) - 2)
    return f"{value:.3g} {unit}"
