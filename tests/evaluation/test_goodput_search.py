"""The search for a goodput: what a scan of the whole grid finds, in few looks; caps; when a rate counts as met."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.goodput.caps import full_effort, quick_effort, survivors
from evaluation.goodput.points import Point, RunKey, base_policy, with_cap
from evaluation.goodput.rates import rate_of, step_at
from evaluation.goodput.runner import Limit, meets_at
from evaluation.goodput.search import COARSE, Bracket, search_around, search_upwards

GRID = st.tuples(st.integers(-120, 120), st.integers(0, 150)).map(lambda ends: (ends[0], ends[0] + ends[1]))


class Looks:
    """Counts the looks at each grid point of a function that is told."""

    def __init__(self, meets: Callable[[int], bool]) -> None:
        self._meets, self.points = meets, list[int]()

    def __call__(self, step: int) -> bool:
        self.points.append(step)
        return self._meets(step)


def scan(meets: Callable[[int], bool], lowest: int, highest: int) -> Bracket:
    """The plain definition: the last point before the first that fails."""
    good = None
    for step in range(lowest, highest + 1):
        if not meets(step):
            return Bracket(good, step)
        good = step
    return Bracket(good, None)


@settings(max_examples=40)
@given(GRID, st.integers(-150, 300), st.integers(-150, 300))
def test_for_monotone_violations_both_searches_find_what_a_scan_finds(
    grid: tuple[int, int], last: int, hint: int
) -> None:
    lowest, highest = grid
    truth = scan(lambda step: step <= last, lowest, highest)
    upwards = Looks(lambda step: step <= last)
    assert search_upwards(upwards, lowest, highest) == truth
    around = Looks(lambda step: step <= last)
    hint = min(max(hint, lowest), highest)
    assert search_around(around, hint, lowest, highest) == truth
    for looks in (upwards, around):
        assert all(lowest <= step <= highest for step in looks.points)
        coarse = math.ceil((highest - lowest) / COARSE)
        assert len(looks.points) <= coarse + math.ceil(math.log2(COARSE)) + 6, looks.points
        assert len(looks.points) <= len(set(looks.points)) + 2, "a point is hardly ever looked at twice"


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(1, 12))
def test_a_coarser_resolution_ends_within_it(last: int, resolution: int) -> None:
    bracket = search_upwards(lambda step: step <= last, 0, 240, resolution)
    assert bracket.meets is not None
    assert bracket.fails is not None
    assert bracket.meets <= last < bracket.fails <= bracket.meets + resolution


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=120), st.data())
def test_whatever_the_violations_a_bracket_is_what_was_seen(meets: list[bool], data: st.DataObject) -> None:
    """Of a function that is not monotone no coarse search finds the first gap for sure, but it says nothing false."""
    highest = len(meets) - 1
    hint = data.draw(st.integers(0, highest))
    for bracket in (
        search_upwards(lambda step: meets[step], 0, highest),
        search_around(lambda step: meets[step], hint, 0, highest),
    ):
        assert bracket.meets is None or meets[bracket.meets]
        assert bracket.fails is None or not meets[bracket.fails]
        if bracket.meets is not None and bracket.fails is not None:
            assert bracket.fails == bracket.meets + 1
        if bracket.fails is None:
            assert bracket.meets == highest


def test_a_policy_that_stalls_at_low_load_gets_no_credit_for_higher_rates() -> None:
    def stalls(step: int) -> bool:
        return 30 < step <= 100

    assert search_upwards(stalls, 0, 150) == Bracket(None, 0)
    assert search_around(stalls, 40, 0, 150) == Bracket(None, 0), "one coarse step below the hint shows it"


def test_what_a_hint_above_the_goodput_costs() -> None:
    looks = Looks(lambda step: step <= 50)
    assert search_around(looks, 56, 0, 400) == Bracket(50, 51)
    assert looks.points[0] == 56 - COARSE
    assert len(looks.points) <= 8


def test_the_grid_of_rates_has_steps_of_two_percent_and_reads_the_same_everywhere() -> None:
    for step in range(-300, 300):
        assert step_at(rate_of(step)) == step
        assert rate_of(step) == float(f"{rate_of(step):.6g}")
    assert rate_of(36) / rate_of(35) == pytest.approx(1.02, rel=1e-5)


@settings(max_examples=40)
@given(st.dictionaries(st.integers(1, 4096), st.floats(0, 10), min_size=1), st.integers(1, 12))
def test_survivors_are_the_best_caps(goodputs: dict[int, float], keep: int) -> None:
    kept = survivors(goodputs, keep)
    assert kept == sorted(kept)
    assert len(kept) == min(keep, len(goodputs))
    worst = min(goodputs[cap] for cap in kept)
    assert all(goodputs[cap] <= worst for cap in goodputs if cap not in kept)
    assert survivors(dict.fromkeys(goodputs, 1.0), 1) == [min(goodputs)], "of equal caps the smallest"


def test_rounds_grow_and_end_with_all_requests_and_one_cap() -> None:
    effort = full_effort(3000, 3)
    sizes = [(entry.requests * len(entry.seeds), entry.keep, entry.resolution) for entry in effort.rounds]
    assert sizes == sorted(sizes, key=lambda size: size[0])
    assert (effort.final.requests, effort.final.seeds, effort.final.keep) == (3000, (0, 1, 2), 1)
    assert effort.final.resolution == 1
    assert quick_effort().rounds == (quick_effort().final,)
    assert full_effort(1, 1).rounds[0].requests == 1


@pytest.mark.parametrize(
    ("text", "base", "cap"),
    [
        ("vllm", "vllm", None),
        ("vllm:max_tokens=512", "vllm", 512),
        ("slidingserve:alpha=2,max_tokens=96,window=1", "slidingserve:alpha=2,window=1", 96),
    ],
)
def test_a_cap_is_taken_out_of_a_policy_and_put_back(text: str, base: str, cap: int | None) -> None:
    assert base_policy(text) == (base, cap)
    if cap is not None:
        assert base_policy(with_cap(base, cap)) == (base, cap)


def keys(requests: int, seeds: int) -> tuple[RunKey, ...]:
    return tuple(RunKey("p", "w", "vllm", 1.0, seed, requests) for seed in range(seeds))


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(100, 1000),
    st.sampled_from([1.0, 6.0]),
    st.floats(0.001, 0.05),
)
def test_a_rate_is_met_when_the_runs_together_miss_at_most_the_limit(
    missed: list[int], requests: int, follow: float, share: float
) -> None:
    made = []

    def run(key: RunKey, allowed: int | None) -> Point:
        made.append(key.seed)
        assert allowed is not None
        assert allowed >= 0
        count = missed[key.seed]
        return Point(key, False, allowed + 1) if count > allowed else Point(key, True, count)

    met = meets_at(run, keys(requests, len(missed)), Limit(share, follow))
    assert met == (sum(missed) <= share * requests * len(missed) + 1e-9)
    assert made == list(range(len(made)))
    if met:
        assert len(made) == len(missed)
