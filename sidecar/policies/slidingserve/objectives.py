"""What the paper leaves open in its chunker, for ablations: the most tokens instead of the least time, longer windows.

`choose_most_tokens` is what the paper's Figure 1 shows, and Algorithm 1 does not compute. `choose_over_window` looks
three or four iterations ahead: T_j is what the safe decodes leave to iteration j, B_j = TimeToBudget(T_j), and the sum
of all B_j (no more than there is) is split so that the iterations together take the least predicted time, each within
its own B_j, the queue advanced from one to the next. Exact over cells of 64 prompt tokens (more where the window holds
more than 64 cells).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.features import TOKENS
from predictor.forecast import features_between, fill_seconds, predicted_seconds
from sidecar.policies.slidingserve.chunker import budget_now, budget_within, highest_budget
from sidecar.policies.slidingserve.workspace import Workspace
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

_CELL_TOKENS = 64.0
_MOST_CELLS = 64.0


@kernel
def choose_over_window(work: Workspace, rows: int, rules: Any, facts: Any, model: Floats) -> float:
    """Returns the budget of this iteration in a window of ``rules.window``; greedy where no split in cells exists.

    O(window x cells^2) predictions for at most 64 cells.
    """
    right, settled = budget_now(work, rows, rules, facts, model)
    if settled:
        return right
    decodes: float = work.fill[0, TOKENS]
    budgets = np.empty(rules.window)
    budgets[0] = right - decodes
    highest = highest_budget(decodes, rules)
    for j in range(1, rules.window):
        budgets[j] = budget_within(facts.slack_seconds[j], highest, work, rows, rules, model) - decodes
    total = min(budgets.sum(), facts.prompt_tokens)
    cell = max(_CELL_TOKENS, np.ceil(total / _MOST_CELLS))
    limits = (budgets / cell).astype(np.int64)
    cells = min(limits.sum(), int(total / cell))
    if cells == 0:
        return right
    budget: float = decodes + cell * _first_part(work, rows, cell, cells, limits, rules, model)
    seconds = fill_seconds(work.fill, rows, budget, work.scratch, model)
    return right if seconds * rules.safety > facts.slack_seconds[0] else budget  # fewer tokens may take longer


@kernel
def _first_part(work: Workspace, rows: int, cell: float, cells: int, limits: Ints, rules: Any, model: Floats) -> int:
    """Returns how many of ``cells`` cells the first iteration takes in the split of least time; ties: the most."""
    decodes: float = work.fill[0, TOKENS]
    later = np.full(cells + 1, np.inf)  # least time of the iterations after j, by the cells done before them
    later[cells] = 0.0
    first = 0
    for j in range(len(limits) - 1, -1, -1):
        least = np.full(cells + 1, np.inf)
        for start in range(cells + 1 if j > 0 else 1):
            for stop in range(start, min(start + limits[j], cells) + 1):
                low, high = decodes + start * cell, decodes + stop * cell
                features_between(work.fill, rows, low, high, rules.expected_decodes, work.scratch)
                seconds = predicted_seconds(work.scratch, model) + later[stop]
                if seconds <= least[start]:
                    least[start] = seconds
                    first = stop
        later = least
    return first


@kernel
def choose_most_tokens(work: Workspace, rows: int, rules: Any, facts: Any, model: Floats) -> float:
    """Returns the budget that, with what the next iteration can then hold, computes the most tokens in both.

    Maximises b + b' with T(b) <= T_cur and T(b) + T(b') <= T_cur + T_next, the queue advanced in between. Every fourth
    step is looked at; ties go to the larger b. O((budget / step)^2 / 4) predictions.
    """
    right, settled = budget_now(work, rows, rules, facts, model)
    if settled:
        return right
    decodes: float = work.fill[0, TOKENS]
    together = (facts.slack_seconds[0] + facts.slack_seconds[1]) / rules.safety
    best = decodes
    most = -1.0
    budget = right
    while budget >= decodes:
        seconds = fill_seconds(work.fill, rows, budget, work.scratch, model)
        after = _budget_after(work, rows, budget, together - seconds, rules, model)
        if after > most:
            best, most = budget, after
        if budget == decodes:
            break
        stride = 4 * rules.step_tokens
        budget = max(decodes, float(((int(budget) - 1) // stride) * stride))
    return best


@kernel
def _budget_after(work: Workspace, rows: int, budget: float, seconds: float, rules: Any, model: Floats) -> float:
    """Returns the furthest that the fill comes if the iteration after ``budget`` may take ``seconds``."""
    decodes: float = work.fill[0, TOKENS]
    after: float = min(work.fill[rows, TOKENS], budget + highest_budget(decodes, rules) - decodes)
    while after > budget:
        features_between(work.fill, rows, budget, after, rules.expected_decodes, work.scratch)
        if predicted_seconds(work.scratch, model) <= seconds:
            return after
        after -= rules.step_tokens
    return budget
