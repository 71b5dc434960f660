"""MLPS, the order of the prompts, and who of them finds a seat and KV blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.forecast import MISSING
from sidecar.policies.common.sorting import sort_keys
from sidecar.policies.slidingserve.priority import line_up, urgency, write_keys
from tests.slidingserve.reference import Prompt, Taken, sort_key
from tests.slidingserve.scenes import LIMITS, Lined, Scene, decoding, line_up_as_given, linear, prompt
from tests.slidingserve.test_decision_reference import scenes

quick = settings(max_examples=200, deadline=None, derandomize=True)
FREE = linear(0.0, 2.0**-30)
ALL = 4096
"""A model and a B by which all prompts fit into one iteration, so that a plan holds them all, in their order."""


def pooled(queue: list[Prompt], seats: int = 1000, free_blocks: int = 1000, **parameters: Any) -> Lined:
    """Prompts in the pool, with places to take; the fill is still to be laid out."""
    lined = line_up_as_given(linear(), [], [(p.missing, p.context, p.slack) for p in queue], **parameters)
    for name in ("protected", "waiting", "blocks"):
        lined.work.pool[name] = [getattr(p, name) for p in queue]
    for name, value in (("seats", seats), ("free_blocks", free_blocks), ("open_blocks", free_blocks)):
        lined.facts[name] = value
    return lined


def ordered(lined: Lined, throughput: float) -> list[int]:
    """Rows of the pool, first to last; without those that are passed over."""
    work, rules, facts, _, count = lined
    write_keys(work, count, rules, throughput)
    keys = work.keys[sort_keys(work.keys, count)]
    kept, rows = line_up(work, keys, count, rules, facts)
    assert rows == kept, "the budgets of these tests are larger than all prompts together"
    order: list[int] = work.lines["row"][:kept].tolist()
    assert work.fill[:kept, MISSING].tolist() == work.pool["remaining"][order].tolist()
    assert facts["prompt_tokens"] == work.pool["remaining"][order].sum() == work.fill[kept, 0]
    return order


prompts = st.builds(
    lambda missing, slack, waiting, protected, blocks: Prompt(0, missing, 0, slack, waiting, protected, blocks),
    st.one_of(st.integers(1, 60), st.sampled_from([8, 16])),
    st.one_of(st.integers(-4, 40).map(lambda n: n / 64), st.sampled_from([1e-5, -1e-5, 1e6])),
    st.booleans(),
    st.booleans(),
    st.integers(0, 20),
)


@quick
@given(
    st.lists(prompts, max_size=20),
    st.sampled_from(["robust", "paper"]),
    st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    st.sampled_from([64.0, 1000.0]),
    st.sampled_from([0.001, 0.125]),
)
@example([Prompt(0, 16, 0, 0.25), Prompt(0, 17, 0, 0.25), Prompt(0, 15, 0, 0.25)], "robust", 1.0, 64.0, 0.001)
def test_the_order_is_that_of_the_tuples(
    queue: list[Prompt], mode: str, alpha: float, throughput: float, eps_seconds: float
) -> None:
    """(expired, 1 - g, 1 - e, r), then the place in the queues; `paper` does not ask what is expired."""
    rules = {"alpha": alpha, "eps_seconds": eps_seconds, "expired_last": mode == "robust"}
    expected = sorted(range(len(queue)), key=lambda row: sort_key(queue[row], throughput, rules))
    lined = pooled(queue, mode=mode, alpha=alpha, eps_seconds=eps_seconds)
    assert ordered(lined, throughput) == expected


def test_urgency() -> None:
    assert urgency(500.0, 0.04, 5000.0, 0.001) == 2.5
    assert urgency(10.0, 0.0, 100.0, 0.125) == 0.8
    assert urgency(10.0, -7.0, 100.0, 0.125) == 0.8


def test_one_that_needs_just_what_there_is_is_not_urgent() -> None:
    """16 tokens in 1/4 s at 64 tokens/s: as much as there is, not more. 17 are urgent, so the longer one goes first."""
    assert ordered(pooled([Prompt(0, 16, 0, 0.25), Prompt(0, 17, 0, 0.25)], alpha=1.0), 64.0) == [1, 0]


def test_expired_ones_are_first_in_the_paper_and_last_here() -> None:
    """Even a protected one: what is late already cannot be helped."""
    queue = [Prompt(0, 40, 0, 1.0, protected=True), Prompt(0, 30, 0, -1.0, protected=True), Prompt(0, 5, 0, 9.0)]
    assert ordered(pooled(queue, mode="paper", alpha=1.0), 1000.0) == [1, 0, 2]
    assert ordered(pooled(queue, mode="robust", alpha=1.0), 1000.0) == [0, 2, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 16, 17, 24, 31, 64, 65, 1000])
def test_keys_are_sorted(count: int) -> None:
    rng = random.Random(count)
    for keys in (
        [rng.randrange(1 << 61) for _ in range(count)],
        [rng.randrange(3) for _ in range(count)],
        list(range(count)),
        list(range(count, 0, -1)),
    ):
        table = np.full((2, count + 1), -1)
        table[0, :count] = keys
        row = sort_keys(table, count)
        assert table[row, :count].tolist() == sorted(keys)
        assert table[:, count].tolist() == [-1, -1], "what is behind the keys stays"


@pytest.mark.parametrize(
    ("protect", "order"),
    [("none", [0, 1, 2, 3, 4]), ("priority", [4, 0, 1, 2, 3]), ("running", [2, 3, 0, 1, 4])],
)
def test_who_is_protected(protect: str, order: list[int]) -> None:
    """Priority: below 0. Running: what has been started; 1 waits with a cached prefix, 0 runs without any token."""
    scene = Scene(
        [
            prompt(10, running=True, priority=2),
            prompt(20, context=48, running=False),
            prompt(30, context=16),
            prompt(40, context=16, running=True),
            prompt(50, priority=-1),
        ]
    )
    decision = scene.decide(FREE, max_tokens=ALL, protect=protect)
    assert list(decision.tokens) == order


@pytest.mark.parametrize(
    ("sequences", "got"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 2]), (4, [0, 3, 2, 1]), (9, [0, 3, 2, 1])]
)
def test_seats_go_by_the_order(sequences: int, got: list[int]) -> None:
    """The decode has one; the shortest of the waiting prompts get the rest."""
    scene = Scene([decoding(), prompt(90), prompt(60), prompt(30)], replace(LIMITS, max_sequences=sequences))
    assert list(scene.decide(FREE, max_tokens=ALL).tokens) == got


def test_what_does_not_fit_is_passed_over() -> None:
    """10 blocks: 2 for the running prompt, so 7 for the first in the order, none for the second, 1 for the third."""
    requests = [prompt(32, running=True), prompt(112, priority=-2), prompt(20), prompt(16)]
    scene = Scene(requests, free_kv_blocks=10)
    assert list(scene.decide(FREE, max_tokens=ALL).tokens) == [1, 3, 0]
    assert list(replace(scene, free_kv_blocks=11).decide(FREE, max_tokens=ALL).tokens) == [1, 3, 0]
    assert list(replace(scene, free_kv_blocks=12).decide(FREE, max_tokens=ALL).tokens) == [1, 3, 2, 0]


def test_a_running_prompt_needs_no_seat() -> None:
    full = replace(LIMITS, max_sequences=1)
    scene = Scene([prompt(32, running=True), prompt(16, running=True), prompt(8)], full)
    assert list(scene.decide(FREE, max_tokens=ALL).tokens) == [1, 0]


@quick
@given(st.lists(prompts, max_size=12), st.integers(0, 6), st.integers(0, 40))
def test_seats_and_blocks_are_never_overdrawn(queue: list[Prompt], seats: int, free_blocks: int) -> None:
    """And nobody is passed over who would still have found both."""
    order = ordered(pooled(queue, seats, free_blocks), 100.0)
    admitted = [row for row in order if queue[row].waiting]
    assert len(admitted) <= seats
    assert sum(queue[row].blocks for row in admitted) <= free_blocks
    assert all(row in order for row, entry in enumerate(queue) if not entry.waiting)
    if len(admitted) < seats:
        left = free_blocks - sum(queue[row].blocks for row in admitted)
        passed = [entry for row, entry in enumerate(queue) if row not in order]
        assert all(entry.blocks > left for entry in passed)


@settings(quick, max_examples=100)
@given(scenes())
def test_the_order_of_whole_scenes(scene: Scene) -> None:
    """With decodes, preemption and admission around it; everything fits, so the plan holds them in their order."""
    taken = Taken(scene, {"protect": "priority", "alpha": 4.0, "eps_seconds": 0.001, "expired_last": True})
    throughput = ALL / (ALL * 2.0**-30)
    decision = scene.decide(FREE, max_tokens=ALL)
    assert list(decision.tokens) == [*taken.decodes, *(entry.handle for entry in taken.order(throughput))]
    assert decision.victims == taken.split[1]
