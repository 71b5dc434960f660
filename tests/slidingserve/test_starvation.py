"""Prompts never starve in `robust`: at light load, when all are too late, when tokens, seats and KV blocks lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.inprocess import InProcessSource
from evaluation.simulate import engine_limits
from evaluation.workloads import solo_ttft
from predictor.files import load_model
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from slidingserve.contract.values import EngineLimits, Floats, Ints
from tests.slidingserve.scenes import Request, Scene, decoding, linear, make_policy, prompt, source_with
from tests.strategies import (
    Feed,
    LinearTimer,
    assert_mirrors,
    assert_within_limits,
    feed,
    feeds,
    random_feed,
    run_to_end,
    tight_limits,
)

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
PROFILES = {"rtx3090-tp2": 1.0, "h100-tp1": 0.2}
"""Hardware, and mean seconds between arrivals that are light load on it."""

SWITCHES = [name for name, value in SlidingServeParameters().resolved().items() if isinstance(value, bool)]
NEEDED = ("take_all_that_fits", "cap_next_budget")
"""Without either of them prompts starve even at light load; any other can be turned around."""


class WatchingTimer:
    """A profile's times; keeps what the largest batch held.

    Attributes:
        most: requests in the largest batch.
        context: the longest context.
    """

    def __init__(self, profile: str) -> None:
        self.timer = ProfileTimer(load_profile(profile))
        self.most = 0
        self.context = 0

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        self.most = max(self.most, count)
        self.context = max(self.context, int(context[:count].max()))
        return self.timer.seconds(chunk, context, count)

    def bounds(self, prompts: Ints, cap: int) -> Floats:
        """Seconds to the first token: one full iteration under way at the arrival, then chunks up to the cap.

        Beside each chunk are as many decodes as there ever were, of the longest context that there was.
        """
        decodes = self.most - 1

        def iteration(chunk: int, context: int) -> float:
            tokens = np.array([chunk, *[1] * decodes])
            return self.timer.seconds(tokens, np.array([context, *[self.context] * decodes]), decodes + 1)

        size = cap - decodes
        under_way = iteration(size, self.context)
        alone = [
            sum(iteration(min(size, length - done), done) for done in range(0, length, size))
            for length in prompts.tolist()
        ]
        return under_way + np.array(alone)


def light_load(profile: str, seed: int, requests: int = 20) -> Feed:
    """Prompts that come one at a time, while a few others decode."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(PROFILES[profile] * rng.uniform(0.7, 1.3, requests))
    prompts, outputs = rng.integers(8, 2500, requests), rng.integers(40, 200, requests)
    return feed(list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)), ttft=1.0, tbt=0.05)


def without_hope(requests: Feed, profile: str) -> Feed:
    """The same, each due after half of the time that it takes alone: nobody can be saved, and then all have expired."""
    alone = solo_ttft(ProfileTimer(load_profile(profile)), requests.prompt_tokens)
    return replace(requests, ttft_slo_seconds=alone / 2)


def longest_wait(profile: str, requests: Feed, **parameters: Any) -> tuple[float, Outcome]:
    """The largest ratio of a TTFT to its bound, and what else happened."""
    limits = engine_limits(load_profile(profile))
    policy = make_policy(load_model(profile), limits, **parameters)
    source = source_with(load_model(profile), limits, **parameters)
    timer = WatchingTimer(profile)
    engine = SimulatedEngine(requests, limits, timer, source)
    run_to_end(engine)
    outcome = engine.outcome()
    assert outcome.finished.all()
    assert source.session.guarded == 0
    waited = outcome.first_token_seconds - outcome.arrival_seconds
    return float((waited / timer.bounds(requests.prompt_tokens, policy.max_tokens)).max()), outcome


at_light_load = pytest.mark.parametrize("profile", list(PROFILES))
with_and_without_hope = pytest.mark.parametrize("hope", [True, False], ids=["hope", "no hope"])


def loads(profile: str, seed: int, hope: bool) -> Feed:
    requests = light_load(profile, seed)
    return requests if hope else without_hope(requests, profile)


@at_light_load
@with_and_without_hope
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("how", [{}, {"window": 1}, {"objective": "max_tokens"}], ids=str)
def test_first_token_comes_after_the_prompts_own_chunks(
    profile: str, seed: int, hope: bool, how: dict[str, Any]
) -> None:
    """Not later than if the prompt had got all of B but the decodes' tokens in every iteration."""
    ratio, outcome = longest_wait(profile, loads(profile, seed, hope), **how)
    assert 0.3 < ratio <= 1.0
    assert outcome.fallbacks == 0


@at_light_load
@with_and_without_hope
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("window", [3, 4])
def test_longer_windows_leave_at_most_half_to_later(profile: str, seed: int, hope: bool, window: int) -> None:
    """They may put off what fits, as it takes no longer in all; twice the bound is never reached (measured: 1.6)."""
    ratio, outcome = longest_wait(profile, loads(profile, seed, hope), window=window)
    assert 0.3 < ratio <= 2.0
    assert outcome.fallbacks == 0


@at_light_load
@pytest.mark.parametrize("switch", [name for name in SWITCHES if name not in NEEDED])
def test_no_other_switch_is_needed(profile: str, switch: str) -> None:
    turned = not SlidingServeParameters().resolved()[switch]
    for hope in (True, False):
        ratio, _ = longest_wait(profile, loads(profile, 0, hope), **{switch: turned})
        # With nobody to be saved, what is neither expired nor chunked waits until it has expired: half its time alone.
        assert ratio <= (1.25 if switch == "chunk_if_infeasible" else 1.0)


@at_light_load
@pytest.mark.parametrize("how", [{"mode": "paper"}, *({name: False} for name in NEEDED)], ids=str)
def test_the_bound_can_be_missed(profile: str, how: dict[str, Any]) -> None:
    assert max(longest_wait(profile, loads(profile, seed, True), **how)[0] for seed in (0, 1, 2)) > 2.0


@at_light_load
def test_one_of_the_two_corrections_of_hole_7_is_needed_when_nobody_can_be_saved(profile: str) -> None:
    requests = loads(profile, 0, False)
    neither = {"drop_expired_risks": False, "chunk_if_infeasible": False}
    assert longest_wait(profile, requests, **neither)[0] > 2.0


lengths = st.integers(1, 900)
past = st.sampled_from([0.0, -0.01, -5.0])
expired = st.builds(prompt, missing=lengths, slack=past, context=st.sampled_from([0, 50]))
in_time = st.builds(prompt, missing=lengths, slack=st.sampled_from([1e-3, 0.03, 0.3, 10.0]), context=st.just(0))
decodes = st.builds(decoding, slack=st.sampled_from([-1.0, 0.02, 0.05, 1.0]))
variants = st.sampled_from(
    [{}, {"window": 1}, {"window": 3}, {"window": 4}, {"objective": "max_tokens"}, {"fill_remainder": True}]
)


@SETTINGS
@given(st.lists(st.one_of(expired, in_time, decodes), max_size=15), variants, st.sampled_from([64, 512, 4096]))
def test_expired_prompts_get_only_what_nobody_else_can_use(
    requests: list[Request], how: dict[str, Any], max_tokens: int
) -> None:
    decision = Scene(requests).decide(linear(0.005, 20e-6), max_tokens=max_tokens, **how)
    late = [place for place, request in enumerate(requests) if not request.output and request.slack <= 0.0]
    assert sorted(decision.demoted) == late
    if any(decision.tokens.get(place) for place in late):
        for place, request in enumerate(requests):
            if place not in late:
                assert decision.tokens[place] == request.prompt + request.output - request.computed
        order = list(decision.tokens)
        first = min(order.index(place) for place in late if place in order)
        assert set(order[first:]) <= set(late)


@pytest.mark.parametrize("how", [{}, {"window": 1}, {"window": 3}, {"objective": "max_tokens"}], ids=str)
def test_expired_requests_end_under_overload(how: dict[str, Any]) -> None:
    """Far more than the engine can do in time: most expire, all end."""
    requests = random_feed(7, 60, prompt=900, output=10, gap_seconds=0.02)
    limits = EngineLimits(max_tokens_per_iteration=512, max_sequences=16, kv_blocks=2000, kv_block_tokens=16)
    source = source_with(linear(0.010, 1e-3), limits, **how)
    engine = SimulatedEngine(requests, limits, LinearTimer(), source)
    run_to_end(engine)
    outcome = engine.outcome()
    assert outcome.finished.all()
    assert outcome.deadline_missed.mean() > 0.5


class CheckingSource(InProcessSource):
    """Holds every allocation against the engine, and the mirror too."""

    def __init__(self, limits: EngineLimits, **parameters: Any) -> None:
        super().__init__()
        self.session = source_with(linear(0.010, 1e-3), limits, **parameters).session
        self._limits = limits

    def decide(self, step: Any, snapshot: Callable[[], Any]) -> Any:
        allocation = super().decide(step, snapshot)
        full = snapshot()
        assert_mirrors(self.session, full, self._limits)
        assert_within_limits(allocation, full, self._limits)
        return allocation


def run_checked(requests: Feed, limits: EngineLimits, **parameters: Any) -> tuple[CheckingSource, Outcome]:
    source = CheckingSource(limits, **parameters)
    engine = SimulatedEngine(requests, limits, LinearTimer(), source)
    run_to_end(engine, most_steps=3000)
    outcome = engine.outcome()
    fits = requests.prompt_tokens + requests.output_tokens <= limits.kv_blocks * limits.kv_block_tokens
    assert outcome.finished.tolist() == fits.tolist()
    return source, outcome


every_variant = st.sampled_from(
    [{}, {"mode": "paper"}, {"window": 1}, {"window": 3}, {"window": 4}, {"objective": "max_tokens"}]
)


@SETTINGS
@given(feeds(), tight_limits(), every_variant)
def test_every_request_ends_however_little_there_is(requests: Feed, limits: EngineLimits, how: dict[str, Any]) -> None:
    run_checked(requests, limits, **how)


@SETTINGS
@given(feeds(), tight_limits(), st.sampled_from([{"window": 1}, {"window": 3}, {"objective": "max_tokens"}]))
def test_other_windows_and_objectives_leave_no_iteration_to_the_engine(
    requests: Feed, limits: EngineLimits, how: dict[str, Any]
) -> None:
    """An allocation that names nobody leaves the iteration to the engine's own policy, which counts it."""
    _, outcome = run_checked(requests, limits, **how)
    assert outcome.fallbacks == 0


@SETTINGS
@given(feeds(), tight_limits())
def test_the_guard_has_nothing_to_do_where_decodes_and_a_step_fit(requests: Feed, limits: EngineLimits) -> None:
    """At most 6 decodes and a step of 16 tokens; KV blocks for all."""
    ample = replace(limits, kv_blocks=1000, max_tokens_per_iteration=limits.max_tokens_per_iteration + 22)
    source, _ = run_checked(requests, ample)
    assert source.session.guarded == 0


@SETTINGS
@given(feeds(), tight_limits())
def test_the_guard_has_nothing_to_do_where_decodes_fit(requests: Feed, limits: EngineLimits) -> None:
    """At most 6 decodes, so a limit of 7 tokens holds them all and one more."""
    ample = replace(limits, kv_blocks=1000, max_tokens_per_iteration=limits.max_tokens_per_iteration + 6)
    source, _ = run_checked(requests, ample)
    assert source.session.guarded == 0


def test_b_is_never_above_the_engines_limit() -> None:
    limits = EngineLimits(max_tokens_per_iteration=10, max_sequences=8, kv_blocks=1000, kv_block_tokens=16)
    assert Scene([prompt(100)], limits).decide(linear(0.001, 1e-5)).total == 10


@SETTINGS
@given(feeds(), tight_limits())
def test_no_iteration_is_left_to_the_engine(requests: Feed, limits: EngineLimits) -> None:
    ample = replace(limits, kv_blocks=1000, max_tokens_per_iteration=limits.max_tokens_per_iteration + 22)
    _, outcome = run_checked(requests, ample)
    assert outcome.fallbacks == 0


@at_light_load
def test_two_prompts_on_an_idle_engine(profile: str) -> None:
    """A short one and a long one that does not fit beside it: it is for the policy, not for the engine, to begin."""
    _, outcome = longest_wait(profile, feed([(0.0, 64, 50), (0.0, 2000, 20)]))
    assert outcome.fallbacks == 0


@pytest.mark.parametrize("decode", [None, decoding(-1.0), decoding(0.05, tbt=0.0)], ids=["none", "lost", "no TBT"])
@pytest.mark.parametrize("missing", [2000, 500], ids=["far above B", "a little above B"])
def test_without_safe_decodes_all_of_b_is_used(decode: Request | None, missing: int) -> None:
    """Nobody waits for the end of the iteration (5), so there is no reason to put anything off."""
    scene = Scene([prompt(60), prompt(missing), *([decode] if decode else [])])
    assert scene.decide(linear(0.005, 20e-6), max_tokens=512).total == 512
