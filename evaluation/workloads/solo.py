"""What a prompt takes alone on an idle engine: the yardstick of relative SLOs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from engine_adapter.simulated.timing import IterationTimer
from evaluation.workloads.checks import WorkloadError
from slidingserve.contract.values import Floats, Ints

SOLO_CHUNK_TOKENS = 2048

SoloTtft: TypeAlias = Callable[[Ints], Floats]
"""Prompt tokens int64[n] to the seconds that their prefill takes alone on an idle engine, float64[n]."""


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


def checked_solo(solo_ttft_seconds: SoloTtft, prompt_tokens: Ints) -> Floats:
    """Returns the solo TTFT of each prompt; raises WorkloadError unless all are finite and above 0."""
    alone = solo_ttft_seconds(prompt_tokens)
    bad = np.flatnonzero(~(np.isfinite(alone) & (alone > 0)))
    if bad.size:
        worst = bad[0]
        raise WorkloadError(
            f"solo TTFT of a prompt of {prompt_tokens[worst]} tokens is {alone[worst]} s; "
            "the hardware profile must give a time above 0"
        )
    return alone
