"""An upper bound on the requests of a full workload that any policy can meet, and on the goodput.

The policy may know the future, preempt at no cost, idle, abandon requests, and choose any batches within the engine's
limits. What it cannot do is spend less time than `work` charges. The argument:

1. Take an interval [a, b]. A request that arrives in it and is met has every token that is due by b computed in
   iterations that lie wholly in [a, b]: they start after its arrival and end by the deadline.
2. Iterations follow one another, so those in [a, b] take at most b - a; hence so do the charges of the tokens due by b
   of all requests that arrive in [a, b] and are met. (Requests that arrive earlier are not counted: they may be ahead.)
3. If the charges of all requests that arrive in it exceed b - a, some are late; at least as many as must be taken
   out, the largest first, until the rest fits. The same holds if only an unbroken run of arrivals is looked at.
4. Intervals whose runs of arrivals are disjoint speak of different requests, so their late ones add up; the best choice
   of intervals is found by dynamic programming over the order of arrival.
5. A request that even an engine of its own cannot serve in time is late in any schedule.

Any choice of intervals gives a valid bound, so they may be sampled: that costs sharpness, not truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.floor import cover_seconds
from evaluation.bounds.progress import TOLERANCE_SECONDS
from evaluation.bounds.work import (
    Attention,
    Line,
    attention,
    least_by_tokens,
    prefill_attention_seconds,
    supporting_lines,
    window_shares,
)
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits, Floats, Ints
from slidingserve.jit import kernel

INTERVALS = 400
"""Starts and ends that are tried; the bound costs their product."""


@dataclass(frozen=True, slots=True)
class BindingInterval:
    """Of the requests that arrive from the ``first`` to before the ``stop``-th, ``late`` cannot be met by ``end``."""

    start_seconds: float
    end_seconds: float
    first: int
    stop: int
    late: int
    work_seconds: float


@dataclass(frozen=True, slots=True)
class Bound:
    """What no policy can beat.

    Attributes:
        requests: of the workload.
        met_at_most: requests that meet their deadlines.
        hopeless: requests that are late even alone.
        intervals: those that prove the other late ones, in order.
        line: how iterations were charged.
        work_seconds: charges of all requests together.
    """

    requests: int
    met_at_most: int
    hopeless: int
    intervals: tuple[BindingInterval, ...]
    line: Line
    work_seconds: float

    @property
    def share_late_at_least(self) -> float:
        """Share of the requests that are late under any policy."""
        return 1.0 - self.met_at_most / self.requests


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """Requests that are not hopeless, in order of arrival, with what they are charged; columns of one length.

    A decode costs ``decode`` plus ``kv_token`` per token of context. No SLO is an infinite ``first_due``, ``tbt`` or
    ``last_due`` (the latter: of the last token, by TTLT).
    """

    arrival: Floats
    first_due: Floats
    tbt: Floats
    last_due: Floats
    prompt: Floats
    outputs: Floats
    prefill: Floats
    decode: Floats
    kv_token: float

    def due_work(self, end: float) -> Floats:
        """Returns the charges for the tokens that are due by ``end``; O(n)."""
        started = self.first_due <= end
        steps = np.floor(np.where(started, end - np.where(started, self.first_due, 0.0), 0.0) / self.tbt)
        later = np.minimum(steps, self.outputs - 1)  # tokens after the first
        later = np.where(self.last_due <= end, self.outputs - 1, later)
        context = later * self.prompt + later * (later - 1) / 2
        work: Floats = self.prefill + later * self.decode + context * self.kv_token
        work[~started & (self.last_due > end)] = 0.0
        return work

    def all_due(self) -> Floats:
        """Returns when everything of a request is due at the latest."""
        more = self.outputs > 1
        by_token = self.first_due + np.where(more, self.tbt, 0.0) * np.where(more, self.outputs - 1, 1.0)
        due: Floats = np.minimum(by_token, self.last_due)
        return due


_COLUMNS = ("arrival", "first_due", "tbt", "last_due", "prompt", "outputs", "prefill", "decode")


def upper_bound(workload: Workload, timer: ProfileTimer, limits: EngineLimits, *, intervals: int = INTERVALS) -> Bound:
    """Returns an upper bound on the requests that any policy can meet by the deadline rule.

    Args:
        workload: n requests in order of arrival; an SLO of 0 is none.
        timer: times of iterations.
        limits: of the engine; the token budget and the sequences count, KV blocks only for requests that never fit.
        intervals: how many starts and ends of intervals are tried.

    O(intervals x n log n + intervals^2 x late requests); about 0.1 s at 600 requests. Raises ValueError for an empty
    workload or no intervals.
    """
    if len(workload) == 0 or intervals < 1:
        raise ValueError(f"{len(workload)} requests and {intervals} intervals; there must be at least one of each")
    least, costs = least_by_tokens(timer, limits), attention(timer, limits)
    everyone = _charge(workload, Line(0.0, 0.0), costs, limits, np.zeros(len(workload)))
    possible = ~_hopeless(everyone, workload, least, costs, limits)
    shares = np.zeros(len(workload))
    shares[possible] = window_shares(everyone.arrival[possible], everyone.all_due()[possible])
    candidates = [(line, _charge(workload, line, costs, limits, shares)) for line in supporting_lines(least)]
    line, charged = max(candidates, key=lambda pair: _finite_work(pair[1])[possible].sum())
    kept = _select(charged, possible)
    found = _binding_intervals(kept, intervals) if kept.arrival.size else []
    rows = np.append(np.flatnonzero(possible), len(workload))
    hopeless = int(np.count_nonzero(~possible))
    return Bound(
        requests=len(workload),
        met_at_most=len(workload) - hopeless - sum(i.late for i in found),
        hopeless=hopeless,
        intervals=tuple(
            BindingInterval(
                i.start_seconds, i.end_seconds, int(rows[i.first]), int(rows[i.stop - 1]) + 1, i.late, i.work_seconds
            )
            for i in found
        ),
        line=line,
        work_seconds=float(_finite_work(kept).sum()),
    )


def _charge(workload: Workload, line: Line, costs: Attention, limits: EngineLimits, shares: Floats) -> _Requests:
    """Returns what each request is charged along a line; see `work`."""
    budget = limits.max_tokens_per_iteration
    prompt = workload.prompt_tokens.astype(np.float64)
    fixed = shares * line.fixed_seconds
    none = np.inf
    has_ttft = workload.ttft_slo_seconds > 0
    return _Requests(
        arrival=workload.arrival_seconds,
        first_due=np.where(has_ttft, workload.arrival_seconds + workload.ttft_slo_seconds, none),
        tbt=np.where(has_ttft & (workload.tbt_slo_seconds > 0), workload.tbt_slo_seconds, none),
        last_due=np.where(workload.ttlt_slo_seconds > 0, workload.arrival_seconds + workload.ttlt_slo_seconds, none),
        prompt=prompt,
        outputs=workload.output_tokens.astype(np.float64),
        prefill=line.seconds_per_token * prompt
        + prefill_attention_seconds(workload.prompt_tokens, costs, budget)
        + fixed * np.ceil(prompt / budget),
        decode=line.seconds_per_token + fixed,
        kv_token=min(costs.kv_token, line.seconds_per_token),
    )


def _finite_work(requests: _Requests) -> Floats:
    """Returns all that each request is charged, due or not."""
    later = requests.outputs - 1
    context = later * requests.prompt + later * (later - 1) / 2
    return requests.prefill + later * requests.decode + context * requests.kv_token


def _select(requests: _Requests, kept: NDArray[np.bool_]) -> _Requests:
    columns = {name: getattr(requests, name)[kept] for name in _COLUMNS}
    return replace(requests, **columns)


def _hopeless(
    requests: _Requests, workload: Workload, least: Floats, costs: Attention, limits: EngineLimits
) -> NDArray[np.bool_]:
    """Says which requests an engine of their own cannot serve in time, or would not take at all."""
    at_least = least.copy()
    at_least[1:] = np.minimum.accumulate(least[:0:-1])[::-1]
    cover = cover_seconds(int(workload.prompt_tokens.max()), at_least)
    alone = cover[workload.prompt_tokens] + prefill_attention_seconds(
        workload.prompt_tokens, costs, limits.max_tokens_per_iteration
    )
    first = requests.arrival + alone
    last = first + (requests.outputs - 1) * at_least[1]
    longest = limits.kv_blocks * limits.kv_block_tokens
    if limits.max_model_tokens:
        longest = min(longest, limits.max_model_tokens)
    late = (first > requests.first_due + TOLERANCE_SECONDS) | (last > requests.all_due() + TOLERANCE_SECONDS)
    return np.asarray(late | (workload.prompt_tokens + workload.output_tokens > longest), np.bool_)


def _binding_intervals(requests: _Requests, intervals: int) -> list[BindingInterval]:
    """Returns the intervals with disjoint runs of arrivals that prove most late requests."""
    n = requests.arrival.size
    ends = np.concatenate([requests.first_due, requests.all_due()])
    # A little later than the deadline, so that rounding does not turn a token that is due into one that is not.
    ends = np.unique(ends[np.isfinite(ends)]) + TOLERANCE_SECONDS
    ends = ends[_sampled(ends.size, intervals)] if ends.size else ends
    starts = _sampled(n, intervals)
    blocks: list[tuple[int, int, int, float, float]] = []
    for end in ends.tolist():
        work = requests.due_work(end)
        due = np.flatnonzero(work)
        if due.size == 0:
            continue
        stop = int(due[-1]) + 1
        inside = starts[starts < stop]
        total = np.cumsum(work[::-1])[::-1][inside]
        surplus = total - (end - requests.arrival[inside])
        over = np.flatnonzero(surplus > TOLERANCE_SECONDS)
        if over.size == 0:
            continue
        late = fewest_late(work, np.argsort(-work, kind="stable"), inside[over], surplus[over] - TOLERANCE_SECONDS)
        blocks += [
            (stop, int(inside[at]), int(count), end, float(total[at]))
            for at, count in zip(over.tolist(), late.tolist(), strict=True)
        ]
    return _best_disjoint(blocks, requests.arrival, n)


def _best_disjoint(
    blocks: list[tuple[int, int, int, float, float]], arrival: Floats, count: int
) -> list[BindingInterval]:
    """Chooses blocks (stop, first, late, end, work) that do not overlap and have most late requests in all."""
    blocks.sort()
    best = np.zeros(count + 1, np.int64)
    chosen: list[tuple[int, int, int, float, float] | None] = [None] * (count + 1)
    at = 0
    for stop in range(1, count + 1):
        best[stop] = best[stop - 1]
        while at < len(blocks) and blocks[at][0] == stop:
            reached = best[blocks[at][1]] + blocks[at][2]
            if reached > best[stop]:
                best[stop], chosen[stop] = reached, blocks[at]
            at += 1
    found, stop = [], count
    while stop > 0:
        block = chosen[stop]
        if block is None:
            stop -= 1
            continue
        _, first, late, end, work = block
        found.append(BindingInterval(float(arrival[first]), end, first, stop, late, work))
        stop = first
    return found[::-1]


def _sampled(count: int, most: int) -> Ints:
    """Returns at most so many places from 0 to count - 1, evenly chosen, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


@kernel
def fewest_late(work: Floats, order: Ints, starts: Ints, surplus: Floats) -> Ints:
    """Returns, for each start, the fewest requests from there on whose work is at least the surplus together.

    ``order``: the requests by falling work. O(starts x n) at worst.
    """
    late = np.zeros(len(starts), np.int64)
    for at in range(len(starts)):
        removed = 0.0
        for row in order:
            if removed >= surplus[at]:
                break
            if row >= starts[at]:
                removed += work[row]
                late[at] += 1
    return late


@dataclass(frozen=True, slots=True)
class GoodputBound:
    """Rates in requests/s.

    Attributes:
        at_most: at this rate the bound proves more late requests than allowed: no policy has a goodput of this or more.
        not_excluded: at this rate it does not.
        bound: at ``at_most``.
    """

    at_most: float
    not_excluded: float
    bound: Bound


def bound_goodput(
    workload_at_rate: Callable[[float], Workload],
    timer: ProfileTimer,
    limits: EngineLimits,
    *,
    allowed_late: float = 0.01,
    start_rate: float = 1.0,
    precision: float = 0.01,
    intervals: int = INTERVALS,
) -> GoodputBound:
    """Returns the rate at which the bound on late requests crosses what is allowed, by bisection on the rate.

    Goodput is the highest rate up to which no grid point has more late requests than allowed, so a rate at which the
    bound proves more is above it. ``workload_at_rate`` must give the same requests at any rate, only their arrivals
    scaled. Ends when the two rates differ by the relative ``precision``.

    Raises:
        ValueError: even at extreme rates there is no crossing; e.g. no request has an SLO.
    """
    if not (start_rate > 0 and 0 < precision < 1 and 0 <= allowed_late < 1):
        raise ValueError(
            f"start rate {start_rate:g}, precision {precision:g}, allowed late {allowed_late:g}: "
            "the rate must be above 0, the precision in (0, 1), the share in [0, 1)"
        )

    def at(rate: float) -> Bound:
        return upper_bound(workload_at_rate(rate), timer, limits, intervals=intervals)

    low = high = start_rate
    bound = at(high)
    over = bound.share_late_at_least > allowed_late
    while bound.share_late_at_least <= allowed_late:
        low, high = high, 2 * high
        if high > start_rate * 2**20:
            raise ValueError(f"no request need be late even at {high:g} requests/s; do they have SLOs?")
        bound = at(high)
    while over:
        low /= 2
        if low < start_rate / 2**20:
            raise ValueError(f"too many requests are late at {low:g} requests/s already; their SLOs cannot be met")
        lower = at(low)
        over = lower.share_late_at_least > allowed_late
        high, bound = (low, lower) if over else (high, bound)
    while high - low > precision * high:
        middle = (low + high) / 2
        between = at(middle)
        if between.share_late_at_least > allowed_late:
            high, bound = middle, between
        else:
            low = middle
    return GoodputBound(high, low, bound)
