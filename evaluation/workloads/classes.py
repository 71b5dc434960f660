"""Kinds of requests, in which ratio the synthetic workloads mix them, and their lengths.

After the evaluation of SlidingServe. Every random column has a stream of its own, so the same seed gives the same
requests whatever the rate or the SLOs, and a shorter workload is a prefix of a longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from evaluation.workloads.lengths import LengthTarget, sample_lengths
from slidingserve.contract.values import Ints


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


class Stream(IntEnum):
    """One random stream per column: what one column draws never shifts another."""

    ARRIVALS = 0
    CLASSES = 1
    PROMPTS = 2
    PROMPT_PARTS = 3
    OUTPUTS = 4
    OUTPUT_PARTS = 5
    SLO_CLASSES = 6


def random_stream(seed: int, stream: Stream) -> np.random.Generator:
    """Returns the random numbers of a column."""
    return np.random.default_rng([seed, stream])


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRequests:
    """Classes (place in the mix, from 0) and lengths in tokens, int64[n] each."""

    classes: tuple[RequestClass, ...]
    kind: Ints
    prompt_tokens: Ints
    output_tokens: Ints


def draw_requests(mix: str, requests: int, seed: int) -> DrawnRequests:
    """Draws the requests of one of ``MIXES``. O(requests)."""
    classes = tuple(kind for kind, _ in MIXES[mix])
    kind = _choose_classes(mix, requests, seed)
    prompts = _lengths([c.prompt for c in classes], kind, seed, Stream.PROMPTS, Stream.PROMPT_PARTS)
    outputs = _lengths([c.output for c in classes], kind, seed, Stream.OUTPUTS, Stream.OUTPUT_PARTS)
    return DrawnRequests(classes, kind, prompts, outputs)


def _choose_classes(name: str, requests: int, seed: int) -> Ints:
    """Returns for each request the place of its class in the mix, from 0."""
    ratio = np.array([share for _, share in MIXES[name]], np.float64)
    edges = np.cumsum(ratio / ratio.sum())[:-1]
    return np.searchsorted(edges, random_stream(seed, Stream.CLASSES).random(requests), side="right").astype(np.int64)


def _lengths(targets: list[LengthTarget], kind: Ints, seed: int, values: Stream, parts: Stream) -> Ints:
    """Draws one length per request from the target of its class."""
    normal = random_stream(seed, values).standard_normal(kind.size)
    uniform = random_stream(seed, parts).random(kind.size)
    by_class = np.stack([sample_lengths(target, normal, uniform) for target in targets])
    return by_class[kind, np.arange(kind.size)]
