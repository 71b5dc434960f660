"""How long an iteration takes, and what fits into a time: the kernels that policies decide with.

Every prediction is ``table[total tokens] + intercept + w . (x1 .. x7)``, with an intercept and weights for each
scenario. The paper's model has a table of zeros; a model that knows the staircase of real GEMMs has not.

A fill is a base (the decodes, which always run) and prompts in the order in which a budget is spent on them, float64
[prompts + 1, 10]: the first 8 columns of row k are the features of the base and the first k prompts in full, the last
two are missing tokens and context of prompt k. A budget counts all tokens, those of the base included.
"""

from __future__ import annotations

from predictor.features import (
    CONTEXT,
    DECODE_CONTEXT,
    DECODES,
    ROW,
    TOKENS,
    add_chunk,
    scenario_of,
)
from slidingserve.contract.values import Floats
from slidingserve.jit import kernel

MISSING = ROW
PROMPT_CONTEXT = ROW + 1
FILL_ROW = ROW + 2

# Layout of a packed model (see `predictor.model.LatencyModel.pack`).
TABLE_LENGTH = 0
SECONDS_PER_TOKEN_BEYOND = 1
EXPERTS = 2  # three times: intercept, w1 .. w7
TABLE = EXPERTS + 3 * ROW


@kernel
def predicted_seconds(features: Floats, model: Floats) -> float:
    """Returns T(batch) of a row of features; 0 for an empty one. O(1)."""
    tokens = features[TOKENS]
    if tokens <= 0.0:
        return 0.0
    expert = EXPERTS + ROW * scenario_of(features)
    seconds: float = model[expert]
    for column in range(1, ROW):
        seconds += model[expert + column] * features[column]
    beyond = tokens - (model[TABLE_LENGTH] - 1.0)
    if beyond > 0.0:
        seconds += model[TABLE + int(model[TABLE_LENGTH]) - 1] + beyond * model[SECONDS_PER_TOKEN_BEYOND]
    else:
        seconds += model[TABLE + int(tokens)]
    return seconds


@kernel
def append_prompt(fill: Floats, row: int, tokens: float, context: float) -> None:
    """Puts a prompt at place ``row`` of a fill, whose features up to it must be there."""
    fill[row, MISSING] = tokens
    fill[row, PROMPT_CONTEXT] = context
    for column in range(ROW):
        fill[row + 1, column] = fill[row, column]
    add_chunk(fill[row + 1], tokens, context)


@kernel
def row_of_budget(fill: Floats, rows: int, budget: float) -> int:
    """Returns how many prompts a budget completes. O(log rows)."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high + 1) // 2
        if fill[middle, TOKENS] <= budget:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def features_at(fill: Floats, rows: int, row: int, budget: float, features: Floats) -> None:
    """Fills the row of features of a fill up to ``budget``, which completes ``row`` prompts. O(1)."""
    for column in range(ROW):
        features[column] = fill[row, column]
    left = budget - fill[row, TOKENS]
    if row < rows and left > 0.0:
        add_chunk(features, min(left, fill[row, MISSING]), fill[row, PROMPT_CONTEXT])


@kernel
def fill_seconds(fill: Floats, rows: int, budget: float, features: Floats, model: Floats) -> float:
    """Returns T of the fill up to ``budget`` tokens, the base at least; leaves its features. O(log rows)."""
    features_at(fill, rows, row_of_budget(fill, rows, budget), budget, features)
    return predicted_seconds(features, model)


@kernel
def time_to_budget(
    limit_seconds: float,
    highest: float,
    step: int,
    fill: Floats,
    rows: int,
    features: Floats,
    model: Floats,
) -> float:
    """Returns the largest budget of at most ``highest`` tokens that is predicted to take at most ``limit_seconds``.

    Looked at are ``highest`` (or all tokens there are, if fewer) and every multiple of ``step`` total tokens below it,
    from the top: T is no monotone function of the budget where the table has steps or where the scenario changes, so a
    bisection could miss it. If none fits the answer is the base, whatever that takes.

    O(rows + highest / step); about 1 us for 2048 tokens in steps of 16.
    """
    base: float = fill[0, TOKENS]
    budget: float = min(highest, fill[rows, TOKENS])
    row = rows
    while budget > base:
        while fill[row, TOKENS] > budget:
            row -= 1
        features_at(fill, rows, row, budget, features)
        if predicted_seconds(features, model) <= limit_seconds:
            return budget
        budget = float(((int(budget) - 1) // step) * step)
    return base


@kernel
def features_between(fill: Floats, rows: int, low: float, high: float, new_decodes: bool, features: Floats) -> None:
    """Fills the features of the iteration after one of ``low`` tokens: the base again, and prompts up to ``high``.

    Both are budgets of the fill (the base counted once). What the first iteration computed of a prompt is context in
    the second. With ``new_decodes`` the prompts that it completed decode in the second. O(log rows + prompts between).
    """
    for column in range(ROW):
        features[column] = fill[0, column]
    row = row_of_budget(fill, rows, low)
    if new_decodes and row > 0:
        decoding = fill[row, TOKENS] + fill[row, CONTEXT] - fill[0, TOKENS] - fill[0, CONTEXT]
        features[TOKENS] += row
        features[DECODES] += row
        features[CONTEXT] += decoding
        features[DECODE_CONTEXT] += decoding
    done = max(low - fill[row, TOKENS], 0.0)
    left = high - low
    while row < rows and left > 0.0:
        tokens = min(fill[row, MISSING] - done, left)
        if tokens > 0.0:
            add_chunk(features, tokens, fill[row, PROMPT_CONTEXT] + done)
        left -= tokens
        done = 0.0
        row += 1
