"""Policy ``slidingserve+relegation``: SlidingServe with QoServe's relegation, which the paper leaves open.

Sources: SlidingServe (arXiv 2606.05933) and QoServe (ASPLOS 2026): requests that QoServe's rule relegates
(`common.relegation`) leave P before MLPS sorts, and get only what is left of the budget. Everything else is
`slidingserve`, see there.

The rule is asked anew in each iteration. By default it is the artifact's, ``slack < r / throughput``: the paper's
(the deadline lies within this iteration) would take away those whom the BatchConstructor is there to save. Something
is left where P gets all that it misses: then relegated prompts are added, shortest first, as long as the batch keeps
to the cap, to what the decodes can wait for, and to the deadlines of those of P that are in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.features import ROW, TOKENS, add_chunk
from predictor.forecast import fill_seconds, predicted_seconds
from predictor.model import LatencyModel
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.common.filling import lay_out, spend_fill, start_fill
from sidecar.policies.common.intake import PROMPT, claim
from sidecar.policies.common.models import session_model
from sidecar.policies.common.relegation import RELEGATIONS, will_be_late
from sidecar.policies.common.sorting import FAR_SECONDS, key_of_tokens, sort_keys
from sidecar.policies.registry import register
from sidecar.policies.slidingserve.chunker import budget_within, highest_budget
from sidecar.policies.slidingserve.decision import decide_prompts
from sidecar.policies.slidingserve.intake import measure_window, take_everybody_in
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.policy import SlidingServePolicy
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

NAME = "slidingserve+relegation"


@dataclass(frozen=True, slots=True)
class RelegationParameters(SlidingServeParameters):
    """Settings of `slidingserve`, and ``relegation``."""

    relegation: str = "throughput"

    def __post_init__(self) -> None:
        SlidingServeParameters.__post_init__(self)
        if self.relegation not in RELEGATIONS:
            raise ValueError("relegation", f"give one of {', '.join(RELEGATIONS)}")


RelegationParameters.__doc__ = f"""{inspect.getdoc(SlidingServeParameters)}
    relegation: who leaves P: ``off``: nobody; ``violated``: whose deadline has passed; ``iteration``: or lies within an
        iteration filled up to the cap; ``throughput``: or before what is missing can be computed at rho.
"""


@kernel
def set_aside(
    work: Workspace, prompts: int, aside: Table, relegation: int, rules: Any, facts: Any, model: Floats
) -> int:
    """Moves the prompts that the rule relegates from the pool to ``aside``; returns how many are left. O(prompts)."""
    for column in range(ROW):
        work.scratch[column] = work.batch[column]
    tokens = min(float(facts.prompt_tokens), rules.budget - work.batch[TOKENS])
    if tokens > 0.0:
        add_chunk(work.scratch, tokens, 0.0)
    full_seconds = predicted_seconds(work.scratch, model) * rules.safety
    kept = 0
    for row in range(prompts):
        prompt = work.pool[row]
        if will_be_late(prompt.slack, prompt.remaining / facts.throughput, full_seconds, relegation):
            facts.prompt_tokens -= prompt.remaining
            aside[row - kept] = prompt
        else:
            if kept < row:
                work.pool[kept] = prompt
            kept += 1
    facts.set_aside = prompts - kept
    return kept


@kernel
def decide_with_relegation(
    requests: Table,
    running: Ints,
    waiting: Ints,
    bounds: Ints,
    entries: Table,
    victims: Ints,
    demoted: Ints,
    may_admit: bool,
    now_seconds: float,
    free_blocks: int,
    throughput: float,
    work: Workspace,
    rule_rows: Table,
    fact_rows: Table,
    model: Floats,
    aside: Table,
    relegation: int,
) -> tuple[int, int, int, int, int, float]:
    """As `slidingserve.decision.decide_batch`, over those who are not relegated."""
    rules, facts = rule_rows[0], fact_rows[0]
    facts.now_seconds = now_seconds
    facts.throughput = throughput
    facts.free_blocks = free_blocks
    count, victim_count, prompts = take_everybody_in(
        requests, running, waiting, bounds, entries, victims, may_admit, work, rules, facts, model
    )
    measure_window(requests, entries, count, rules, facts)
    start_fill(work.fill, work.batch)
    kept = set_aside(work, prompts, aside, relegation, rules, facts, model)
    count, demoted_count, path, lined_up, seconds = decide_prompts(
        requests, entries, count, kept, demoted, work, rules, facts, model
    )
    for row in range(prompts - kept):
        demoted[demoted_count + row] = aside[row].slot
    return count, victim_count, demoted_count + prompts - kept, path, lined_up, seconds


@kernel
def serve_relegated(
    kept: int,
    entries: Table,
    count: int,
    work: Workspace,
    rule_rows: Table,
    fact_rows: Table,
    model: Floats,
    aside: Table,
) -> tuple[int, float]:
    """Adds relegated prompts to a batch that holds all that the ``kept`` others miss, shortest first.

    Returns (entries, predicted seconds of the batch). O(n log n + budget / step).
    """
    rules, facts = rule_rows[0], fact_rows[0]
    highest = highest_budget(work.fill[0, TOKENS], rules)
    seconds = predicted_seconds(work.batch, model)
    if work.batch[TOKENS] < work.fill[0, TOKENS] + facts.prompt_tokens or work.batch[TOKENS] >= highest:
        return count, seconds
    scarce = facts.open_blocks < 0
    seats, open_blocks, free_blocks = facts.seats, facts.open_blocks, facts.free_blocks
    limit_seconds = facts.slack_seconds[0]
    for place in range(kept):
        prompt = work.pool[work.lines[place].row]
        _, seats, open_blocks, free_blocks = claim(prompt, seats, open_blocks, free_blocks, scarce, rules.block_tokens)
        if prompt.slack >= seconds * rules.safety:
            limit_seconds = min(limit_seconds, prompt.slack)
    for row in range(facts.set_aside):
        work.keys[0, row] = key_of_tokens(aside[row].remaining, row)
    row = sort_keys(work.keys, facts.set_aside)
    order = work.keys[1 - row]
    start_fill(work.fill, work.batch)
    rows = lay_out(
        aside,
        work.keys[row],
        facts.set_aside,
        order,
        work.fill,
        seats,
        open_blocks,
        free_blocks,
        rules.block_tokens,
        highest,
    )
    budget = highest
    if limit_seconds < FAR_SECONDS and 0.0 < fill_seconds(work.fill, rows, highest, work.scratch, model) < FAR_SECONDS:
        budget = budget_within(limit_seconds, highest, work, rows, rules, model)
    count = spend_fill(aside, order, rows, int(budget - work.batch[TOKENS]), entries, count, work.batch)
    return count, predicted_seconds(work.batch, model)


# With what a kernel takes spelled out, a call that passes most of it on cannot be checked.
_decide: Callable[..., tuple[int, int, int, int, int, float]] = decide_with_relegation
_serve: Callable[..., tuple[int, float]] = serve_relegated


class RelegationPolicy(SlidingServePolicy):
    """See the module. One for each session."""

    def __init__(self, parameters: RelegationParameters, context: PolicyContext, model: LatencyModel) -> None:
        super().__init__(parameters, context, model)
        self.version = f"{NAME}/1-{parameters.mode}"
        self._relegation = RELEGATIONS.index(parameters.relegation)
        self._aside: Table = np.zeros(0, PROMPT)

    def _decide_batch(self, *state: Any) -> tuple[int, int, int, int, int, float]:
        if len(self._aside) != len(state[0]):
            self._aside = np.zeros(len(state[0]), PROMPT)
        return _decide(*state, self._aside, self._relegation)

    def _serve_others(self, plan: Plan, kept: int, constants: tuple[Any, ...]) -> None:
        if constants[2]["set_aside"][0] > 0:
            plan.count, plan.predicted_seconds = _serve(kept, plan.entries, plan.count, *constants, self._aside)


def build(parameters: RelegationParameters, context: PolicyContext) -> RelegationPolicy:
    """Builds the policy for a session; errors: see `session_model`."""
    return RelegationPolicy(parameters, context, session_model(NAME, parameters.model, context))


register(NAME, RelegationParameters, build, "SlidingServe, and who cannot be in time any more gets only what is left")
