"""Workloads: published lengths, common random numbers, the SLO rules, and refusals."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.workloads import (
    ARXIV_V1,
    ARXIV_V2,
    MIXES,
    SHAREGPT,
    LengthTarget,
    Lognormal,
    RequestClass,
    Workload,
    WorkloadError,
    WorkloadSpec,
    make_workload,
    solo_ttft,
    solve_lengths,
)
from slidingserve.contract.values import Floats, Ints

CLASSES = (SHAREGPT, ARXIV_V1, ARXIV_V2)
PUBLISHED = {
    "sharegpt": (357, 1724, 89, 184),
    "arxiv-v1": (3253, 4382, 356, 542),
    "arxiv-v2": (6267, 7567, 423, 623),
}
PARAMETERS = {
    "sharegpt": (5.0, 0.040),
    "arxiv-v1": (10.0, 0.080),
    "arxiv-v2": (10.0, 0.080),
}


def tenth_of_a_millisecond_per_token(prompt_tokens: Ints) -> Floats:
    return prompt_tokens.astype(np.float64) * 1e-4


def make(
    name: str = "mixed-v1",
    *,
    rate: float = 2.0,
    requests: int = 500,
    seed: int = 0,
    floor_ms: float = 0.0,
    ttft_ms: float | None = None,
    tbt_ms: float | None = None,
) -> Workload:
    return make_workload(
        WorkloadSpec(name, floor_ms=floor_ms, ttft_ms=ttft_ms, tbt_ms=tbt_ms),
        rate=rate,
        requests=requests,
        seed=seed,
        solo_ttft_seconds=tenth_of_a_millisecond_per_token,
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seed", [0, 1])
def test_large_samples_have_the_published_mean_and_p90(name: str, seed: int) -> None:
    workload = make(name, requests=100_000, seed=seed)
    measured = [
        statistic
        for tokens in (workload.prompt_tokens, workload.output_tokens)
        for statistic in (float(tokens.mean()), float(np.percentile(tokens, 90)))
    ]
    assert measured == pytest.approx(PUBLISHED[name], rel=0.03)


def test_sharegpt_prompts_are_a_short_and_a_long_half_within_their_bounds() -> None:
    prompts = make("sharegpt", requests=100_000).prompt_tokens
    assert prompts.min() == 8
    assert prompts.max() <= 8000
    assert 45 <= np.median(prompts) <= 65  # the 59th percentile of the short part of median 50
    assert np.mean(prompts > 700) == pytest.approx(0.15, abs=0.01)
    assert solve_lengths(SHAREGPT.prompt).median == pytest.approx(1950, rel=0.03)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_solved_lengths_hold_mean_and_p90_exactly_after_clipping(kind: RequestClass) -> None:
    for target in (kind.prompt, kind.output):
        rest, short = solve_lengths(target), target.short_share
        mean = short * target.short.clipped_mean(target.shortest, target.longest)
        mean += (1 - short) * rest.clipped_mean(target.shortest, target.longest)
        below = short * target.short.below(target.p90) + (1 - short) * rest.below(target.p90)
        assert mean == pytest.approx(target.mean, rel=1e-9)
        assert below == pytest.approx(0.9, abs=1e-9)


def test_clipped_mean_agrees_with_a_sample() -> None:
    lengths, rng = Lognormal(60.0, 0.9), np.random.default_rng(3)
    sample = np.clip(60.0 * np.exp(0.9 * rng.standard_normal(400_000)), 20, 150)
    assert lengths.clipped_mean(20, 150) == pytest.approx(sample.mean(), rel=0.005)


def test_a_single_lognormal_cannot_have_the_prompts_of_sharegpt() -> None:
    with pytest.raises(WorkloadError, match=r"no lognormal has mean 357 and p90 1724 tokens; raise short_share"):
        solve_lengths(LengthTarget(357, 1724, 8, 8000))


@pytest.mark.parametrize(("name", "share"), [("mixed-v1", 3 / 4), ("mixed-v2", 5 / 6)])
def test_mixes_hold_their_ratio_and_every_request_the_slos_of_its_class(name: str, share: float) -> None:
    workload = make(name, requests=50_000, floor_ms=200.0)
    long_class = "arxiv-v1" if name == "mixed-v1" else "arxiv-v2"
    assert workload.class_names == ("sharegpt", long_class)
    assert set(workload.class_index.tolist()) == {1, 2}
    assert np.mean(workload.class_index == 1) == pytest.approx(share, abs=0.01)
    for index, class_name in enumerate(workload.class_names, start=1):
        factor, tbt = PARAMETERS[class_name]
        mine = workload.class_index == index
        alone = tenth_of_a_millisecond_per_token(workload.prompt_tokens[mine])
        np.testing.assert_allclose(workload.ttft_slo_seconds[mine], factor * alone + 0.2)
        assert set(workload.tbt_slo_seconds[mine].tolist()) == {tbt}
        assert workload.prompt_tokens[mine].mean() == pytest.approx(PUBLISHED[class_name][0], rel=0.04)
    assert not workload.ttlt_slo_seconds.any()


def test_arrivals_are_poisson() -> None:
    gaps = np.diff(make(requests=100_000, rate=4.0).arrival_seconds, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.02)
    assert np.mean(gaps > 0.25) == pytest.approx(math.exp(-1), abs=0.01)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(MIXES)),
    seed=st.integers(0, 2**63),
    rate=st.floats(0.01, 1000),
    requests=st.integers(1, 60),
    more=st.integers(0, 60),
    slo=st.one_of(st.none(), st.floats(1, 10_000)),
)
def test_rate_scales_time_only_and_a_shorter_workload_is_a_prefix(
    name: str, seed: int, rate: float, requests: int, more: int, slo: float | None
) -> None:
    short = make(name, seed=seed, rate=rate, requests=requests, ttft_ms=slo)
    long = make(name, seed=seed, rate=1.0, requests=requests + more)
    np.testing.assert_allclose(short.arrival_seconds * rate, long.arrival_seconds[:requests], rtol=1e-12)
    np.testing.assert_array_equal(short.prompt_tokens, long.prompt_tokens[:requests])
    np.testing.assert_array_equal(short.output_tokens, long.output_tokens[:requests])
    np.testing.assert_array_equal(short.class_index, long.class_index[:requests])
    assert (np.diff(short.arrival_seconds) >= 0).all()
    assert short.prompt_tokens.min() >= 8
    assert short.output_tokens.min() >= 2
    for field in dataclasses.fields(Workload):
        column = getattr(short, field.name)
        if isinstance(column, np.ndarray):
            wanted = np.int64 if field.name.endswith(("_tokens", "_index")) else np.float64
            assert (column.shape, column.dtype) == ((requests,), wanted), field.name


@pytest.mark.parametrize("name", MIXES)
def test_arrivals_prompts_and_outputs_are_independent(name: str) -> None:
    workload = make(name, requests=20_000)
    gaps = np.diff(workload.arrival_seconds, prepend=0.0)
    for index in range(1, len(workload.class_names) + 1):
        mine = workload.class_index == index
        columns = (np.log(gaps[mine]), np.log(workload.prompt_tokens[mine]), np.log(workload.output_tokens[mine]))
        assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 0.07


def test_the_seed_decides() -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    np.testing.assert_array_equal(first.arrival_seconds, again.arrival_seconds)
    np.testing.assert_array_equal(first.prompt_tokens, again.prompt_tokens)
    assert not np.array_equal(first.arrival_seconds, other.arrival_seconds)
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)


def test_given_slos_replace_the_rule_for_all_requests() -> None:
    workload = make(ttft_ms=700.0, tbt_ms=30.0)
    assert set(workload.ttft_slo_seconds.tolist()) == {0.7}
    assert set(workload.tbt_slo_seconds.tolist()) == {0.03}
    only_tbt = make(tbt_ms=30.0)
    np.testing.assert_array_equal(only_tbt.ttft_slo_seconds, make().ttft_slo_seconds)


class CountingTimer:
    """1 ms + 0.1 ms per token + 1 us per 100 tokens of context; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, chunk: Ints, context: Ints, count: int, /) -> float:
        assert chunk.dtype == context.dtype == np.int64
        assert chunk.size == context.size == count == 1
        self.calls += 1
        return 1e-3 + 1e-4 * int(chunk[0]) + 1e-8 * int(context[0])


def test_solo_ttft_by_hand() -> None:
    # 2048 tokens are one chunk, 2049 are two, 5000 are 2048 + 2048 + 904.
    alone = solo_ttft(CountingTimer(), np.array([5000, 1, 2048, 2049, 1]))
    expected = [0.5 + 3e-3 + 1e-8 * (2048 + 4096), 1.1e-3, 0.2058, 0.2049 + 2e-3 + 2.048e-5, 1.1e-3]
    np.testing.assert_allclose(alone, expected, rtol=1e-12)


def test_solo_ttft_times_each_distinct_iteration_once() -> None:
    timer = CountingTimer()
    prompts = np.tile(np.array([10, 5000, 8193]), 1000)
    assert solo_ttft(timer, prompts).shape == (3000,)
    assert timer.calls == 3 + 4
    timer = CountingTimer()
    solo_ttft(timer, np.array([4096]))
    assert timer.calls == 2
    assert solo_ttft(timer, np.zeros(0, np.int64)).size == 0


@given(prompt=st.integers(1, 3000), chunk=st.integers(1, 500))
def test_solo_ttft_sums_the_chunks(prompt: int, chunk: int) -> None:
    timer, expected, done = CountingTimer(), 0.0, 0
    while done < prompt:
        tokens = min(chunk, prompt - done)
        expected += timer.seconds(np.array([tokens]), np.array([done]), 1)
        done += tokens
    assert solo_ttft(timer, np.array([prompt]), chunk)[0] == pytest.approx(expected)


def test_solo_ttft_refuses_an_empty_prompt() -> None:
    with pytest.raises(WorkloadError, match="prompt of 0 tokens in chunks of 2048; both must be at least 1"):
        solo_ttft(CountingTimer(), np.array([5, 0]))


def test_an_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(
        WorkloadError,
        match="unknown workload 'chat'; choose one of sharegpt, arxiv-v1, arxiv-v2, mixed-v1, mixed-v2, transient, "
        "diurnal, bursty, azure-conv, azure-code, mooncake, servegen-m-small, trace=PATH",
    ):
        make("chat")


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("rate", [0.0, -1.0, NAN, INF, 2e6])
def test_a_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(
        WorkloadError, match=rf"rate {rate:g} requests/s is out of range; choose one above 0".replace("+", r"\+")
    ):
        make(rate=rate)


@pytest.mark.parametrize("requests", [0, -5, 10_000_001])
def test_a_number_of_requests_out_of_range_is_refused(requests: int) -> None:
    with pytest.raises(WorkloadError, match=f"{requests} requests are out of range; choose from 1 to 10000000"):
        make(requests=requests)


@pytest.mark.parametrize("floor", [-0.001, NAN, INF])
def test_a_floor_out_of_range_is_refused(floor: float) -> None:
    with pytest.raises(WorkloadError, match=f"floor {floor:g} s is out of range; choose one at least 0"):
        make(floor_ms=1e3 * floor)


@pytest.mark.parametrize("slo", [0.0, -1.0, NAN, INF, 1e9])
def test_an_slo_out_of_range_is_refused(slo: float) -> None:
    words = "SLO .* s is out of range; choose one above 0 and at most 86400 s"
    with pytest.raises(WorkloadError, match=f"TTFT {words}"):
        make(ttft_ms=1e3 * slo)
    with pytest.raises(WorkloadError, match=f"TBT {words}"):
        make(tbt_ms=1e3 * slo)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(WorkloadError, match="seed -1 is negative; choose 0 or more"):
        make(seed=-1)


@pytest.mark.parametrize("seconds", [0.0, NAN, INF])
def test_a_profile_that_gives_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(
        WorkloadError, match=rf"solo TTFT of a prompt of \d+ tokens is {seconds} s; the hardware profile"
    ):
        make_workload(
            WorkloadSpec("sharegpt"),
            rate=1.0,
            requests=3,
            seed=0,
            solo_ttft_seconds=lambda tokens: np.full(tokens.size, seconds),
        )
