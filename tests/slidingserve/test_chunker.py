"""SlidingChunker and its variants, held against exhaustive searches."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from predictor.files import load_model
from predictor.model import Expert, LatencyModel, linear_model
from sidecar.policies.slidingserve.chunker import choose_budget, least_time, split_seconds
from sidecar.policies.slidingserve.intake import measure_window
from sidecar.policies.slidingserve.objectives import choose_most_tokens, choose_over_window
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.queues import ENTRY
from tests.predictor.reference import Entries
from tests.slidingserve import reference
from tests.slidingserve.reference import Forward
from tests.slidingserve.scenes import Lined, Scene, decoding, line_up_as_given, linear, prompt
from tests.slidingserve.test_decision_reference import any_models, staircases, straight

quick = settings(max_examples=150, deadline=None, derandomize=True)
CAP = 256

decode_lists = st.lists(st.tuples(st.just(1), st.integers(0, 200)), max_size=8)
prompt_lists = st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0, 0, 40, 300])), min_size=1, max_size=6)
shares = st.one_of(st.integers(1, 60), st.integers(1, 12)).map(lambda n: n / 1024)
monotone = st.one_of(straight, staircases())
"""Models by which more tokens never take less time."""


def lined_up(
    model: LatencyModel, decodes: Entries, prompts: Entries, seconds: list[float], **parameters: Any
) -> tuple[Lined, Forward]:
    """The same to the kernels and to plain Python; B is CAP if nothing else is said."""
    parameters = {"max_tokens": CAP, **parameters}
    lined = line_up_as_given(model, decodes, [(m, u, 9.0) for m, u in prompts], seconds, **parameters)
    rules = SlidingServeParameters(**parameters).resolved()
    return lined, Forward(model, decodes, prompts, rules, parameters["max_tokens"])


def chosen(lined: Lined) -> int:
    return int(choose_budget(lined.work, lined.rows, lined.rules, lined.facts, lined.model))


# Algorithm 1's search.


@st.composite
def convex_models(draw: st.DrawFn) -> LatencyModel:
    """T is convex in the tokens of a prompt without context: weights of at least 0 for tokens, squares and work."""
    each, squares, work = (draw(st.integers(0, 40)) * 2.0**-n for n in (16, 24, 24))
    return linear_model(
        "none", 0.0, decodes=each, prefill_tokens=each, prefill_squares=squares, prefill_work=work, context=2.0**-20
    )


@quick
@given(
    convex_models(),
    st.integers(0, 8),
    st.integers(0, 400),
    st.integers(0, 400),
    st.integers(2, 600),
    st.booleans(),
    st.sampled_from([0, 2, 7, 30]),
)
def test_the_search_is_exhaustive_where_time_is_convex(
    model: LatencyModel, decodes: int, left: int, width: int, rest: int, advance: bool, tolerance: int
) -> None:
    """Exactly so with a tolerance of 0; else no worse than half the tolerance beside an optimum."""
    left, right = decodes + left, decodes + left + width
    both = float(right + decodes + rest)
    lined, _ = lined_up(model, [(1, 16)] * decodes, [(2000, 0)], [], advance_queue=advance, max_tokens=4096)
    lined.rules["tolerance_tokens"] = tolerance

    def cost(budget: int) -> float:
        return split_seconds(lined.work, lined.rows, budget, both, lined.rules, lined.model)

    found = least_time(lined.work, lined.rows, float(left), float(right), both, lined.rules, lined.model)
    assert left <= found <= right
    costs = [cost(budget) for budget in range(left, right + 1)]
    beside = [
        max(costs[max(0, i - (tolerance + 1) // 2)], costs[min(width, i + (tolerance + 1) // 2)])
        for i, seconds in enumerate(costs)
        if seconds == min(costs)
    ]
    assert cost(int(found)) <= max(beside)
    if tolerance == 0:
        assert cost(int(found)) == min(costs)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 1), (5, 35), (5, 36), (0, 1000)])
def test_where_all_cost_the_same_the_largest_is_taken(left: int, right: int) -> None:
    lined, _ = lined_up(linear(0.0, 2.0**-16), [], [(3000, 0)], [], max_tokens=4096)
    assert least_time(lined.work, 1, float(left), float(right), 2000.0, lined.rules, lined.model) == right


def test_what_two_iterations_take() -> None:
    """Worked by hand: T = tokens + context of all that run, in seconds; 2 decodes, prompts of 10 and 20 tokens."""
    model = linear(0.0, 1.0, context=1.0)
    decodes, prompts = [(1, 100), (1, 50)], [(10, 0), (20, 7)]

    def seconds(budget: float, both: float, **switches: bool) -> float:
        lined, _ = lined_up(model, decodes, prompts, [], **switches)
        return float(split_seconds(lined.work, lined.rows, budget, both, lined.rules, lined.model))

    whole = {"advance_queue": True, "expected_decodes": False}
    # 12 now: 152 + 10; then 15 of the second prompt, which has 7 of context: 152 + 15 + 7.
    assert seconds(12, 12 + 17, **whole) == 162 + 174
    # The first prompt decodes then: a token, and 10 of context.
    assert seconds(12, 12 + 17, advance_queue=True, expected_decodes=True) == 162 + 174 + 11
    # Half-way through the first prompt: 5 of it are context then.
    assert seconds(7, 7 + 17, **whole) == 157 + (152 + 5 + 5 + 10 + 7)
    # Not advanced: 15 tokens from the start, 10 of the first prompt and 5 of the second, again.
    assert seconds(12, 12 + 17, advance_queue=False) == 162 + (152 + 15 + 7)
    # Less than the decodes is left: they run all the same, or as many as fit, or none.
    assert seconds(12, 13, **whole) == 162 + 152
    assert seconds(12, 13, clamp_next_budget=False) == 162 + 76
    assert seconds(12, 2, clamp_next_budget=False) == 162


# What the decodes leave to each iteration.


@quick
@given(
    st.lists(
        st.tuples(st.integers(-8, 80).map(lambda n: n / 512), st.sampled_from([1 / 64, 1 / 32, 1 / 16])), max_size=8
    ),
    st.sampled_from(["robust", "paper"]),
    st.sampled_from([1.0, 2.0]),
    st.integers(0, 40).map(lambda n: n / 512),
)
def test_what_the_decodes_leave_to_each_iteration(
    decodes: list[tuple[float, float]], mode: str, safety: float, decode_seconds: float
) -> None:
    """T_j by the decodes that can still be in time; in `robust` those are lost that not even an iteration of decodes
    alone can save."""
    least = decode_seconds * safety if mode == "robust" else 0.0
    expected = reference.window_seconds(decodes, least, 4)
    queues = Scene([decoding(slack, 16, tbt) for slack, tbt in decodes]).queues()
    lined = line_up_as_given(linear(), [], [], mode=mode, safety=safety)
    lined.facts["now_seconds"], lined.facts["decode_seconds"] = 100.0, decode_seconds
    entries = np.zeros(len(decodes), ENTRY)
    entries["slot"] = queues.running_slots
    measure_window(queues.requests, entries, len(decodes), lined.rules, lined.facts)
    assert lined.facts["slack_seconds"].tolist() == expected


def test_each_iteration_is_bound_by_its_own_decode() -> None:
    """The reference itself, by hand: 1/8 s is left to this iteration, then the second decode is due after 9/16 s."""
    assert reference.window_seconds([(0.25, 0.5), (0.5, 0.0625), (0.125, 0.75)], 0.0, 3) == [0.125, 0.4375, 0.0625]
    assert reference.window_seconds([(0.25, 0.5), (0.125, 0.75)], 0.1875, 2) == [0.25, 0.5]


# The budget of an iteration.


chunk_switches = st.fixed_dictionaries(
    {"mode": st.sampled_from(["robust", "paper"])},
    optional={
        "tolerance_tokens": st.sampled_from([2, 30]),
        "safety": st.sampled_from([1.0, 1.25]),
        "step_tokens": st.sampled_from([1, 4, 16]),
        "max_tokens": st.sampled_from([64, 100, CAP]),
        **dict.fromkeys(
            (
                "clamp_chunk",
                "clamp_next_budget",
                "cap_next_budget",
                "advance_queue",
                "clamp_budget_sum",
                "take_all_that_fits",
                "expected_decodes",
            ),
            st.booleans(),
        ),
    },
)


@settings(quick, max_examples=300)
@given(st.one_of(any_models, convex_models()), decode_lists, prompt_lists, shares, shares, chunk_switches)
def test_budgets_are_those_of_the_algorithm(
    model: LatencyModel, decodes: Entries, prompts: Entries, now: float, after: float, switches: dict[str, Any]
) -> None:
    lined, forward = lined_up(model, decodes, prompts, [now, after], **switches)
    assert chosen(lined) == reference.chunk(forward, [now, after])


@quick
@given(
    any_models, decode_lists, prompt_lists, shares, shares, st.sampled_from(["robust", "paper"]), st.integers(1, 300)
)
def test_budgets_stay_in_bounds(
    model: LatencyModel, decodes: Entries, prompts: Entries, now: float, after: float, mode: str, cap: int
) -> None:
    """At least the decodes, at most B; or a step more than the decodes, where B holds no more than them."""
    lined, forward = lined_up(model, decodes, prompts, [now, after], mode=mode, max_tokens=cap)
    assert forward.base <= chosen(lined) <= max(cap, forward.base + int(lined.rules["step_tokens"]))


@pytest.mark.parametrize("mode", ["robust", "paper"])
def test_a_cap_below_the_decodes_does_not_stop_every_prompt(mode: str) -> None:
    """20 decodes and B = 16: a step's worth of prompt tokens runs beside them."""
    scene = Scene([decoding(1.0)] * 20 + [prompt(100)])
    decision = scene.decide(linear(0.0, 2.0**-16), mode=mode, max_tokens=16, step_tokens=8, window=1)
    assert decision.total == 28


@quick
@given(monotone, decode_lists, prompt_lists, shares, shares, st.sampled_from([1.0, 1.25]), st.sampled_from([1, 2]))
def test_chunks_keep_within_what_the_decodes_can_wait(
    model: LatencyModel,
    decodes: Entries,
    prompts: Entries,
    now: float,
    after: float,
    safety: float,
    window: int,
) -> None:
    lined, forward = lined_up(model, decodes, prompts, [now, after], safety=safety, window=window)
    budget = chosen(lined)
    assert budget == forward.base or forward.seconds(budget) * safety <= now


@st.composite
def bumpy_models(draw: st.DrawFn) -> LatencyModel:
    """Time goes up and down with the number of tokens, as that of matrix kernels may."""
    stretches = draw(st.lists(st.tuples(st.integers(8, 64), st.integers(1, 60)), min_size=3, max_size=8))
    table = tuple(units / 1024 for tokens, units in stretches for _ in range(tokens))
    return LatencyModel("bumps/1", "none", {"global": Expert(0.0, (0.0,) * 7)}, table)


@settings(quick, max_examples=300)
@given(bumpy_models(), decode_lists, prompt_lists, shares, shares, st.sampled_from([1.0, 1.25]), st.booleans())
def test_chunks_keep_within_it_where_more_tokens_take_less_time(
    model: LatencyModel,
    decodes: Entries,
    prompts: Entries,
    now: float,
    after: float,
    safety: float,
    everything: bool,
) -> None:
    """The search may come to a budget that takes longer than the larger one that T_cur buys."""
    lined, forward = lined_up(model, decodes, prompts, [now, after], safety=safety, take_all_that_fits=everything)
    budget = chosen(lined)
    assert budget == reference.chunk(forward, [now, after])
    assert budget == forward.within(now) == forward.base or forward.seconds(budget) * safety <= now


@quick
@given(any_models, decode_lists, prompt_lists, shares, st.sampled_from([1, 16]), st.booleans(), st.integers(20, 300))
def test_a_window_of_one_is_greedy(
    model: LatencyModel, decodes: Entries, prompts: Entries, now: float, step: int, everything: bool, cap: int
) -> None:
    """TimeToBudget of what the decodes can wait, whether or not it holds everything."""
    lined, forward = lined_up(
        model, decodes, prompts, [now], window=1, step_tokens=step, take_all_that_fits=everything, max_tokens=cap
    )
    assert chosen(lined) == forward.within(now)


# Where the paper is silent: the first iteration of a window is held to T_cur however it is chosen (holes 3 and 12).


def test_greedy_in_the_paper_mode() -> None:
    scene = Scene([decoding(0.025), prompt(6000, 60.0)])
    decision = scene.decide(linear(0.005, 1e-5), mode="paper", window=1, max_tokens=4000)
    assert decision.path == "chunker"
    assert decision.predicted_seconds <= 0.025


def test_the_most_tokens_in_the_paper_mode() -> None:
    scene = Scene([decoding(0.025), prompt(6000, 60.0)])
    decision = scene.decide(linear(0.005, 1e-5), mode="paper", objective="max_tokens", max_tokens=4000)
    assert decision.path == "chunker"
    assert decision.predicted_seconds <= 0.025


def test_long_windows_in_the_paper_mode() -> None:
    scene = Scene([decoding(0.025), prompt(6000, 60.0)])
    decision = scene.decide(linear(0.005, 1e-5), mode="paper", window=3, max_tokens=4000)
    assert decision.path == "chunker"
    assert decision.predicted_seconds <= 0.025


@pytest.mark.parametrize("model", [linear(2.0**-7, 2.0**-14), load_model("h100-tp1")], ids=["linear", "h100-tp1"])
def test_an_idle_engine_is_given_work(model: LatencyModel) -> None:
    """Nothing decodes, and the prompts together are more than B."""
    decision = Scene([prompt(500, 60.0)] * 10).decide(model, max_tokens=2048)
    assert decision.path == "chunker"
    assert decision.total > 0


LATE, NO_SLO = decoding(-1.0, 300), decoding(1.0, 300, tbt=0.0)


@pytest.mark.parametrize("others", [[], [LATE], [NO_SLO], [LATE] * 8])
def test_without_a_safe_decode_the_cap_alone_binds(others: list[Any]) -> None:
    """Nothing of this iteration is worth leaving to the next: no decode is waiting that could still be in time."""
    model = linear(2.0**-9, 2.0**-14, prefill_squares=2.0**-30, prefill_work=2.0**-29)
    decision = Scene([*others, prompt(6000, 60.0)]).decide(model, max_tokens=2048)
    assert decision.path == "chunker"
    assert decision.total == 2048


# The most tokens in two iterations.


def most_tokens(forward: Forward, now: float, after: float) -> int:
    """b + b' with T(b) <= T_cur and T(b) + T(b') <= T_cur + T_next; b from the largest down, by every fourth step."""
    step, safety = int(forward.rules["step_tokens"]), forward.rules["safety"]
    top = forward.within(now)
    if forward.base + forward.prompt_tokens <= top:
        return top
    grid = sorted({top, forward.base, *range(0, top, 4 * step)}, reverse=True)
    scores: dict[int, int] = {}
    for budget in grid:
        if budget < forward.base or (budget > forward.base and forward.seconds(budget) > now / safety):
            continue
        left = (now + after) / safety - forward.seconds(budget)
        furthest = min(forward.fill.tokens, budget + forward.highest - forward.base)
        ends = [end for end in range(furthest, budget, -step) if forward.seconds_after(budget, end) <= left]
        scores[budget] = max(ends, default=budget)
    return max(budget for budget, score in scores.items() if score == max(scores.values()))


@settings(quick, max_examples=80)
@given(monotone, decode_lists, prompt_lists, shares, shares, st.sampled_from([1, 4, 16]), st.sampled_from([1.0, 1.25]))
def test_the_most_tokens_are_found(
    model: LatencyModel, decodes: Entries, prompts: Entries, now: float, after: float, step: int, safety: float
) -> None:
    lined, forward = lined_up(
        model, decodes, prompts, [now, after], objective="max_tokens", step_tokens=step, safety=safety
    )
    found = choose_most_tokens(lined.work, lined.rows, lined.rules, lined.facts, lined.model)
    assert found == most_tokens(forward, now, after)


def test_the_figure_of_the_paper() -> None:
    """Fewer tokens now leave room for more in the next iteration, and for more in the same 150 ms (hole 3)."""
    model = linear_model("none", 0.0, prefill_tokens=0.00005, prefill_squares=0.4e-7)
    lined, forward = lined_up(
        model, [], [(1000, 0)] * 4, [0.077, 0.073], objective="max_tokens", max_tokens=2048, step_tokens=4
    )
    found = int(choose_most_tokens(lined.work, lined.rows, lined.rules, lined.facts, lined.model))
    greedy = forward.within(0.077)
    assert found == most_tokens(forward, 0.077, 0.073)
    assert found < greedy

    def together(budget: int) -> int:
        left = 0.150 - forward.seconds(budget)
        return max(end for end in range(budget, 4001) if forward.seconds_after(budget, end) <= left)

    assert together(found) > together(greedy)


# Windows of three and four.


def best_firsts(forward: Forward, seconds: list[float]) -> tuple[int, float]:
    """The first part of the split in cells of least time (the largest of equal ones), by trying all splits."""
    base = forward.base
    budgets = [forward.within(share) - base for share in seconds]
    total = min(sum(budgets), forward.prompt_tokens)
    if base + forward.prompt_tokens <= base + budgets[0]:
        return base + budgets[0], 0.0
    cell = max(64, -(-total // 64))
    limits = [budget // cell for budget in budgets]
    cells = min(sum(limits), total // cell)
    if cells == 0:
        return base + budgets[0], 0.0

    @cache
    def iteration(start: int, stop: int) -> float:
        return forward.seconds_after(base + start * cell, base + stop * cell)

    def cost(split: tuple[int, ...]) -> float:
        ends = [sum(split[:j]) for j in range(len(split) + 1)]
        return sum(iteration(start, stop) for start, stop in pairwise(ends))

    splits = [s for s in product(*(range(limit + 1) for limit in limits)) if sum(s) == cells]
    costs = [cost(split) for split in splits]
    firsts = [split[0] for split, seconds in zip(splits, costs, strict=True) if seconds <= min(costs) + 1e-12]
    chosen = base + cell * max(firsts)
    return (chosen if forward.seconds(chosen) <= seconds[0] else base + budgets[0]), cell


@st.composite
def long_queues(draw: st.DrawFn) -> Entries:
    return draw(st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0, 0, 40, 300])), min_size=1, max_size=5))


@settings(quick, max_examples=120)
@given(
    st.one_of(any_models, convex_models()),
    decode_lists,
    long_queues(),
    st.lists(shares, min_size=4, max_size=4),
    st.sampled_from([3, 4]),
    st.booleans(),
)
def test_long_windows_are_split_at_best(
    model: LatencyModel, decodes: Entries, prompts: Entries, seconds: list[float], window: int, expected: bool
) -> None:
    lined, forward = lined_up(
        model, decodes, prompts, seconds[:window], window=window, expected_decodes=expected, max_tokens=320
    )
    found = choose_over_window(lined.work, lined.rows, lined.rules, lined.facts, lined.model)
    best, _ = best_firsts(forward, seconds[:window])
    assert found == best


@pytest.mark.parametrize(("expected", "now"), [(False, 193), (True, 1)])
def test_long_windows_know_who_will_decode(expected: bool, now: int) -> None:
    """Decodes are dear here, so the fewer iterations a finished prompt decodes in, the better; else: the most now."""
    model = linear_model("none", 0.0, decodes=2.0**-8, prefill_tokens=2.0**-16)
    parameters = {"window": 3, "take_all_that_fits": False, "expected_decodes": expected}
    lined, forward = lined_up(model, [(1, 16)], [(64, 0)] * 3, [0.5, 0.5, 0.5], **parameters)
    assert choose_over_window(lined.work, lined.rows, lined.rules, lined.facts, lined.model) == now
    base, costs = forward.base, [0.0, 0.0]
    for position, ends in enumerate([(193, 193, 193), (1, 1, 193)]):
        costs[position] = sum(forward.seconds_after(low, high) for low, high in pairwise((base, *ends)))
    assert (costs[1] < costs[0]) == expected


@settings(quick, max_examples=3)
@given(convex_models(), st.integers(4300, 6000))
def test_more_than_64_cells_are_made_larger(model: LatencyModel, missing: int) -> None:
    seconds = [0.25, 0.5, 0.5]
    prompts = [(missing // 3, 0)] * 4
    lined, forward = lined_up(model, [(1, 9)], prompts, seconds, window=3, max_tokens=2048)
    best, cell = best_firsts(forward, seconds)
    assume(cell)
    assert choose_over_window(lined.work, lined.rows, lined.rules, lined.facts, lined.model) == best


def test_long_windows_keep_within_it_where_more_tokens_take_less_time() -> None:
    """300 tokens take 1 ms and fit, 64 take 2 ms and do not; four times 64 are what takes the least time."""
    table = (0.0, *[0.001] * 63, *[0.002] * 64, *[0.009] * 130, *[0.001] * 100)
    model = LatencyModel("t/1", "none", {"global": Expert(0.0, (0.0,) * 7)}, table)
    lined, forward = lined_up(model, [], [(300, 0)], [0.0015] * 4, window=4, max_tokens=320, take_all_that_fits=False)
    budget = choose_over_window(lined.work, lined.rows, lined.rules, lined.facts, lined.model)
    assert forward.seconds(budget) <= 0.0015
