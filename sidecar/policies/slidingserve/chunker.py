"""SlidingChunker (Algorithm 1): how many tokens this iteration computes, seen together with the next one.

``T_cur`` is what the safe decodes leave to this iteration, ``T_next`` what they leave to the next; each buys a budget
(TimeToBudget), and the sum of both is split so that the two iterations together take the least time.

Budgets count all tokens of an iteration, decodes included.
"""

from __future__ import annotations

from typing import Any

from predictor.features import CONTEXT, DECODE_CONTEXT, DECODES, TOKENS, clear
from predictor.forecast import features_between, fill_seconds, predicted_seconds, time_to_budget
from sidecar.policies.common.sorting import FAR_SECONDS
from sidecar.policies.slidingserve.workspace import Workspace
from slidingserve.contract.values import Floats
from slidingserve.jit import kernel

_SAME_SECONDS = 1e-12  # rounding of a sum of predictions


@kernel
def choose_budget(work: Workspace, rows: int, rules: Any, facts: Any, model: Floats) -> float:
    """Returns the budget of this iteration; at least the decodes. O(budget / step + rows), plus the search."""
    now, settled = budget_now(work, rows, rules, facts, model)
    if settled or rules.window == 1:
        return now
    decodes: float = work.fill[0, TOKENS]
    highest = highest_budget(decodes, rules)
    right = now if rules.clamp_chunk else highest
    both = now + budget_within(facts.slack_seconds[1], highest, work, rows, rules, model)
    if rules.clamp_budget_sum:
        both = min(both, facts.prompt_tokens + 2.0 * decodes)  # the decodes run in both iterations
    left = decodes
    if rules.cap_next_budget:
        left = min(max(left, both - highest), right)
    budget = least_time(work, rows, left, right, both, rules, model)
    if rules.clamp_chunk:  # fewer tokens may take longer than more of them
        seconds = fill_seconds(work.fill, rows, budget, work.scratch, model)
        if seconds * rules.safety > facts.slack_seconds[0]:
            return now
    return budget


@kernel
def budget_now(work: Workspace, rows: int, rules: Any, facts: Any, model: Floats) -> tuple[float, bool]:
    """Returns what T_cur buys, B at most, and whether there is nothing to weigh: nobody waits, or everything fits."""
    decodes: float = work.fill[0, TOKENS]
    everything = decodes + facts.prompt_tokens
    highest = highest_budget(decodes, rules)
    if facts.slack_seconds[0] >= FAR_SECONDS:  # nobody waits for his next token
        return min(highest, everything), True
    now = budget_within(facts.slack_seconds[0], highest, work, rows, rules, model)
    return now, rules.take_all_that_fits and everything <= now


@kernel
def highest_budget(decodes: float, rules: Any) -> float:
    """Returns B, raised so that a cap below the number of decodes does not stop every prompt for good."""
    highest: float = max(float(rules.budget), min(decodes + rules.step_tokens, float(rules.limit)))
    return highest


@kernel
def budget_within(seconds: float, highest: float, work: Workspace, rows: int, rules: Any, model: Floats) -> float:
    """Returns TimeToBudget of a time, with the safety factor; see `predictor.forecast.time_to_budget`."""
    budget: float = time_to_budget(
        seconds / rules.safety, highest, rules.step_tokens, work.fill, rows, work.scratch, model
    )
    return budget


@kernel
def least_time(work: Workspace, rows: int, left: float, right: float, both: float, rules: Any, model: Floats) -> float:
    """Ternary search (Algorithm 1) for the budget b in [left, right] that makes T(b) + T(both - b) least.

    The ends and the middle of the last interval are compared; ties go to the larger budget. O(log budget) predictions.
    """
    first = low = int(left)
    last = high = int(right)
    while high - low > rules.tolerance_tokens:
        third = (high - low) // 3
        left_seconds = split_seconds(work, rows, low + third, both, rules, model)
        if left_seconds <= split_seconds(work, rows, high - third, both, rules, model) + _SAME_SECONDS:
            high = high - third - 1
        else:
            low = low + third + 1
    best = first
    least = split_seconds(work, rows, first, both, rules, model)
    for budget in ((low + high) // 2, last):
        seconds = split_seconds(work, rows, budget, both, rules, model)
        if seconds <= least + _SAME_SECONDS:
            best = budget
            least = min(seconds, least)
    return float(best)


@kernel
def split_seconds(work: Workspace, rows: int, budget: float, both: float, rules: Any, model: Floats) -> float:
    """Returns the predicted time of this iteration with ``budget`` tokens and the next with the rest of ``both``."""
    this = fill_seconds(work.fill, rows, budget, work.scratch, model)
    decodes: float = work.fill[0, TOKENS]
    rest = both - budget
    if rest < decodes:
        if not rules.clamp_next_budget:
            return this + part_of_decodes_seconds(work, rest, model)
        rest = decodes
    if not rules.advance_queue:
        return this + fill_seconds(work.fill, rows, rest, work.scratch, model)
    after = budget + rest - decodes
    features_between(work.fill, rows, budget, after, rules.expected_decodes, work.scratch)
    return this + predicted_seconds(work.scratch, model)


@kernel
def part_of_decodes_seconds(work: Workspace, budget: float, model: Floats) -> float:
    """Returns the predicted time of as many decodes as a budget below their number holds; 0 for none or fewer.

    What the published Pred comes to where it is not defined: a forward simulator that hands out a budget like vLLM.
    """
    share = max(budget, 0.0) / work.fill[0, TOKENS] if work.fill[0, TOKENS] > 0.0 else 0.0
    clear(work.scratch)
    for column in (TOKENS, CONTEXT, DECODES, DECODE_CONTEXT):
        work.scratch[column] = share * work.fill[0, column]
    return predicted_seconds(work.scratch, model)
