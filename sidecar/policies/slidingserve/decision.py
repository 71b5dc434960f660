"""One decision over the prompts of an iteration: order, violation check, then BatchConstructor or SlidingChunker."""

from __future__ import annotations

from typing import Any

from predictor.features import TOKENS
from predictor.forecast import fill_seconds, predicted_seconds
from sidecar.policies.common.sorting import sort_keys
from sidecar.policies.slidingserve.chunker import choose_budget, highest_budget
from sidecar.policies.slidingserve.constructor import construct
from sidecar.policies.slidingserve.forwarder import forward_budget, forward_chosen
from sidecar.policies.slidingserve.intake import measure_window, take_everybody_in
from sidecar.policies.slidingserve.objectives import choose_most_tokens, choose_over_window
from sidecar.policies.slidingserve.priority import line_up, write_keys
from sidecar.policies.slidingserve.violation import find_risks
from sidecar.policies.slidingserve.workspace import Workspace
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

DECODE, CHUNKER, CONSTRUCTOR, INFEASIBLE, UNPREDICTED = range(5)
PATHS = ("decode", "chunker", "constructor", "infeasible", "unpredicted")
"""Which way a decision went: nothing but decodes; by the SlidingChunker; by the BatchConstructor; by the chunker (or in
`paper` by nobody) because no request at risk can be saved; by the cap alone, as the model predicted nonsense."""

_LONGEST_SECONDS = 1e6


@kernel
def decide_batch(
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
) -> tuple[int, int, int, int, int, float]:
    """Takes everybody in, lines the prompts up, checks for violations, and constructs a batch or chunks.

    By Algorithm 1, or greedily (window 1); without ``chunk_here`` paths CHUNKER and INFEASIBLE leave that to one of the
    chunkers below. Returns (entries, victims, demoted, path, prompts in the order, predicted seconds). O(n log n) for n
    live requests, plus the constructor's knapsacks.
    """
    rules, facts = rule_rows[0], fact_rows[0]
    facts.now_seconds = now_seconds
    facts.throughput = throughput
    facts.free_blocks = free_blocks
    count, victim_count, prompts = take_everybody_in(
        requests, running, waiting, bounds, entries, victims, may_admit, work, rules, facts, model
    )
    count, demoted_count, path, kept, seconds = decide_prompts(
        requests, entries, count, prompts, demoted, work, rules, facts, model
    )
    return count, victim_count, demoted_count, path, kept, seconds


@kernel
def decide_prompts(
    requests: Table,
    entries: Table,
    count: int,
    prompts: int,
    demoted: Ints,
    work: Workspace,
    rules: Any,
    facts: Any,
    model: Floats,
) -> tuple[int, int, int, int, float]:
    """Decides over the first ``prompts`` prompts of the pool, once everybody is taken in.

    Returns (entries, demoted, path, prompts in the order, predicted seconds).
    """
    if prompts == 0:
        return count, 0, DECODE, 0, facts.decode_seconds
    measure_window(requests, entries, count, rules, facts)
    write_keys(work, prompts, rules, facts.throughput)
    keys = work.keys[sort_keys(work.keys, prompts)]
    kept, rows = line_up(work, keys, prompts, rules, facts)
    facts.rows = rows
    demoted_count = list_demoted(work, kept, demoted) if rules.expired_last else 0
    full_budget = min(highest_budget(work.batch[TOKENS], rules), work.fill[rows, TOKENS])
    full_seconds = fill_seconds(work.fill, rows, full_budget, work.scratch, model)
    if not 0.0 < full_seconds < _LONGEST_SECONDS:
        count = forward_budget(work, kept, full_budget, entries, count)
        return count, demoted_count, UNPREDICTED, kept, 0.0
    path = CHUNKER
    risks = find_risks(work, kept, full_seconds * rules.safety, rules) if rules.constructor else 0
    if risks > 0:
        chosen, budget = construct(work, kept, rows, risks, rules, facts, model)
        path = CONSTRUCTOR if chosen > 0 else INFEASIBLE
        if chosen > 0:
            count = forward_chosen(work, kept, budget, rules, entries, count)
    if rules.chunk_here and (path == CHUNKER or (path == INFEASIBLE and rules.chunk_if_infeasible)):
        count = forward_budget(work, kept, choose_budget(work, rows, rules, facts, model), entries, count)
    return count, demoted_count, path, kept, predicted_seconds(work.batch, model)


@kernel
def chunk_most_tokens(
    kept: int, entries: Table, count: int, work: Workspace, rule_rows: Table, fact_rows: Table, model: Floats
) -> tuple[int, float]:
    """Chunks for the most tokens in two iterations. Returns (entries, predicted seconds of the batch)."""
    rules, facts = rule_rows[0], fact_rows[0]
    budget = choose_most_tokens(work, facts.rows, rules, facts, model)
    count = forward_budget(work, kept, budget, entries, count)
    return count, predicted_seconds(work.batch, model)


@kernel
def chunk_long_window(
    kept: int, entries: Table, count: int, work: Workspace, rule_rows: Table, fact_rows: Table, model: Floats
) -> tuple[int, float]:
    """Chunks over three or four iterations. Returns (entries, predicted seconds of the batch)."""
    rules, facts = rule_rows[0], fact_rows[0]
    budget = choose_over_window(work, facts.rows, rules, facts, model)
    count = forward_budget(work, kept, budget, entries, count)
    return count, predicted_seconds(work.batch, model)


@kernel
def list_demoted(work: Workspace, kept: int, demoted: Ints) -> int:
    """Writes the slots of the prompts that are last because their deadline has passed; returns how many. O(kept)."""
    count = 0
    for place in range(kept - 1, -1, -1):
        prompt = work.pool[work.lines[place].row]
        if not prompt.expired:
            break  # they are all at the end
        demoted[count] = prompt.slot
        count += 1
    return count
