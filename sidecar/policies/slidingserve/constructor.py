"""BatchConstructor (Algorithm 2): which prompts finish in this batch, when a full batch would make some of them late.

For each prompt a at risk (anchor): the budget that its slack buys, less the decodes and a itself, is the capacity of a
0/1 knapsack over the prompts that can wait at least as long as a. Their value (equation 18) is
``1 / (s / sum of s + r / sum of r)``: little slack and few tokens are worth much. Of all anchors' batches the one with
the most requests completed wins, then the most value, then the most tokens.
"""

from __future__ import annotations

from typing import Any

from predictor.features import ROW, TOKENS, add_chunk
from predictor.forecast import predicted_seconds
from sidecar.policies.slidingserve.chunker import budget_within, highest_budget
from sidecar.policies.slidingserve.workspace import Workspace
from slidingserve.contract.values import Floats
from slidingserve.jit import kernel


@kernel
def construct(
    work: Workspace, kept: int, rows: int, risks: int, rules: Any, facts: Any, model: Floats
) -> tuple[int, float]:
    """Marks the prompts of the best batch as chosen; returns (how many, its budget); 0 if no anchor can be saved.

    O(anchors x (kept + candidates x capacity / knapsack step)), plus a TimeToBudget for each anchor.
    """
    best_count = 0
    best_value = 0.0
    best_tokens = 0
    best_budget = 0.0
    for risk in range(risks):
        anchor = work.lines[risk].risk
        candidates, capacity, budget, own_value = gather(work, kept, rows, anchor, rules, facts, model)
        if capacity < 0:
            continue
        pack(work, candidates, capacity // rules.knapsack_step_tokens)
        if rules.recheck_batch:
            limit_seconds = anchor_seconds(work, anchor, rules, facts) / rules.safety
            if not keep_within(work, anchor, candidates, limit_seconds, model):
                continue
        count, value, tokens = total_of(work, candidates)
        count += 1
        value += own_value
        tokens += work.pool[work.lines[anchor].row].remaining
        if is_better(count, value, tokens, best_count, best_value, best_tokens):
            for place in range(kept):
                work.pool[work.lines[place].row].chosen = place == anchor
            for position in range(candidates):
                if work.lines[position].weight < 0:  # taken, see `pack`
                    work.pool[work.lines[work.lines[position].member].row].chosen = True
            best_count, best_value, best_tokens, best_budget = count, value, tokens, budget
    return best_count, best_budget


@kernel
def is_better(count: int, value: float, tokens: int, best_count: int, best_value: float, best_tokens: int) -> bool:
    """Compares two batches: requests completed, then value, then tokens."""
    if count != best_count:
        return count > best_count
    if value != best_value:
        return value > best_value
    return tokens > best_tokens


@kernel
def gather(
    work: Workspace, kept: int, rows: int, anchor: int, rules: Any, facts: Any, model: Floats
) -> tuple[int, int, float, float]:
    """Lists the knapsack of one anchor in the columns ``member``, ``weight`` and ``value``.

    Returns (candidates, capacity in tokens without the anchor, budget, the anchor's own value); a capacity below 0
    means that the anchor cannot be saved. O(kept), plus a TimeToBudget.
    """
    chosen = work.pool[work.lines[anchor].row]
    seconds = anchor_seconds(work, anchor, rules, facts)
    decodes: float = work.fill[0, TOKENS]
    budget = budget_within(seconds, highest_budget(decodes, rules), work, rows, rules, model)
    capacity = int(budget - decodes)
    if capacity <= 0 or chosen.remaining > capacity:
        return 0, -1, budget, 0.0
    capacity -= chosen.remaining
    slack_sum = chosen.slack if rules.anchor_in_sums else 0.0
    token_sum = float(chosen.remaining) if rules.anchor_in_sums else 0.0
    most = len(work.best) - 1
    count = 0
    for place in range(kept):
        prompt = work.pool[work.lines[place].row]
        if place == anchor or prompt.slack < chosen.slack or not prompt.whole:
            continue
        slack_sum += prompt.slack
        token_sum += prompt.remaining
        if count < most and prompt.remaining <= capacity:
            work.lines[count].member = place
            count += 1
    for position in range(count):
        prompt = work.pool[work.lines[work.lines[position].member].row]
        step = rules.knapsack_step_tokens
        work.lines[position].weight = (prompt.remaining + step - 1) // step
        work.lines[position].value = value_of(prompt.slack, prompt.remaining, slack_sum, token_sum)
    own = value_of(chosen.slack, chosen.remaining, slack_sum, token_sum) if rules.anchor_in_sums else 0.0
    return count, capacity, budget, own


@kernel
def anchor_seconds(work: Workspace, anchor: int, rules: Any, facts: Any) -> float:
    """Returns how long a batch around an anchor may take."""
    seconds: float = work.pool[work.lines[anchor].row].slack
    return min(seconds, facts.slack_seconds[0]) if rules.anchor_within_tbt else seconds


@kernel
def keep_within(work: Workspace, anchor: int, count: int, limit_seconds: float, model: Floats) -> bool:
    """Gives back what was taken, the least value first, until the batch is predicted to be in time.

    Returns whether the anchor at least is. O(count) for each that is given back, and once more.
    """
    while True:
        for column in range(ROW):
            work.scratch[column] = work.fill[0, column]
        prompt = work.pool[work.lines[anchor].row]
        add_chunk(work.scratch, prompt.remaining, prompt.context)
        least = -1
        for item in range(count):
            if work.lines[item].weight < 0:
                prompt = work.pool[work.lines[work.lines[item].member].row]
                add_chunk(work.scratch, prompt.remaining, prompt.context)
                if least < 0 or work.lines[item].value < work.lines[least].value:
                    least = item
        if predicted_seconds(work.scratch, model) <= limit_seconds:
            return True
        if least < 0:
            return False
        work.lines[least].weight = -work.lines[least].weight


@kernel
def value_of(slack: float, remaining: float, slack_sum: float, token_sum: float) -> float:
    """Returns v = 1 / (s / sum of s + r / sum of r)."""
    share = slack / slack_sum + remaining / token_sum
    return 1.0 / share if share > 0.0 else 0.0


@kernel
def pack(work: Workspace, count: int, cells: int) -> None:
    """Solves the 0/1 knapsack over the first ``count`` members within ``cells`` steps; exact.

    Marks what is taken by a negative weight. O(count x cells).
    """
    weight_sum = 0
    for item in range(count):
        weight_sum += work.lines[item].weight
    if weight_sum <= cells:
        for item in range(count):
            work.lines[item].weight = -work.lines[item].weight
        return
    best = work.best
    for cell in range(cells + 1):
        best[0, cell] = 0.0
    for item in range(count):
        weight = min(work.lines[item].weight, cells + 1)
        value = work.lines[item].value
        for cell in range(weight):
            best[item + 1, cell] = best[item, cell]
        for cell in range(weight, cells + 1):  # row by row, without branches: this vectorises
            best[item + 1, cell] = max(best[item, cell], best[item, cell - weight] + value)
    cell = cells
    for item in range(count - 1, -1, -1):
        if best[item + 1, cell] > best[item, cell]:
            cell -= work.lines[item].weight
            work.lines[item].weight = -work.lines[item].weight


@kernel
def total_of(work: Workspace, count: int) -> tuple[int, float, int]:
    """Returns what is taken of the first ``count`` members: how many, their value, their tokens. O(count)."""
    members = 0
    value = 0.0
    tokens = 0
    for item in range(count):
        if work.lines[item].weight < 0:
            members += 1
            value += work.lines[item].value
            tokens += work.pool[work.lines[work.lines[item].member].row].remaining
    return members, value, tokens
