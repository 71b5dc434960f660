"""BatchConstructor and its knapsack, held against all subsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from predictor.forecast import fill_seconds
from predictor.model import LatencyModel
from sidecar.policies.slidingserve.chunker import highest_budget
from sidecar.policies.slidingserve.constructor import construct, pack, total_of
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.violation import find_risks
from tests.predictor.reference import row_of, seconds_of
from tests.slidingserve import reference
from tests.slidingserve.reference import Forward, Prompt, best_subsets
from tests.slidingserve.scenes import Lined, Scene, decoding, line_up_as_given, linear, prompt
from tests.slidingserve.test_decision_reference import any_models

quick = settings(max_examples=200, deadline=None, derandomize=True)
CAP = 512


class Constructed(NamedTuple):
    """What came out: places of the chosen, the batch's budget, places of the anchors."""

    chosen: frozenset[int]
    budget: float
    anchors: list[int]


def constructed(lined: Lined) -> Constructed:
    work, rules, facts, model, rows = lined
    full = min(highest_budget(work.batch[0], rules), work.fill[rows, 0])
    count = find_risks(work, rows, fill_seconds(work.fill, rows, full, work.scratch, model) * rules["safety"], rules)
    anchors = work.lines["risk"][:count].tolist()
    chosen, budget = construct(work, rows, rows, count, rules, facts, model)
    places = frozenset(np.flatnonzero(work.pool["chosen"][:rows]).tolist())
    assert len(places) == chosen
    return Constructed(places, budget, anchors)


def right_answers(
    model: LatencyModel, decodes: list[tuple[int, int]], queue: list[Prompt], tbt_seconds: float, **parameters: Any
) -> tuple[list[int], list[reference.Solution]]:
    """Places at risk, and the best batches."""
    rules = SlidingServeParameters(max_tokens=CAP, **parameters).resolved()
    forward = Forward(model, decodes, [(p.missing, p.context) for p in queue], rules, CAP)
    full_seconds = forward.seconds(min(forward.highest, forward.fill.tokens)) * rules["safety"]
    late = reference.risks(queue, full_seconds, rules)
    return late, reference.construct(queue, late, forward, tbt_seconds)


def lined_up(
    model: LatencyModel, decodes: list[tuple[int, int]], queue: list[Prompt], tbt_seconds: float, **parameters: Any
) -> Lined:
    rows = [(p.missing, p.context, p.slack) for p in queue]
    return line_up_as_given(model, decodes, rows, [tbt_seconds], max_tokens=CAP, **parameters)


queues = st.lists(
    st.builds(
        lambda missing, context, slack: Prompt(0, missing, context, slack),
        st.one_of(st.integers(1, 120), st.sampled_from([16, 32, 48])),
        st.sampled_from([0, 0, 30, 200]),
        st.integers(-2, 60).map(lambda n: n / 512),
    ),
    min_size=1,
    max_size=9,
)
decode_lists = st.lists(st.tuples(st.just(1), st.integers(0, 200)), max_size=6)


@quick
@given(
    any_models,
    decode_lists,
    queues,
    st.sampled_from([1 / 64, 1 / 16, 1e6]),
    st.sampled_from(["paper", "robust"]),
    st.sampled_from([1.0, 1.25]),
)
def test_the_batch_is_the_best_of_all_subsets(
    model: LatencyModel,
    decodes: list[tuple[int, int]],
    queue: list[Prompt],
    tbt_seconds: float,
    mode: str,
    safety: float,
) -> None:
    """Completed, then value, then tokens; in `robust` weights are rounded up to 16 tokens."""
    late, solutions = right_answers(model, decodes, queue, tbt_seconds, mode=mode, safety=safety)
    assume(late)
    found = constructed(lined_up(model, decodes, queue, tbt_seconds, mode=mode, safety=safety))
    assert found.anchors == late
    if not solutions:
        assert found.chosen == frozenset()
        return
    assert (found.chosen, found.budget) in [(one.members, one.budget) for one in solutions]
    assert sum(queue[place].missing for place in found.chosen) + len(decodes) <= found.budget


@quick
@given(queues, st.sampled_from([0, 1, 2, 3, 32]), st.sampled_from([0, 1, 2, 8]), st.booleans())
def test_caps_on_anchors_and_candidates(
    queue: list[Prompt], candidates: int, anchors: int, anchor_in_sums: bool
) -> None:
    model, decodes = linear(0.0, 2.0**-12), [(1, 10)]
    caps = {"max_candidates": candidates, "max_anchors": anchors, "anchor_in_sums": anchor_in_sums}
    late, solutions = right_answers(model, decodes, queue, 1e6, **caps)
    assume(late)
    found = constructed(lined_up(model, decodes, queue, 1e6, **caps))
    assert found.anchors == late
    assert len(late) <= (anchors or len(queue))
    assert found.chosen in [one.members for one in solutions] or not solutions
    assert len(found.chosen) <= 1 + (candidates or len(queue))


def test_only_the_eight_with_the_least_slack_are_tried() -> None:
    """Nine prompts are at risk; the first eight cannot be saved, the ninth could."""
    each = 2.0**-12
    hopeless = [Prompt(0, 100, 0, (20 + n) * each) for n in range(8, 0, -1)]
    queue = [*hopeless, Prompt(0, 10, 0, 40 * each)]
    model = linear(0.0, each)
    found = constructed(lined_up(model, [], queue, 1e6))
    assert found.anchors == [7, 6, 5, 4, 3, 2, 1, 0]
    assert found.chosen == frozenset()
    assert constructed(lined_up(model, [], queue, 1e6, max_anchors=9)).chosen == {8}
    decision = Scene([prompt(p.missing, p.slack) for p in queue]).decide(model, max_tokens=CAP)
    assert decision.path == "infeasible"


def test_candidates_are_the_first_in_the_order_that_fit() -> None:
    """The last is worth the most, but two are all that may compete; one of 400 tokens never does."""
    each = 2.0**-12
    queue = [Prompt(0, 50, 0, 120 * each), *(Prompt(0, missing, 0, 600 * each) for missing in (400, 40, 50, 10))]
    parameters = {"anchor_within_tbt": False, "step_tokens": 1, "knapsack_step_tokens": 1}
    found = constructed(lined_up(linear(0.0, each), [], queue, 1e6, max_candidates=2, **parameters))
    assert found.budget == 120
    assert found.chosen == {0, 2}
    every = constructed(lined_up(linear(0.0, each), [], queue, 1e6, max_candidates=0, **parameters))
    assert every.chosen == {0, 2, 4}


# The knapsack alone.


def packed(weights: Sequence[int], values: Sequence[float], cells: int) -> tuple[set[int], int, float, int]:
    """Items taken by `pack`, and what `total_of` says of them: members, value, tokens. Weights are in steps of 16."""
    lined = line_up_as_given(linear(), [], [(16 * max(weight, 1), 0, 1.0) for weight in weights], max_tokens=CAP)
    count = len(weights)
    for name, column in (("member", range(count)), ("weight", weights), ("value", values)):
        lined.work.lines[name] = list(column)
    lined.work.best[:] = np.nan
    pack(lined.work, count, cells)
    members, value, tokens = total_of(lined.work, count)
    marks = lined.work.lines["weight"].tolist()
    assert [abs(mark) for mark in marks] == list(weights)
    return {i for i, mark in enumerate(marks) if mark < 0}, members, value, tokens


items = st.lists(
    st.tuples(st.integers(1, 40), st.one_of(st.floats(0.001, 100.0), st.integers(1, 4).map(float))), max_size=10
)


@quick
@given(items, st.integers(0, CAP // 16))
@example([], 0)
@example([(1, 1.0)], 0)
@example([(33, 1.0), (40, 2.0)], 32)
@example([(10, 1.0), (10, 1.0), (12, 3.0)], 32)  # all fit, to the last cell
@example([(10, 1.0), (10, 1.0), (13, 3.0)], 32)
@example([(5, 2.0), (5, 2.0), (10, 4.0)], 10)  # equally good
@example([(6, 10.0), (5, 6.0), (5, 6.0)], 10)  # not the densest first
def test_the_knapsack_is_worth_the_most(pairs: list[tuple[int, float]], cells: int) -> None:
    weights, values = [weight for weight, _ in pairs], [value for _, value in pairs]
    taken, members, value, tokens = packed(weights, values, cells)
    assert tuple(sorted(taken)) in best_subsets(weights, values, cells)
    assert members == len(taken)
    assert value == pytest.approx(sum(values[i] for i in taken), rel=1e-12)
    assert tokens == sum(16 * weights[i] for i in taken)


def test_best_subsets_tries_all() -> None:
    """The reference itself, on a case worked by hand."""
    assert best_subsets([3, 4, 5], [3.0, 4.0, 5.0], 7) == [(0, 1)]
    assert best_subsets([3, 4, 7], [3.0, 4.0, 7.0], 7) == [(2,), (0, 1)]
    assert best_subsets([3], [3.0], 2) == [()]
    assert len(best_subsets([1] * 4, [1.0] * 4, 2)) == len(list(combinations(range(4), 2)))


# A batch that was constructed is predicted as it is.

FAR_BACK = linear(0.0, 2.0**-16, context=2.0**-18)
"""Four tokens of context take as long as one more token."""


@quick
@given(any_models, decode_lists, queues, st.sampled_from([1 / 64, 1 / 16, 1e6]), st.sampled_from([1.0, 1.25]))
def test_constructed_batches_keep_within_what_anchor_and_decodes_can_wait(
    model: LatencyModel, decodes: list[tuple[int, int]], queue: list[Prompt], tbt_seconds: float, safety: float
) -> None:
    found = constructed(lined_up(model, decodes, queue, tbt_seconds, safety=safety))
    assume(found.chosen)
    slack = min(queue[place].slack for place in found.chosen)  # the anchor's: nobody in its batch has less
    chunks = [(queue[place].missing, queue[place].context) for place in found.chosen]
    seconds = seconds_of(model, row_of([*decodes, *chunks]))
    assert seconds * safety <= min(tbt_seconds, slack)


def test_an_anchor_with_a_long_context_cannot_be_saved() -> None:
    """It comes second in the order; by what is before it 20 ms hold 1296 tokens, but its own 1000 take 30 ms."""
    scene = Scene([decoding(0.02, 3), prompt(1200, 1.0, running=True), prompt(1000, 0.02, 4000), prompt(2000, 9.0)])
    parameters = {"max_tokens": 2048, "protect": "priority", "alpha": 1e6}
    first = scene.requests[1]._replace(priority=-1)
    scene = replace(scene, requests=[scene.requests[0], first, *scene.requests[2:]])
    decision = scene.decide(FAR_BACK, **parameters)
    assert decision.path == "infeasible"
    assert decision.predicted_seconds <= 0.02
    trusting = scene.decide(FAR_BACK, recheck_batch=False, **parameters)
    assert trusting.path == "constructor"
    assert trusting.predicted_seconds > 0.03


def test_what_is_worth_least_leaves_a_batch_that_takes_too_long() -> None:
    """Time for 2400 tokens: the anchor's 800, 600, and 4000 of context, which are as good as 1000, and no more."""
    each = 2.0**-16
    first = Prompt(0, 2500, 0, 9.0)  # fills what TimeToBudget looks at
    queue = [first, Prompt(0, 800, 0, 2400 * each), Prompt(0, 600, 4000, 1.0), Prompt(0, 700, 2400, 1.0)]
    parameters: dict[str, Any] = {"max_tokens": 4096, "anchor_within_tbt": False}
    rows = [(p.missing, p.context, p.slack) for p in queue]
    found = constructed(line_up_as_given(FAR_BACK, [], rows, [1e6], **parameters))
    assert found.anchors == [1]
    assert found.chosen == {1, 2}
    found = constructed(line_up_as_given(FAR_BACK, [], rows, [1e6], safety=1.25, **parameters))
    assert found.chosen == {1}
    found = constructed(line_up_as_given(FAR_BACK, [], rows, [1e6], recheck_batch=False, **parameters))
    assert found.chosen == {1, 2, 3}
