"""Iterations drawn at random within what an engine can hold, to fit and test iteration time models.

Without the KV limit a few huge batches off the measured grids dominate every squared error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine_adapter.simulated.timing import IterationTimer
from slidingserve.contract.values import Floats, Ints

_SHORTEST_PREFILL = 2
_LONGEST_PREFIX = 8000
_LONGEST_CONTEXT = 16000


class Scenario(IntEnum):
    """What an iteration holds."""

    DECODE = 0
    PREFILL = 1
    MIXED = 2


@dataclass(frozen=True, slots=True)
class Batches:
    """Many iterations; iteration i is ``chunk[starts[i]:starts[i + 1]]`` with the same slice of ``context``."""

    chunk: Ints
    context: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        for low, high in zip(self.starts[:-1], self.starts[1:], strict=True):
            yield self.chunk[low:high], self.context[low:high]

    def seconds(self, timer: IterationTimer) -> Floats:
        """Returns the time of each iteration."""
        return np.array([timer.seconds(chunk, context, len(chunk)) for chunk, context in self])

    def total_tokens(self) -> Ints:
        """Returns the tokens computed in each iteration."""
        return np.add.reduceat(self.chunk, self.starts[:-1])

    def scenarios(self) -> Ints:
        """Returns each iteration's `Scenario`."""
        is_decode = ((self.chunk == 1) & (self.context > 0)).astype(np.int64)
        decodes = np.add.reduceat(is_decode, self.starts[:-1])
        requests = np.diff(self.starts)
        return np.where(decodes == requests, Scenario.DECODE, np.where(decodes == 0, Scenario.PREFILL, Scenario.MIXED))


def draw_batches(
    count: int, rng: np.random.Generator, *, kv_tokens: int, max_sequences: int = 256, max_tokens: int = 2048
) -> Batches:
    """Draws ``count`` iterations: a quarter decode-only, a quarter prefill-only, half mixed.

    Total tokens, decodes and mean contexts are log-uniform; those that exceed a limit are drawn again.
    """
    chunks: list[Ints] = []
    contexts: list[Ints] = []
    while len(chunks) < count:
        kind = len(chunks) % 4
        chunk, context = _draw(rng, kind != 0, kind != 1, max_sequences, max_tokens)
        fits = 0 < len(chunk) <= max_sequences and chunk.sum() <= max_tokens and (chunk + context).sum() <= kv_tokens
        if fits:
            chunks.append(chunk)
            contexts.append(context)
    starts = np.concatenate(([0], np.cumsum([len(c) for c in chunks]))).astype(np.int64)
    return Batches(np.concatenate(chunks), np.concatenate(contexts), starts)


def _draw(
    rng: np.random.Generator, prefills: bool, decodes: bool, max_sequences: int, max_tokens: int
) -> tuple[Ints, Ints]:
    chunk: list[int] = []
    context: list[int] = []
    if prefills:
        parts = 1 + int(rng.random() < 0.35) + int(rng.random() < 0.15)
        total = _log_uniform(rng, 16, max_tokens)
        cuts = np.sort(rng.integers(0, total, parts - 1))
        for size in np.diff([0, *cuts, total]):
            if size >= _SHORTEST_PREFILL:
                chunk.append(int(size))
                context.append(_log_uniform(rng, 16, _LONGEST_PREFIX) if rng.random() < 0.5 else 0)
    if decodes:
        number = _log_uniform(rng, 1, max_sequences)
        spread = rng.uniform(0.1, 0.9)
        drawn = _log_uniform(rng, 128, 4000) * np.exp(rng.normal(0.0, spread, number))
        chunk += [1] * number
        context += np.clip(drawn, 1, _LONGEST_CONTEXT).astype(np.int64).tolist()
    return np.array(chunk, np.int64), np.array(context, np.int64)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
