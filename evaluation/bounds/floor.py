"""The least that an iteration can take, given only a part of what is in it.

An iteration's time is not monotone: one token more may fill a GEMM tile and make it faster, and an iteration with a
prefill is timed by other features than one of decodes only. A bound must therefore not use the time of a part of a
batch, but the least time of any batch with that part in it. It is found from two facts about profiles (all
coefficients are >= 0): no feature falls when entries of a kind that is already there are added or grow; and there are
three kinds of batches (decodes only, prefills only, mixed), each tried with the smallest entry of what it lacks.
"""

from __future__ import annotations

import numpy as np

from engine_adapter.simulated.profiles import FEATURES
from engine_adapter.simulated.timing import ProfileTimer, batch_features, within
from slidingserve.contract.values import EngineLimits, Floats, Ints
from slidingserve.jit import kernel

UNSURE = -1
"""Context of an entry of at least one token that may be a decode or a prefill."""

FEATURE_COUNT = len(FEATURES)
LOGITS = FEATURES.index("logits_to_64")
HEADER = 3  # of the packed model: parallel tiles, slope beyond the table, length of the table


def tokens_seconds(timer: ProfileTimer, limits: EngineLimits) -> Floats:
    """Returns the part of an iteration's time that depends on its tokens alone, float64[budget + 1]; index 0 is 0."""
    model, budget = timer.model, limits.max_tokens_per_iteration
    length, table = int(model[2]), model[HEADER + FEATURE_COUNT :]
    seconds = np.zeros(budget + 1)
    inside = min(length, budget + 1)
    seconds[:inside] = table[:inside]
    seconds[inside:] = table[-1] + model[1] * np.arange(1, budget + 2 - inside)
    seconds[0] = 0.0
    return seconds


def cheapest_seconds(timer: ProfileTimer, limits: EngineLimits) -> Floats:
    """Returns, for each number of tokens, the least `tokens_seconds` of that many or more; index 0 is 0. O(budget)."""
    seconds = tokens_seconds(timer, limits)
    seconds[1:] = np.minimum.accumulate(seconds[:0:-1])[::-1]
    return seconds


@kernel
def cover_seconds(tokens: int, cheapest: Floats) -> Floats:
    """Returns the least time of iterations that hold 0 .. ``tokens`` tokens in all, float64[tokens + 1].

    Iterations follow one another, each takes at least ``cheapest`` of its tokens: cover[r] = min over t of cheapest[t]
    + cover[r - t]. O(tokens x budget).
    """
    cover = np.zeros(tokens + 1)
    budget = len(cheapest) - 1
    for wanted in range(1, tokens + 1):
        best = np.inf
        for taken in range(1, min(wanted, budget) + 1):
            best = min(best, cheapest[taken] + cover[wanted - taken])
        cover[wanted] = best
    return cover


@kernel
def floor_seconds(
    chunk: Ints, context: Ints, count: int, model: Floats, cheapest: Floats, part: tuple[Ints, Ints], features: Floats
) -> float:
    """Returns the least time of any iteration that holds at least these entries; 0 if there is none.

    Args:
        chunk: int64[count], each entry has at least so many tokens, 1 or more.
        context: int64[count], and at least so many of its tokens in the KV cache; `UNSURE` for an entry of which only
            its one token is known. As for `IterationTimer`, chunk 1 and context above 0 is a decode: one that has more
            in truth must be given as `UNSURE`.
        count: entries.
        model: as `timing.pack` makes it.
        cheapest: see `cheapest_seconds`.
        part: scratch, two int64[at least count + 2].
        features: scratch, float64[FEATURE_COUNT].

    Infinite if no batch within the token budget can hold them. O(count).
    """
    if count == 0:
        return 0.0
    known, tokens, decodes = 0, 0, 0
    for i in range(count):
        if context[i] == UNSURE:
            continue
        part[0][known], part[1][known] = chunk[i], context[i]
        known += 1
        tokens += chunk[i]
        if chunk[i] == 1 and context[i] > 0:
            decodes += 1
    best = np.inf
    for kind in range(3):  # decodes only, prefills only, mixed
        if (kind == 0 and decodes < known) or (kind == 1 and decodes > 0):
            continue
        size = known
        if kind != 1 and decodes == 0:
            part[0][size], part[1][size] = 1, 1
            size += 1
        if kind != 0 and decodes == known:
            part[0][size], part[1][size] = 1, 0
            size += 1
        # Entries of which nothing else is known may be those that the kind lacks.
        others = max(size - known, count - known)
        if tokens + others >= len(cheapest):
            continue
        batch_features(part[0], part[1], size, model[0], features)
        requests = float(known + others)
        features[LOGITS] = within(requests, 0.0, 64.0)
        features[LOGITS + 1] = within(requests, 64.0, 128.0)
        features[LOGITS + 2] = within(requests, 128.0, 256.0)
        features[LOGITS + 3] = max(requests - 256.0, 0.0)
        seconds = cheapest[tokens + others]
        for i in range(len(features)):
            seconds += model[HEADER + i] * features[i]
        best = min(best, seconds)
    return best
