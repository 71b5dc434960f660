"""The least time that a request takes from the engine, as shares that add up to no more than the iterations take.

An iteration of N tokens, all kinds of batches considered, takes at least G(N) seconds plus what attention asks of each
entry. Take any straight line below G: G(N) >= fixed + rate x N for every N that an iteration can hold. Then

    T(batch) >= fixed + sum over its entries of (rate x tokens + attention),

and with shares y >= 0 of the requests that sum to at most 1 over the requests that can be in one batch,

    T(batch) >= sum over its entries of (y x fixed + rate x tokens + attention).

Summed over all iterations of a schedule, a request that is met gets charged: its prompt and all output tokens but the
first at ``rate``; attention over its own context; and y x fixed for each iteration that it is in, of which there are at
least ceil(prompt / budget) + outputs - 1, as an iteration gives a request at most one token. So the charges of requests
that are met within an interval cannot exceed its length, whatever the policy does.

Shares: a request that is met is computed only between its arrival and its last deadline. If live(t) is the number of
requests whose windows hold t, y = 1 / max of live over the own window will do: at any time t the windows that hold t
have y <= 1 / live(t), and there are live(t) of them.

Attention of a prefill, from the fitted features (c: chunk, x: context; all coefficients >= 0): each chunk costs at
least a c^2 + b c x, where features of c^2 give a, those of c x give b, 64-token tiles give both as ceil(c / 64) >=
c / 64, and a cost per token of context k x is at least (k / budget) c x. Over the chunks of a prompt of p tokens
sum c x = (p^2 - sum c^2) / 2 and p <= sum c^2 <= p x min(p, budget), so the least is at one of these two ends. A chunk
of one token is timed as a decode, at kv x x; a and b are lowered where that would be less. Attention of a decode: kv
seconds per token of context, the least slope of the fitted pieces, of decode-only and of mixed iterations.

Preemption changes nothing: a preempted request computes anew all its context of X tokens before its next token, at
``rate`` each, which is charged no less than rate + kv x (X - 1) as long as kv <= rate; kv is lowered to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine_adapter.simulated.profiles import FEATURES
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.floor import FEATURE_COUNT, HEADER, tokens_seconds
from slidingserve.contract.values import EngineLimits, Floats, Ints

_TILE_TOKENS = 64.0


@dataclass(frozen=True, slots=True)
class Line:
    """An iteration of N tokens takes at least ``fixed_seconds + seconds_per_token x N``."""

    fixed_seconds: float
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Least seconds that attention adds: per c^2 and c x of a prefill chunk, per token of context of a decode."""

    chunk_squared: float
    chunk_context: float
    kv_token: float


def attention(timer: ProfileTimer, limits: EngineLimits) -> Attention:
    """Reads the attention's least costs out of a timer."""
    seconds = dict(zip(FEATURES, timer.model[HEADER : HEADER + FEATURE_COUNT].tolist(), strict=True))
    tile = seconds["prefill_tile_work"] / _TILE_TOKENS
    squared = seconds["prefill_causal"] + tile / 2
    crossed = (
        seconds["prefill_prefix"]
        + seconds["prefill_prefix_chunk_at_least_256"]
        + tile
        + seconds["prefill_context"] / limits.max_tokens_per_iteration
    )
    kv = min(
        seconds[f"{kind}_kv_{piece}"]
        for kind, pieces in (
            ("decode", ("to_4k", "to_16k", "to_64k", "to_256k", "above_256k")),
            ("mixed", ("to_8k", "to_32k", "to_128k", "to_256k", "above_256k")),
        )
        for piece in pieces
    )
    crossed = min(crossed, kv)
    return Attention(min(squared, kv - crossed), crossed, kv)


def least_by_tokens(timer: ProfileTimer, limits: EngineLimits) -> Floats:
    """Returns G, float64[budget + 1]: the least time of an iteration of exactly N tokens, without attention.

    Decodes only, where so many fit into the batch, or a batch with at least one prefill.
    """
    seconds = dict(zip(FEATURES, timer.model[HEADER : HEADER + FEATURE_COUNT].tolist(), strict=True))
    by_tokens = tokens_seconds(timer, limits)
    tokens = np.arange(by_tokens.size)
    one_prefill = seconds["prefill_requests"] + seconds["logits_to_64"]
    with_prefill = by_tokens + one_prefill + min(seconds["prefill_only_iteration"], seconds["mixed_iteration"])
    decodes = by_tokens.copy()
    for names, edges in (
        (("to_8", "to_32", "to_128", "above_128"), (0, 8, 32, 128, np.inf)),
        (("to_64", "to_128", "to_256", "above_256"), (0, 64, 128, 256, np.inf)),
    ):
        prefix = "decode_requests" if names[0] == "to_8" else "logits"
        for name, low, high in zip(names, edges[:-1], edges[1:], strict=True):
            decodes += seconds[f"{prefix}_{name}"] * np.clip(tokens - low, 0, high - low)
    decodes[limits.max_sequences + 1 :] = np.inf
    return np.asarray(np.minimum(with_prefill, decodes), np.float64)


def supporting_lines(least: Floats) -> list[Line]:
    """Returns the edges of the lower convex hull of (N, G(N)), and the steepest line through the origin.

    Any line below G that is best for some mix of tokens and iterations is one of them. O(budget).
    """
    hull: list[int] = []
    for n in range(1, least.size):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (least[b] - least[a]) * (n - a) < (least[n] - least[a]) * (b - a):
                break
            hull.pop()
        hull.append(n)
    lines = [Line(0.0, float((least[1:] / np.arange(1, least.size)).min()))]
    for a, b in pairwise(hull):
        rate = float((least[b] - least[a]) / (b - a))
        fixed = float(least[a] - rate * a)
        if rate >= 0.0 and fixed >= 0.0:
            lines.append(Line(fixed, rate))
    lines.append(Line(float(least[1:].min()), 0.0))
    return lines


def prefill_attention_seconds(prompt_tokens: Ints, costs: Attention, budget: int) -> Floats:
    """Returns the least that attention adds to the prefill of each prompt, whatever its chunks; float64[n]."""
    p = prompt_tokens.astype(np.float64)
    ends = [
        costs.chunk_squared * squares + costs.chunk_context * (p * p - squares) / 2
        for squares in (p, p * np.minimum(p, budget))
    ]
    return np.asarray(np.minimum(*ends), np.float64)


def window_shares(starts: Floats, ends: Floats) -> Floats:
    """Returns y of each request: 1 / the most windows that overlap anywhere in its own; float64[n]. O(n^2)."""
    edges = np.unique(np.concatenate([starts, ends]))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    live = np.zeros(edges.size + 1, np.int64)
    np.add.at(live, first, 1)
    np.add.at(live, last + 1, -1)
    live = np.cumsum(live)
    return np.array([1.0 / live[a : b + 1].max() for a, b in zip(first, last, strict=True)])
