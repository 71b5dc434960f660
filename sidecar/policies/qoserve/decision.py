"""One decision: priorities, relegation, and the chunk that the decodes' slack allows (sources: the package)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor.features import CONTEXT, DECODE_CONTEXT, ROW, TOKENS, add_chunk
from predictor.forecast import FILL_ROW, predicted_seconds, time_to_budget
from sidecar.policies.common.filling import lay_out, spend_fill, start_fill
from sidecar.policies.common.history import expected_output, learn_lengths, make_known, recognise
from sidecar.policies.common.intake import (
    PROMPT,
    PROTECT_NOBODY,
    list_expired,
    raised_cap,
    slack_seconds,
    start_slack_seconds,
    take_in,
)
from sidecar.policies.common.relegation import relegate, will_be_late
from sidecar.policies.common.sorting import FAR_SECONDS, GROUP, key_of_seconds, sort_keys
from sidecar.policies.qoserve.artifact import artifact_budget, artifact_seconds, artifact_slack_seconds
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints
from slidingserve.jit import kernel

PATHS = ("decode", "chunk", "unpredicted")
"""Which way a decision went: nothing but decodes; a chunk; by the cap alone, as the model predicted nonsense."""
_DECODE, _CHUNK, _UNPREDICTED = range(3)
_LEAST_BUDGET = 128
_STEP_TOKENS = 16
_LONGEST_SECONDS = 1e6

RULES = np.dtype(
    [
        ("artifact", np.bool_),
        ("budget", np.int64),  # tokens
        ("limit", np.int64),  # the engine's own, tokens
        ("block_tokens", np.int64),
        ("max_sequences", np.int64),
        ("alpha_seconds_per_token", np.float64),
        ("alpha_of_service", np.float64),
        ("relegation", np.int64),  # index in RELEGATIONS
        ("skip_lost_decodes", np.bool_),
        ("spare_started", np.bool_),
        ("safety", np.float64),
        ("output_tokens", np.float64),
        ("seconds_per_output", np.float64),
        ("pace_seconds", np.float64),  # predicted time of an iteration of decodes
    ]
)
"""The resolved parameters, one row."""


class Work(NamedTuple):
    """Room for one decision, used again in each, and what is remembered; n is the mirror's capacity.

    Attributes:
        pool: PROMPT[n].
        keys: int64[2, n], see `common.sorting.sort_keys`.
        order: int64[n], rows of the pool: prompts that find a place, in their order.
        fill: float64[n + 1, 10], decodes and prompts in their order, see `predictor.forecast`.
        batch: float64[8], the features of the batch that is decided.
        scratch: float64[8], the features of whatever is being predicted.
        known: KNOWN[n], what is remembered of each slot's request.
        seen: int64[n + 1], how many decodes the last decision saw, and their slots.
        history: float64[classes, 3], see `common.history`.
    """

    pool: Table
    keys: Ints
    order: Ints
    fill: Floats
    batch: Floats
    scratch: Floats
    known: Table
    seen: Ints
    history: Floats


def make_work(capacity: int, history: Floats) -> Work:
    """Returns buffers for ``capacity`` live requests of whom nothing is known."""
    return Work(
        pool=np.zeros(capacity, PROMPT),
        keys=np.zeros((2, capacity), np.int64),
        order=np.zeros(capacity, np.int64),
        fill=np.zeros((capacity + 1, FILL_ROW)),
        batch=np.zeros(ROW),
        scratch=np.zeros(ROW),
        known=make_known(capacity),
        seen=np.zeros(capacity + 1, np.int64),
        history=history,
    )


@kernel
def has_only_ttlt(requests: Table, slot: int) -> bool:
    """Says whether a request is of a class that is not interactive."""
    return bool(requests[slot].ttft <= 0.0 and requests[slot].ttlt > 0.0)


@kernel
def see_decodes(requests: Table, entries: Table, decodes: int, now_seconds: float, work: Work) -> None:
    """Learns the lengths of those who have ended, and remembers who decodes now, since when. O(decodes)."""
    learn_lengths(requests, work.known, work.seen[1:], work.seen[0], work.history)
    for position in range(decodes):
        slot = entries[position].slot
        recognise(requests, work.known, slot)
        known = work.known[slot]
        if requests[slot].output == 1 and known.output == 0:
            known.first_seconds = now_seconds
        known.output = requests[slot].output
        work.seen[1 + position] = slot
    work.seen[0] = decodes


@kernel
def least_slack(
    requests: Table, entries: Table, decodes: int, now_seconds: float, decode_seconds: float, work: Work, rules: Any
) -> float:
    """Returns the least slack of the decodes (Algorithm 1's min_slack), FAR_SECONDS if nobody waits. O(decodes)."""
    least = FAR_SECONDS
    for position in range(decodes):
        slot = entries[position].slot
        if rules.artifact:
            slack = artifact_slack_seconds(
                requests,
                slot,
                now_seconds,
                work.known[slot].first_seconds,
                rules.output_tokens,
                rules.seconds_per_output,
            )
        else:
            slack = slack_seconds(requests, slot, now_seconds)
        if not (rules.skip_lost_decodes and (slack <= 0.0 or slack < decode_seconds * rules.safety)):
            least = min(least, slack)
    return least


@kernel
def order_prompts(
    requests: Table,
    prompts: int,
    now_seconds: float,
    iteration_seconds: float,
    throughput: float,
    work: Work,
    rules: Any,
) -> int:
    """Relegates whom it has to, and sorts the prompts; returns the row of ``keys`` that they are in. O(n log n).

    Groups: started prompts that cannot spare this iteration, then all others, then the relegated.
    """
    for row in range(prompts):
        prompt = work.pool[row]
        slot = prompt.slot
        output = 0.0
        if rules.artifact:
            prompt.slack = start_slack_seconds(
                requests, slot, now_seconds, rules.output_tokens, rules.seconds_per_output
            )
        elif has_only_ttlt(requests, slot):
            expected = expected_output(work.history, requests[slot].class_index, rules.output_tokens)
            if requests[slot].max_output > 0:
                expected = min(expected, float(requests[slot].max_output))
            output = max(expected - requests[slot].output, 0.0)
        service = prompt.remaining / throughput + output * rules.pace_seconds
        late = will_be_late(prompt.slack, service, iteration_seconds, rules.relegation)
        started = not prompt.waiting and prompt.context > 0
        prompt.expired = late and not (rules.artifact and started)
        prompt.protected = rules.spare_started and started and service <= prompt.slack < service + iteration_seconds
        if rules.alpha_of_service > 0.0:
            work.keys[0, row] = key_of_seconds(prompt.slack + rules.alpha_of_service * service, row)
        else:
            put_off = rules.alpha_seconds_per_token * (prompt.remaining + output)
            work.keys[0, row] = key_of_seconds(prompt.slack + put_off, row)
    relegate(requests, work.pool, prompts, work.known)
    for row in range(prompts):
        if work.pool[row].expired:
            work.keys[0, row] += 2 * GROUP
        elif not work.pool[row].protected:
            work.keys[0, row] += GROUP
    return sort_keys(work.keys, prompts)


@kernel
def choose_budget(
    work: Work, rows: int, slack: float, free_tokens: int, highest: int, rules: Any, model: Floats
) -> float:
    """Returns the tokens of this iteration, decodes included. O(rows + budget / step)."""
    used: float = work.batch[TOKENS]
    least = min(float(highest), used + _STEP_TOKENS)
    if rules.artifact:
        context = work.pool[work.order[0]].context if rows > 0 else 0
        budget = artifact_budget(slack, used, work.batch[DECODE_CONTEXT], context, free_tokens, highest)
        return max(float(budget), least)
    if slack >= FAR_SECONDS:
        return float(highest)
    if slack <= 0.0:  # a late decode, where those count
        return max(min(float(_LEAST_BUDGET), float(highest)), least)
    return time_to_budget(slack / rules.safety, float(highest), _STEP_TOKENS, work.fill, rows, work.scratch, model)


@kernel
def seconds_of(work: Work, features: Floats, rules: Any, model: Floats) -> float:
    """Returns the predicted time of the fill's decodes and whatever prompts a row of features holds beside them."""
    if rules.artifact:
        base = work.fill[0]
        prefill = features[TOKENS] - base[TOKENS]
        return artifact_seconds(prefill, base[TOKENS], base[DECODE_CONTEXT], features[CONTEXT] - base[CONTEXT])
    return predicted_seconds(features, model)


@kernel
def iteration_seconds_of(
    work: Work, prompt_tokens: int, slack: float, highest: int, rules: Any, model: Floats
) -> float:
    """Returns how long this iteration may take: decodes and all that prompts miss, up to the cap, within the slack."""
    for column in range(ROW):
        work.scratch[column] = work.batch[column]
    tokens = min(float(prompt_tokens), highest - work.batch[TOKENS])
    if tokens > 0.0:
        add_chunk(work.scratch, tokens, 0.0)
    seconds: float = seconds_of(work, work.scratch, rules, model) * rules.safety
    return min(seconds, slack) if slack > 0.0 else seconds


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
    work: Work,
    rule_rows: Table,
    model: Floats,
) -> tuple[int, int, int, int, float]:
    """Algorithm 1; returns (entries, victims, demoted, path, predicted seconds). O(n log n) for n live requests."""
    rules = rule_rows[0]
    count, victim_count, prompts, free_blocks, open_blocks, seats, prompt_tokens = take_in(
        requests,
        running,
        waiting,
        bounds,
        entries,
        victims,
        may_admit,
        now_seconds,
        free_blocks,
        rules.block_tokens,
        rules.max_sequences,
        PROTECT_NOBODY,
        False,
        work.pool,
        work.batch,
    )
    see_decodes(requests, entries, count, now_seconds, work)
    start_fill(work.fill, work.batch)
    seconds = seconds_of(work, work.batch, rules, model) if count > 0 else 0.0
    if prompts == 0:
        return count, victim_count, 0, _DECODE, seconds
    slack = least_slack(requests, entries, count, now_seconds, seconds, work, rules)
    used = int(work.batch[TOKENS])
    highest = raised_cap(rules.budget, used, rules.limit)
    turn_seconds = iteration_seconds_of(work, prompt_tokens, slack, highest, rules, model)
    predictable = 0.0 < turn_seconds < _LONGEST_SECONDS
    keys = work.keys[
        order_prompts(requests, prompts, now_seconds, turn_seconds if predictable else 0.0, throughput, work, rules)
    ]
    rows = lay_out(
        work.pool,
        keys,
        prompts,
        work.order,
        work.fill,
        seats,
        open_blocks,
        free_blocks,
        rules.block_tokens,
        float(highest),
    )
    budget = float(highest)
    if predictable:
        budget = choose_budget(work, rows, slack, free_blocks * rules.block_tokens, highest, rules, model)
    count = spend_fill(work.pool, work.order, rows, int(budget) - used, entries, count, work.batch)
    demoted_count = list_expired(work.pool, keys, prompts, demoted)
    if not predictable:
        return count, victim_count, demoted_count, _UNPREDICTED, 0.0
    return count, victim_count, demoted_count, _CHUNK, seconds_of(work, work.batch, rules, model)
