"""Whole decisions, held against plain Python (`tests.slidingserve.reference`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from predictor.features import FEATURES
from predictor.model import Expert, LatencyModel
from sidecar.policies.common.intake import slack_seconds
from sidecar.policies.common.sorting import FAR_SECONDS
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.queues import REQUEST
from slidingserve.contract.values import PauseState
from tests.predictor.reference import models
from tests.slidingserve import reference
from tests.slidingserve.scenes import LIMITS, Decision, Request, Scene, decoding, linear, make_policy, prompt

# All numbers are binary fractions on one grid, so sums are exact, and what is equal is equal in any order of adding.
SECONDS_PER_UNIT = (2**-8, 2**-24, 2**-24, 2**-22, 2**-16, 2**-22, 2**-16, 2**-18)  # intercept, x1 .. x7
TABLE_SECONDS_PER_UNIT = 2**-10
SWITCHES = (
    "clamp_chunk",
    "clamp_next_budget",
    "cap_next_budget",
    "advance_queue",
    "skip_lost_decodes",
    "expired_last",
    "drop_expired_risks",
    "chunk_if_infeasible",
    "anchor_within_tbt",
    "clamp_budget_sum",
    "take_all_that_fits",
    "anchor_in_sums",
    "recheck_batch",
    "expected_decodes",
    "fill_remainder",
)


def in_time(model: LatencyModel) -> LatencyModel:
    """A random model with amounts that times of iterations have; what is negative becomes 0."""

    def scaled(expert: Expert) -> Expert:
        first, *weights = (
            max(0.0, amount) * unit
            for amount, unit in zip((expert.intercept_seconds, *expert.weights), SECONDS_PER_UNIT, strict=True)
        )
        return Expert(first, tuple(weights))

    table = tuple(max(0.0, seconds) * TABLE_SECONDS_PER_UNIT for seconds in model.table_seconds)
    return replace(model, experts={name: scaled(expert) for name, expert in model.experts.items()}, table_seconds=table)


@st.composite
def staircases(draw: st.DrawFn) -> LatencyModel:
    """The same for all kinds of iterations: some time for each token begun of 8, 16 or 64, some for each token."""
    width, units = draw(st.sampled_from([8, 16, 64])), draw(st.integers(1, 16))
    table = tuple(units * 2**-10 * (tokens // width) for tokens in range(1025))
    weight = draw(st.integers(0, 8)) * 2**-16
    weights = tuple(weight if name in ("decodes", "prefill_tokens") else 0.0 for name in FEATURES)
    return LatencyModel("stairs/1", "none", {"global": Expert(2**-9, weights)}, table)


straight = st.builds(lambda start, each: linear(start * 2**-10, each * 2**-16), st.integers(0, 20), st.integers(0, 40))
any_models = st.one_of(straight, staircases(), models().map(in_time))

slacks = st.one_of(st.integers(-8, 80), st.integers(1, 24)).map(lambda n: n / 512)
tbts = st.sampled_from([0.0, 1 / 64, 1 / 32, 1 / 16])
decode_requests = st.builds(
    lambda slack, context, tbt, output, drafts: decoding(slack, context, tbt, output)._replace(speculative=drafts),
    slacks,
    st.integers(8, 300),
    tbts,
    st.integers(1, 8),
    st.sampled_from([0, 0, 0, 2]),
)
prompt_requests = st.builds(
    lambda missing, slack, context, output, running, priority, tbt, ttlt: Request(
        max(1, missing + context - output), slack, context, output, tbt, priority, running, ttlt
    ),
    st.one_of(st.integers(9, 120), st.integers(1, 3).map(lambda n: 8 + n), st.sampled_from([16, 48])),
    slacks,
    st.sampled_from([0, 0, 0, 16, 100, 250]),
    st.sampled_from([0, 0, 0, 1, 7]),
    st.one_of(st.none(), st.booleans()),
    st.sampled_from([0, 0, -1, 3]),
    tbts,
    st.sampled_from([0.0, 1.0, 2.0]),
)
tiny_prompts = st.builds(
    lambda missing, slack, context: prompt(missing, slack, context), st.integers(1, 3), slacks, st.sampled_from([0, 16])
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Decodes and prompts in any order, often with seats and KV blocks to spare."""
    requests = draw(st.lists(decode_requests, max_size=10)) + draw(
        st.lists(
            st.one_of(prompt_requests, prompt_requests, tiny_prompts), min_size=draw(st.integers(0, 5)), max_size=8
        )
    )
    limits = replace(LIMITS, max_sequences=draw(st.sampled_from([256, 256, 1, 4, 8])))
    free = draw(st.one_of(st.none(), st.none(), st.integers(0, 40)))
    return Scene(draw(st.permutations(requests)), limits, free)


@st.composite
def crowded_scenes(draw: st.DrawFn) -> Scene:
    """Running requests whose next tokens find few KV blocks, or none, and some that wait."""
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    limits = replace(LIMITS, kv_block_tokens=block_tokens, max_sequences=draw(st.sampled_from([256, 3])))
    context = st.sampled_from([15, 16, 32, 100])
    running = st.one_of(
        st.builds(
            lambda u, drafts: decoding(1 / 16, u)._replace(speculative=drafts), context, st.sampled_from([0, 0, 2])
        ),
        st.builds(lambda missing, slack, u: prompt(missing, slack, u), st.integers(1, 80), slacks, context),
        st.builds(lambda missing, slack: prompt(missing, slack, running=True), st.integers(1, 80), slacks),
    )
    waiting = st.builds(lambda missing, slack: prompt(missing, slack), st.integers(1, 40), slacks)
    requests = draw(st.lists(running, min_size=1, max_size=7)) + draw(st.lists(waiting, max_size=3))
    return Scene(draw(st.permutations(requests)), limits, draw(st.integers(0, 12)))


parameters = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["robust", "paper"]),
        "max_tokens": st.sampled_from([0, 16, 32, 64, 100, 256, 1000]),
        "window": st.sampled_from([1, 2, 2, 2]),
        "alpha": st.sampled_from([0.0, 0.25, 1.0, 4.0]),
        "protect": st.sampled_from(["none", "priority", "running"]),
        "safety": st.sampled_from([1.0, 1.0, 1.25]),
        "tolerance_tokens": st.sampled_from([2, 30]),
    },
    optional={
        "step_tokens": st.sampled_from([1, 4, 16]),
        "knapsack_step_tokens": st.sampled_from([1, 8, 16]),
        "max_anchors": st.sampled_from([0, 1, 2, 8]),
        "max_candidates": st.sampled_from([0, 1, 3, 32]),
        **dict.fromkeys(SWITCHES, st.booleans()),
    },
)


def assert_right(scene: Scene, model: LatencyModel, chosen: dict[str, Any], may_admit: bool = True) -> Decision:
    """Compares a decision with the reference's."""
    policy = make_policy(model, scene.limits, **chosen)
    pause = PauseState.RUNNING if may_admit else PauseState.PAUSED_NEW
    decision = scene.decide_by(policy, pause_state=pause)
    rules = SlidingServeParameters(**chosen).resolved()
    expected = reference.decide(scene, model, rules, may_admit)
    event(decision.path)
    assert decision.path == expected.path
    assert decision.victims == expected.victims
    assert set(decision.demoted) == expected.demoted
    assert len(decision.demoted) == len(expected.demoted)
    seconds = [seconds for tokens, seconds in expected.plans if tokens == list(decision.tokens.items())]
    assert seconds, f"{list(decision.tokens.items())} is none of {expected.plans}"
    assert decision.predicted_seconds == pytest.approx(seconds[0], rel=1e-12, abs=1e-12)
    return decision


quick = settings(max_examples=300, deadline=None, derandomize=True)


@quick
@given(scenes(), any_models, parameters, st.sampled_from([True, True, True, False]))
def test_decisions(scene: Scene, model: LatencyModel, chosen: dict[str, Any], may_admit: bool) -> None:
    assert_right(scene, model, chosen, may_admit)


@settings(quick, max_examples=300)
@given(crowded_scenes(), straight, st.sampled_from(["robust", "paper"]))
def test_decisions_where_kv_blocks_are_few(scene: Scene, model: LatencyModel, mode: str) -> None:
    assert_right(scene, model, {"mode": mode, "window": 2})


def test_prompts_that_wait_for_each_other() -> None:
    """No decode, no free block: the last running prompt is preempted, and the first goes on; nobody is admitted."""
    scene = Scene([prompt(20, context=16), prompt(20, context=32), prompt(5)], free_kv_blocks=0)
    decision = scene.decide(linear(2.0**-8, 2.0**-16), max_tokens=4096)
    assert decision.victims == [1]
    assert decision.tokens == {0: 20}


def test_a_victims_own_need_is_given_back() -> None:
    """Two decodes lack a block each and one is free: the second makes room, and only the second."""
    scene = Scene([decoding(context=16), decoding(context=16), prompt(5)], free_kv_blocks=1)
    decision = scene.decide(linear(2.0**-8, 2.0**-16), max_tokens=4096)
    assert decision.victims == [1]
    assert decision.tokens == {0: 1}
    three = Scene([decoding(context=32)] * 3, free_kv_blocks=0)
    assert three.decide(linear(2.0**-8, 2.0**-16)).victims == [2], (
        "its two blocks and its need are enough for the others"
    )


@pytest.mark.long
@settings(quick, max_examples=10_000)
@given(scenes(), any_models, parameters, st.sampled_from([True, True, True, False]))
def test_many_decisions(scene: Scene, model: LatencyModel, chosen: dict[str, Any], may_admit: bool) -> None:
    assert_right(scene, model, chosen, may_admit)


@pytest.mark.parametrize(
    ("output", "ttft", "tbt", "ttlt", "slack"),
    [
        (0, 2.0, 0.5, 0.0, 2.0),
        (0, 2.0, 0.0, 9.0, 2.0),
        (3, 2.0, 0.5, 9.0, 3.5),  # its fourth token
        (3, 2.0, 0.0, 9.0, 9.0),  # nothing is said of tokens: due with the last
        (3, 2.0, 0.0, 0.0, FAR_SECONDS),
        (0, 0.0, 0.5, 9.0, 9.0),
        (0, 0.0, 0.5, 0.0, FAR_SECONDS),
        (3, 0.0, 0.5, 0.0, FAR_SECONDS),  # without a first deadline there is no fourth
        (0, 1e9, 0.0, 0.0, FAR_SECONDS),
    ],
)
def test_when_a_token_is_due(output: int, ttft: float, tbt: float, ttlt: float, slack: float) -> None:
    """Slack of a request that arrived 10 s ago, plus those 10 s."""
    table = np.zeros(1, REQUEST)
    for name, value in {"arrival": 90.0, "output": output, "ttft": ttft, "tbt": tbt, "ttlt": ttlt}.items():
        table[name] = value
    assert slack_seconds(table, 0, 100.0) == min(slack - 10.0 if slack < FAR_SECONDS else slack, FAR_SECONDS)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_models, st.sampled_from([1.0, 1.5, 2.0, 8.0]), st.sampled_from([0, 96, 5000]), st.sampled_from([100, 4096]))
def test_the_cap(model: LatencyModel, stretch: float, given_tokens: int, limit: int) -> None:
    limits = replace(LIMITS, max_tokens_per_iteration=limit)
    policy = make_policy(model, limits, max_stretch=stretch, max_tokens=given_tokens)
    rules = {"max_tokens": given_tokens, "max_stretch": stretch}
    assert policy.max_tokens == reference.cap_of(model, rules, limit)
