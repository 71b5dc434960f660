"""The features of one iteration that its duration is predicted from.

They are those of SlidingServe's predictor (arXiv 2606.05933). An iteration is a set of (c, u): c tokens of a request
are computed while u of its tokens are in the KV cache. D, the decodes, are those with c <= 1; P, the prefills, the
others (so the last chunk of a prompt, if it is a single token, counts as a decode, for training and prediction alike).

A row of features is float64[8]: the total tokens, then the paper's x1 to x7. A decode that carries draft tokens is
added by `add_decode`, with x4 counting its tokens.
"""

from __future__ import annotations

from enum import IntEnum

from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

TOKENS = 0  # sum c over all
PREFILL_WORK = 1  # x1 = sum over P of c (u + c)
PREFILL_SQUARES = 2  # x2 = sum over P of c^2
CONTEXT = 3  # x3 = sum over all of u
DECODES = 4  # x4 = |D|
DECODE_CONTEXT = 5  # x5 = sum over D of u
PREFILL_TOKENS = 6  # x6 = sum over P of c
LONGEST_CHUNK = 7  # x7 = max over P of c
ROW = 8

FEATURES = (
    "prefill_work",
    "prefill_squares",
    "context",
    "decodes",
    "decode_context",
    "prefill_tokens",
    "longest_chunk",
)
"""Names of x1 to x7, as model files write them."""


class Scenario(IntEnum):
    """What an iteration holds; each has an expert of its own."""

    DECODE = 0
    PREFILL = 1
    MIXED = 2


@kernel
def scenario_of(features: Floats) -> int:
    """Returns the `Scenario` of a row of features."""
    if features[PREFILL_TOKENS] == 0.0:
        return 0
    return 1 if features[DECODES] == 0.0 else 2


@kernel
def clear(features: Floats) -> None:
    """Makes a row that of an empty iteration."""
    for column in range(ROW):
        features[column] = 0.0


@kernel
def add_decode(features: Floats, tokens: float, context: float) -> None:
    """Adds a decode: one token, or one and its draft tokens."""
    features[TOKENS] += tokens
    features[CONTEXT] += context
    features[DECODES] += tokens
    features[DECODE_CONTEXT] += context


@kernel
def add_chunk(features: Floats, tokens: float, context: float) -> None:
    """Adds ``tokens`` > 0 tokens of a prompt."""
    if tokens <= 1.0:
        add_decode(features, tokens, context)
        return
    features[TOKENS] += tokens
    features[CONTEXT] += context
    features[PREFILL_WORK] += tokens * (context + tokens)
    features[PREFILL_SQUARES] += tokens * tokens
    features[PREFILL_TOKENS] += tokens
    features[LONGEST_CHUNK] = max(features[LONGEST_CHUNK], tokens)


@kernel
def batch_features(chunk: Ints, context: Ints, count: int, features: Floats) -> None:
    """Fills the row of the iteration of the first ``count`` entries; those without tokens take no part. O(count)."""
    clear(features)
    for i in range(count):
        if chunk[i] > 0:
            add_chunk(features, chunk[i], context[i])
