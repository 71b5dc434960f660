"""How long one engine iteration takes, in seconds.

`IterationTimer` is what the simulated engine asks. `ProfileTimer` answers from a fitted hardware profile; timers over
the measured kernel tables live in `evaluation.hardware`. Neither is the latency predictor under test; `ModelTimer` is,
for forecasts of engines of which nothing else is known.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine_adapter.simulated.profiles import FEATURES, HardwareProfile, TimingParameters
from predictor import features as predictor_features
from predictor.forecast import predicted_seconds
from predictor.model import LatencyModel
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

SHORTEST_SECONDS = 1e-4
"""What an iteration takes at least where a fitted line says less, or nothing, so that time goes on."""

_TILE_TOKENS = 64.0
_FEATURE_COUNT = len(FEATURES)
# Layout of the one array that a kernel gets (each further argument costs time in every call):
# parallel tiles, seconds per token beyond the table, table length, a coefficient per feature, the table.
_HEADER = 3
_TABLE = _HEADER + _FEATURE_COUNT


class IterationTimer(Protocol):
    """Iteration time of an engine."""

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        """Returns the duration of one iteration over the first ``count`` entries; 0.0 if there is none.

        ``chunk[i]`` tokens of a request are computed while ``context[i]`` of its tokens are in the KV cache. An entry
        with chunk 1 and context above 0 is a decode, as kernels see it; entries with chunk 0 take no part.
        """
        ...


class ProfileTimer:
    """Iteration time from a hardware profile; finite, positive, and non-decreasing in every context.

    One kernel call, O(count). Beyond what was measured (tokens in the iteration, requests, contexts) time goes on along
    its last slope. ``model`` is what `iteration_seconds` takes.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        self.model = pack(profile.parameters, profile.cpu_seconds_per_iteration)

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        """See `IterationTimer.seconds`; both arrays must be contiguous int64 of at least ``count`` entries."""
        return iteration_seconds(chunk, context, count, self.model)

    def warm_up(self) -> None:
        """Compiles the kernel (or loads it from the cache), so that the first iteration does not wait for it."""
        one = np.ones(1, np.int64)
        self.seconds(one, one, 1)


class ModelTimer:
    """Iteration time as a latency model predicts it, at least `SHORTEST_SECONDS`. O(count)."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model.pack()
        self._features = np.zeros(predictor_features.ROW)

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        """See `IterationTimer.seconds`; both arrays must be contiguous int64 of at least ``count`` entries."""
        predictor_features.batch_features(chunk, context, count, self._features)
        if self._features[predictor_features.TOKENS] == 0.0:
            return 0.0
        return max(SHORTEST_SECONDS, float(predicted_seconds(self._features, self._model)))


def token_table(parameters: TimingParameters) -> Floats:
    """Returns seconds of the linear layers by total tokens, index 0 to the last edge; index 0 is 0."""
    edges = parameters.token_edges
    table = np.zeros(edges[-1] + 1)
    for low, high, (start, end) in zip(edges[:-1], edges[1:], parameters.segment_seconds, strict=True):
        table[low + 1 : high + 1] = np.linspace(start, end, high - low)
    return table


def extrapolation_slope(table: Floats) -> float:
    """Seconds per token beyond the table: its mean slope over the upper half, as a single step would mislead."""
    half = len(table) // 2
    return max(0.0, float(table[-1] - table[half]) / (len(table) - 1 - half))


def pack(parameters: TimingParameters, constant_seconds: float = 0.0) -> Floats:
    """Returns the array that `iteration_seconds` takes; ``constant_seconds`` is added to every iteration."""
    table = token_table(parameters)
    slope = extrapolation_slope(table)
    table[1:] += constant_seconds
    header = (parameters.parallel_tiles, slope, float(len(table)))
    return np.concatenate((np.array(header), np.array(parameters.feature_seconds, np.float64), table))


@kernel
def iteration_seconds(chunk: Ints, context: Ints, count: int, model: Floats) -> float:
    """Returns table[total tokens] + coefficients . features; ``model`` comes from `pack`. O(count)."""
    features = np.empty(_FEATURE_COUNT, np.float64)
    tokens = batch_features(chunk, context, count, model[0], features)
    if tokens == 0:
        return 0.0
    length = int(model[2])
    if tokens < length:
        seconds = float(model[_TABLE + tokens])
    else:
        seconds = float(model[_TABLE + length - 1] + model[1] * (tokens - length + 1))
    for i in range(_FEATURE_COUNT):
        seconds += model[_HEADER + i] * features[i]
    return seconds


@kernel
def within(value: float, low: float, high: float) -> float:
    """Returns the part of ``value`` that lies between ``low`` and ``high``."""
    return min(max(value - low, 0.0), high - low)


@kernel
def batch_features(chunk: Ints, context: Ints, count: int, parallel_tiles: float, features: Floats) -> int:
    """Fills ``features`` (one per name in `FEATURES`, same order) and returns the total tokens. O(count).

    No feature falls when a context grows, so with coefficients >= 0 the iteration time does not either.
    """
    tokens = 0
    requests = 0.0
    decodes = 0.0
    decode_kv = 0.0
    longest = 0.0
    prefills = 0.0
    causal = prefix = prefix_256 = prefix_512 = prefill_context = context_2k = work = 0.0
    largest_prefix = largest_causal = largest_chunk = longest_tile = 0.0
    prefill_tokens = 0.0
    for i in range(count):
        if chunk[i] <= 0:
            continue
        c = float(chunk[i])
        x = float(context[i])
        tokens += chunk[i]
        requests += 1.0
        if chunk[i] == 1 and context[i] > 0:
            decodes += 1.0
            decode_kv += x
            longest = max(longest, x)
            continue
        prefills += 1.0
        prefill_tokens += c
        causal += c * c
        prefix += c * x
        prefix_256 += max(c, 256.0) * x
        prefix_512 += max(c - 512.0, 0.0) * x
        prefill_context += x
        context_2k += min(x, 2048.0)
        work += np.ceil(c / _TILE_TOKENS) * (x + 0.5 * c)
        largest_prefix = max(largest_prefix, c * x)
        largest_causal = max(largest_causal, c * c)
        largest_chunk = max(largest_chunk, c)
        longest_tile = max(longest_tile, x + c)
    mixed = 1.0 if decodes > 0.0 and prefills > 0.0 else 0.0
    alone = 1.0 if prefills == 0.0 else 0.0

    features[0] = alone * within(decodes, 0.0, 8.0)
    features[1] = alone * within(decodes, 8.0, 32.0)
    features[2] = alone * within(decodes, 32.0, 128.0)
    features[3] = alone * max(decodes - 128.0, 0.0)
    features[4] = alone * within(decode_kv, 0.0, 4096.0)
    features[5] = alone * within(decode_kv, 4096.0, 16384.0)
    features[6] = alone * within(decode_kv, 16384.0, 65536.0)
    features[7] = alone * within(decode_kv, 65536.0, 262144.0)
    features[8] = alone * max(decode_kv - 262144.0, 0.0)
    features[9] = alone * longest

    features[10] = mixed
    features[11] = mixed * within(decodes, 0.0, 32.0)
    features[12] = mixed * max(decodes - 32.0, 0.0)
    features[13] = mixed * within(decode_kv, 0.0, 8192.0)
    features[14] = mixed * within(decode_kv, 8192.0, 32768.0)
    features[15] = mixed * within(decode_kv, 32768.0, 131072.0)
    features[16] = mixed * within(decode_kv, 131072.0, 262144.0)
    features[17] = mixed * max(decode_kv - 262144.0, 0.0)
    features[18] = mixed * longest
    features[19] = mixed * max(longest, longest_tile)
    features[20] = mixed * max(longest, longest_tile, (decode_kv + work) / parallel_tiles)
    features[21] = mixed * max(decode_kv, work)
    features[22] = mixed * decodes * min(largest_chunk, 64.0)
    features[23] = mixed * decodes * min(largest_chunk, 256.0)
    features[24] = mixed * decode_kv * min(prefill_tokens, 512.0)

    features[25] = prefills
    features[26] = 1.0 if decodes == 0.0 else 0.0
    features[27] = causal
    features[28] = prefix
    features[29] = prefix_256
    features[30] = prefix_512
    features[31] = prefill_context
    features[32] = context_2k
    features[33] = work
    features[34] = largest_prefix
    features[35] = largest_causal

    features[36] = within(requests, 0.0, 64.0)
    features[37] = within(requests, 64.0, 128.0)
    features[38] = within(requests, 128.0, 256.0)
    features[39] = max(requests - 256.0, 0.0)
    return tokens
