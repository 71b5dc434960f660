"""The predictor's kernels alone: one prediction, and TimeToBudget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evaluation.bench.loads import LONGEST_PROMPT, SHORTEST_PROMPT
from evaluation.bench.states import MOST_TOKENS
from evaluation.results import Tail, tail
from predictor.features import add_decode
from predictor.forecast import FILL_ROW, append_prompt, fill_seconds, time_to_budget
from predictor.model import LatencyModel
from slidingserve.contract.values import Floats
from slidingserve.jit import kernel

STEP_TOKENS = 16
DECODES = 128
CALLS = 500
_CONTEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Seconds of one call inside compiled code: p50 and p99 over blocks of CALLS calls.

    Attributes:
        prediction: T of one budget of a fill.
        time_to_budget: of MOST_TOKENS tokens in steps of STEP_TOKENS, half of which are looked at.
        time_to_budget_all: the longest one, which finds that nothing fits.
        python_call: a call from Python of one that fits at once: nearly all of it is the way in and out.
    """

    prediction: Tail
    time_to_budget: Tail
    time_to_budget_all: Tail
    python_call: Tail


def measure_kernels(model: LatencyModel, blocks: int) -> KernelCost:
    """Times the kernels on DECODES decodes and prompts of random length that make up MOST_TOKENS and more."""
    packed = model.pack()
    fill, rows = realistic_fill()
    scratch = np.zeros(fill.shape[1])
    # A limit that half of the budgets keep to.
    half = fill_seconds(fill, rows, 0.5 * (MOST_TOKENS + DECODES), scratch, packed)

    def time_of(limit_seconds: float) -> Tail:
        return _block_seconds(
            blocks, lambda: repeat_time_to_budget(CALLS, limit_seconds, MOST_TOKENS, fill, rows, scratch, packed)
        )

    def from_python() -> None:
        for _ in range(CALLS):
            time_to_budget(1e9, float(MOST_TOKENS), STEP_TOKENS, fill, rows, scratch, packed)

    return KernelCost(
        prediction=_block_seconds(
            blocks, lambda: repeat_prediction(CALLS, float(MOST_TOKENS), fill, rows, scratch, packed)
        ),
        time_to_budget=time_of(half),
        time_to_budget_all=time_of(0.0),
        python_call=_block_seconds(blocks, from_python),
    )


def realistic_fill() -> tuple[Floats, int]:
    """Returns a fill of DECODES decodes and prompts up to twice MOST_TOKENS, and how many prompts there are."""
    random = np.random.default_rng(0)
    prompts: list[int] = []
    while sum(prompts) < 2 * MOST_TOKENS:
        prompts.append(int(random.integers(SHORTEST_PROMPT, LONGEST_PROMPT)))
    fill = np.zeros((len(prompts) + 1, FILL_ROW))
    for _ in range(DECODES):
        add_decode(fill[0], 1.0, float(_CONTEXT_TOKENS))
    for row, tokens in enumerate(prompts):
        append_prompt(fill, row, float(tokens), 0.0)
    return fill, len(prompts)


@kernel
def repeat_time_to_budget(
    calls: int, limit_seconds: float, highest: int, fill: Floats, rows: int, scratch: Floats, model: Floats
) -> float:
    """Calls TimeToBudget so many times; the sum of the answers keeps the compiler from leaving any out."""
    total = 0.0
    for _ in range(calls):
        total += time_to_budget(limit_seconds, float(highest), STEP_TOKENS, fill, rows, scratch, model)
    return total


@kernel
def repeat_prediction(calls: int, highest: float, fill: Floats, rows: int, scratch: Floats, model: Floats) -> float:
    """Predicts so many budgets, a different one each time; returns the sum of the predictions."""
    total = 0.0
    for number in range(calls):
        total += fill_seconds(fill, rows, highest - number, scratch, model)
    return total


def _block_seconds(blocks: int, block: Callable[[], object]) -> Tail:
    """Returns the seconds of one of the CALLS calls that a block makes, over so many blocks."""
    block()  # compile
    seconds = np.zeros(blocks)
    for number in range(blocks):
        started = time.perf_counter()
        block()
        seconds[number] = (time.perf_counter() - started) / CALLS
    return tail(seconds)
