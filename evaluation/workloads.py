"""Workloads: when requests arrive, how long they are and which SLOs they carry.

Five synthetic ones with Poisson arrivals (sharegpt, arxiv-v1, arxiv-v2, mixed-v1, mixed-v2), after the evaluation of
SlidingServe. The published facts are the mean and the 90th percentile of the lengths; the distributions are solved
from them. Every random column has a stream of its own, so the same seed gives the same requests whatever the policy,
the rate (which only scales the arrival times) or the number of requests (a shorter workload is a prefix of a longer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from engine_adapter.simulated.timing import IterationTimer
from slidingserve.contract.values import Floats, Ints

SOLO_CHUNK_TOKENS = 2048
MAX_REQUESTS = 10_000_000
MAX_RATE = 1e6
MAX_FLOOR_SECONDS = 3600.0
MAX_SLO_SECONDS = 86_400.0

_NORMAL = NormalDist()

SoloTtft: TypeAlias = Callable[[Ints], Floats]
"""Prompt tokens int64[n] to the seconds that their prefill takes alone on an idle engine, float64[n]."""


class WorkloadError(ValueError):
    """A workload was asked for that cannot be made; the message names the value and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival; all columns have one length n, times in seconds, lengths in tokens.

    An SLO of 0 means none. ``class_index`` counts from 1 into ``class_names``. ``rate`` is in requests/s (0 where a
    trace is too short to have one).
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

    def __len__(self) -> int:
        """Returns the number of requests."""
        return self.arrival_seconds.size


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution of lengths: median in tokens, sigma of the logarithm."""

    median: float
    sigma: float

    def below(self, tokens: float) -> float:
        """Returns the probability of a length below ``tokens``."""
        return _NORMAL.cdf(math.log(tokens / self.median) / self.sigma)

    def clipped_mean(self, shortest: int, longest: int) -> float:
        """Returns the mean after every length was clipped to [shortest, longest]."""
        low, high = (math.log(edge / self.median) / self.sigma for edge in (shortest, longest))
        inside = _NORMAL.cdf(high - self.sigma) - _NORMAL.cdf(low - self.sigma)
        body = self.median * math.exp(self.sigma**2 / 2) * inside
        return shortest * _NORMAL.cdf(low) + body + longest * (1 - _NORMAL.cdf(high))


@dataclass(frozen=True, slots=True)
class LengthTarget:
    """What is published of a length (mean and 90th percentile, tokens), and how we clip it.

    Where ``short_share`` is above 0 the lengths are a mixture: that share follows ``short``, the rest is solved. A
    single lognormal cannot have a p90 above 2.27 times its mean.
    """

    mean: float
    p90: float
    shortest: int
    longest: int
    short_share: float = 0.0
    short: Lognormal = Lognormal(50.0, 0.8)


@cache
def solve_lengths(target: LengthTarget) -> Lognormal:
    """Returns the lognormal of the lengths that are not ``short``, so that mean and p90 hold after clipping.

    For a given sigma the p90 fixes the median; the sigma that gives the mean is found by bisection.
    """
    share = 1 - target.short_share
    above = (0.1 - target.short_share * (1 - target.short.below(target.p90))) / share
    quantile = _NORMAL.inv_cdf(1 - above)

    def candidate(sigma: float) -> Lognormal:
        return Lognormal(target.p90 * math.exp(-quantile * sigma), sigma)

    def surplus(sigma: float) -> float:
        short = target.short_share * target.short.clipped_mean(target.shortest, target.longest)
        return short + share * candidate(sigma).clipped_mean(target.shortest, target.longest) - target.mean

    low, high = 1e-3, _NORMAL.inv_cdf(0.9)
    sign = math.copysign(1.0, surplus(low))
    if sign * surplus(high) > 0:
        raise WorkloadError(f"no lognormal has mean {target.mean} and p90 {target.p90} tokens; raise short_share")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sign * surplus(middle) > 0 else (low, middle)
    return candidate(low)


def sample_lengths(target: LengthTarget, normal: Floats, uniform: Floats) -> Ints:
    """Turns standard normal and uniform draws, float64[n] each, into lengths in tokens, int64[n]."""
    rest = solve_lengths(target)
    is_short = uniform < target.short_share
    median = np.where(is_short, target.short.median, rest.median)
    sigma = np.where(is_short, target.short.sigma, rest.sigma)
    tokens = np.rint(median * np.exp(sigma * normal))
    lengths: Ints = np.clip(tokens, target.shortest, target.longest).astype(np.int64)
    return lengths


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A kind of request: its lengths, and its SLOs (TTFT as a multiple of the solo TTFT, TBT in seconds)."""

    name: str
    prompt: LengthTarget
    output: LengthTarget
    ttft_factor: float
    tbt_slo_seconds: float


SHAREGPT = RequestClass(
    "sharegpt", LengthTarget(357, 1724, 8, 8000, short_share=0.85), LengthTarget(89, 184, 2, 1500), 5.0, 0.040
)
ARXIV_V1 = RequestClass(
    "arxiv-v1", LengthTarget(3253, 4382, 300, 16_000), LengthTarget(356, 542, 20, 1500), 10.0, 0.080
)
ARXIV_V2 = RequestClass(
    "arxiv-v2", LengthTarget(6267, 7567, 300, 16_000), LengthTarget(423, 623, 20, 1500), 10.0, 0.080
)

MIXES: dict[str, tuple[tuple[RequestClass, int], ...]] = {
    "sharegpt": ((SHAREGPT, 1),),
    "arxiv-v1": ((ARXIV_V1, 1),),
    "arxiv-v2": ((ARXIV_V2, 1),),
    "mixed-v1": ((SHAREGPT, 3), (ARXIV_V1, 1)),
    "mixed-v2": ((SHAREGPT, 5), (ARXIV_V2, 1)),
}
"""The synthetic workloads: their classes and in which ratio they come."""


class _Stream(IntEnum):
    """One random stream per column: what one column draws never shifts another."""

    ARRIVALS = 0
    CLASSES = 1
    PROMPTS = 2
    PROMPT_PARTS = 3
    OUTPUTS = 4
    OUTPUT_PARTS = 5


def synthetic_workload(
    name: str,
    *,
    rate: float,
    requests: int,
    seed: int,
    solo_ttft_seconds: SoloTtft,
    floor_seconds: float = 0.0,
    ttft_seconds: float | None = None,
    tbt_seconds: float | None = None,
) -> Workload:
    """Makes one of the workloads of ``MIXES``.

    ``rate`` in requests/s. The TTFT SLO is the class's factor times the solo TTFT plus ``floor_seconds``; the TBT SLO
    is the class's. ``ttft_seconds`` and ``tbt_seconds`` replace those rules for every request. Raises WorkloadError.
    """
    if name not in MIXES:
        raise WorkloadError(f"unknown workload {name!r}; choose one of {', '.join(MIXES)}")
    check_number("rate", rate, 0.0, MAX_RATE, "requests/s", above=True)
    check_requests(requests)
    check_seed(seed)
    check_number("floor", floor_seconds, 0.0, MAX_FLOOR_SECONDS, "s")
    check_slo_overrides(ttft_seconds, tbt_seconds)

    classes = tuple(kind for kind, _ in MIXES[name])
    kind = _choose_classes(name, requests, seed)
    prompt_tokens = _lengths([c.prompt for c in classes], kind, seed, _Stream.PROMPTS, _Stream.PROMPT_PARTS)
    output_tokens = _lengths([c.output for c in classes], kind, seed, _Stream.OUTPUTS, _Stream.OUTPUT_PARTS)
    if ttft_seconds is None:
        factor = np.array([c.ttft_factor for c in classes])[kind]
        ttft = factor * _checked_solo(solo_ttft_seconds, prompt_tokens) + floor_seconds
    else:
        ttft = np.full(requests, ttft_seconds)
    tbt = np.array([c.tbt_slo_seconds for c in classes])[kind]
    return Workload(
        name=name,
        arrival_seconds=np.cumsum(_random(seed, _Stream.ARRIVALS).standard_exponential(requests)) / rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_slo_seconds=ttft,
        tbt_slo_seconds=tbt if tbt_seconds is None else np.full(requests, tbt_seconds),
        ttlt_slo_seconds=np.zeros(requests),
        class_index=kind + 1,
        class_names=tuple(c.name for c in classes),
        rate=float(rate),
    )


def solo_ttft(timer: IterationTimer, prompt_tokens: Ints, chunk_tokens: int = SOLO_CHUNK_TOKENS) -> Floats:
    """Returns the seconds each prompt's prefill takes alone on an idle engine, in chunks of ``chunk_tokens``.

    float64[n] for int64[n]. The full chunks of all prompts are the same iterations, so each is timed once, and each
    distinct length adds its last chunk: O(distinct lengths + chunks of the longest) timings.
    """
    distinct, place = np.unique(prompt_tokens, return_inverse=True)
    if distinct.size == 0:
        return np.zeros(0)
    if distinct[0] < 1 or chunk_tokens < 1:
        raise WorkloadError(f"prompt of {distinct[0]} tokens in chunks of {chunk_tokens}; both must be at least 1")
    chunk, context = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def seconds(tokens: int, before: int) -> float:
        chunk[0], context[0] = tokens, before
        return timer.seconds(chunk, context, 1)

    full_chunks = int((distinct[-1] - 1) // chunk_tokens)
    before = np.cumsum([0.0, *(seconds(chunk_tokens, k * chunk_tokens) for k in range(full_chunks))])
    alone = np.empty(distinct.size)
    for i, tokens in enumerate(distinct.tolist()):
        done = (tokens - 1) // chunk_tokens
        alone[i] = before[done] + seconds(tokens - done * chunk_tokens, done * chunk_tokens)
    return alone[place.reshape(-1)]


def check_number(what: str, value: float, low: float, high: float, unit: str, *, above: bool = False) -> None:
    """Raises WorkloadError unless low <= value <= high (low < value with ``above``)."""
    fits = low < value <= high if above else low <= value <= high
    if not fits:
        bound = f"above {low:g}" if above else f"at least {low:g}"
        raise WorkloadError(f"{what} {value:g} {unit} is out of range; choose one {bound} and at most {high:g} {unit}")


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


def _random(seed: int, stream: _Stream) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


def _choose_classes(name: str, requests: int, seed: int) -> Ints:
    """Returns for each request the place of its class in the mix, from 0."""
    ratio = np.array([share for _, share in MIXES[name]], np.float64)
    edges = np.cumsum(ratio / ratio.sum())[:-1]
    return np.searchsorted(edges, _random(seed, _Stream.CLASSES).random(requests), side="right").astype(np.int64)


def _lengths(targets: list[LengthTarget], kind: Ints, seed: int, values: _Stream, parts: _Stream) -> Ints:
    """Draws one length per request from the target of its class."""
    normal = _random(seed, values).standard_normal(kind.size)
    uniform = _random(seed, parts).random(kind.size)
    by_class = np.stack([sample_lengths(target, normal, uniform) for target in targets])
    return by_class[kind, np.arange(kind.size)]


def _checked_solo(solo_ttft_seconds: SoloTtft, prompt_tokens: Ints) -> Floats:
    alone = solo_ttft_seconds(prompt_tokens)
    bad = np.flatnonzero(~(np.isfinite(alone) & (alone > 0)))
    if bad.size:
        worst = bad[0]
        raise WorkloadError(
            f"solo TTFT of a prompt of {prompt_tokens[worst]} tokens is {alone[worst]} s; "
            "the hardware profile must give a time above 0"
        )
    return alone
