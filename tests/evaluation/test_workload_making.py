"""Requests of a workload: arrival processes, SLO rules, traces by name, and what must not depend on what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.simulate import engine_limits
from evaluation.traces import TraceRows, read_trace
from evaluation.workloads import (
    InfeasibleWorkload,
    Workload,
    WorkloadError,
    check_feasible,
    make_workload,
    parse_workload,
)
from evaluation.workloads.recorded import part_of, turned
from slidingserve.contract.values import EngineLimits, Floats, Ints, Snapshot, Step

TEXTS = ("mixed-v1", "bursty", "bursty:cv=13", "transient", "mixed-v2:slos=qoserve", "arxiv-v1:slos=absolute")


def make(
    text: str,
    *,
    rate: float | None = 1.0,
    requests: int | None = 600,
    seed: int = 0,
    data: Path | None = None,
) -> Workload:
    def solo(prompt_tokens: Ints) -> Floats:
        return prompt_tokens.astype(np.float64) * 1e-4

    spec = parse_workload(text)
    return make_workload(spec, rate=rate, requests=requests, seed=seed, solo_ttft_seconds=solo, data=data)


def columns(workload: Workload, requests: int | None = None) -> dict[str, list[float]]:
    """Everything but the arrival times."""
    names = ("prompt_tokens", "output_tokens", "ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds", "class_index")
    return {name: getattr(workload, name)[:requests].tolist() for name in names}


def write_trace(folder: Path, arrivals: list[float]) -> Path:
    path = folder / "mine.csv"
    rows = (f"{arrival},{100 + i},{5 + i}" for i, arrival in enumerate(arrivals))
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 2**63),
    rate=st.floats(0.01, 100),
    requests=st.integers(1, 60),
    more=st.integers(0, 60),
)
def test_the_rate_moves_arrivals_only_and_fewer_requests_are_the_first_of_more(
    text: str, seed: int, rate: float, requests: int, more: int
) -> None:
    short, long = make(text, seed=seed, rate=rate, requests=requests), make(text, seed=seed, requests=requests + more)
    assert columns(short) == columns(long, requests)
    np.testing.assert_array_equal(
        short.arrival_seconds, make(text, seed=seed, rate=rate, requests=requests + more).arrival_seconds[:requests]
    )
    moved = long.at_rate(rate)
    assert columns(moved) == columns(long)
    assert (moved.rate, moved.name) == (rate, text)
    np.testing.assert_allclose(moved.arrival_seconds[:requests], short.arrival_seconds, rtol=1e-9)
    assert (np.diff(moved.arrival_seconds) >= 0).all()
    if text != "transient":  # whose periods stay
        np.testing.assert_array_equal(moved.arrival_seconds[:requests], short.arrival_seconds)
        np.testing.assert_allclose(moved.arrival_seconds * rate, long.arrival_seconds, rtol=1e-12)


@pytest.mark.parametrize("cv", [0.5, 2.0, 5.0])
def test_gamma_gaps_have_their_mean_and_variation(cv: float) -> None:
    gaps = np.diff(make(f"sharegpt:arrivals=gamma,cv={cv}", rate=4.0, requests=400_000).arrival_seconds, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_switching_load_has_its_rates_in_its_periods_whatever_the_mean() -> None:
    for rate, low, high in ((None, 1.0, 2.5), (17.5, 10.0, 25.0)):
        workload = make("transient", rate=rate, requests=60_000)
        whole = workload.arrival_seconds < 240 * (workload.arrival_seconds[-1] // 240)
        is_high = workload.arrival_seconds[whole] % 240 >= 120
        seconds = 120 * (workload.arrival_seconds[-1] // 240)
        assert np.count_nonzero(~is_high) / seconds == pytest.approx(low, rel=0.02)
        assert np.count_nonzero(is_high) / seconds == pytest.approx(high, rel=0.02)
        assert workload.rate == pytest.approx((low + high) / 2)


def test_switching_by_hand() -> None:
    # Low and high 1:3 at a mean of 1/s are 0.5/s and 1.5/s: 5 requests in the first 10 s, 15 in the next.
    load = parse_workload("mixed-v1:arrivals=switching,period_s=10,low=1,high=3").arrivals
    steady = np.array([0.0, 4.0, 5.0, 8.0, 20.0, 24.0])
    moved = [0.0, 8.0, 10.0, 12.0, 20.0, 28.0]
    np.testing.assert_allclose(load.delayed(steady), moved)  # type: ignore[union-attr]
    np.testing.assert_allclose(load.steadied(np.array(moved)), steady)  # type: ignore[union-attr]


def test_absolute_slos_keep_the_classes_of_the_lengths() -> None:
    workload = make("mixed-v1:slos=absolute", requests=2000)
    expected = np.where(workload.prompt_tokens < 2500, 1.0, 4.0)
    np.testing.assert_array_equal(workload.ttft_slo_seconds, expected)
    assert set(workload.tbt_slo_seconds.tolist()) == {0.05}
    assert (workload.class_names, set(workload.class_index.tolist())) == (("sharegpt", "arxiv-v1"), {1, 2})


def test_qoserve_slos_are_thirds_at_random() -> None:
    workload = make("mixed-v1:slos=qoserve", requests=30_000)
    assert workload.class_names == ("interactive", "ttlt-600s", "ttlt-1800s")
    for index, slos in enumerate([(6.0, 0.05, 0.0), (0.0, 0.0, 600.0), (0.0, 0.0, 1800.0)], start=1):
        mine = workload.class_index == index
        assert mine.mean() == pytest.approx(1 / 3, abs=0.01)
        kept = (workload.ttft_slo_seconds, workload.tbt_slo_seconds, workload.ttlt_slo_seconds)
        assert tuple(set(column[mine].tolist()) for column in kept) == tuple({slo} for slo in slos)
        assert workload.prompt_tokens[mine].mean() == pytest.approx(workload.prompt_tokens.mean(), rel=0.05)


def test_a_trace_by_its_path(tmp_path: Path) -> None:
    text = f"trace={write_trace(tmp_path, [0.0, 1.0, 3.0, 6.0, 10.0])}"
    recorded = make(text, rate=None, requests=None)
    assert (recorded.name, recorded.class_names, recorded.rate) == (text, ("mine.csv",), 0.4)
    assert recorded.arrival_seconds.tolist() == [0.0, 1.0, 3.0, 6.0, 10.0]
    assert make(text, rate=None, requests=99).prompt_tokens.tolist() == [100, 101, 102, 103, 104], "all that it has"
    scaled = make(text, rate=2.0, requests=3)
    np.testing.assert_allclose(scaled.arrival_seconds, [0.0, 1 / 3, 1.0])
    np.testing.assert_allclose(scaled.at_rate(1.0).arrival_seconds, [0.0, 2 / 3, 2.0])
    first, second = (make(f"{text}:part={part}", rate=None) for part in ("first-half", "second-half"))
    assert (first.prompt_tokens.tolist(), second.prompt_tokens.tolist()) == ([100, 101, 102], [103, 104])
    assert second.arrival_seconds.tolist() == [0.0, 4.0]


def test_another_seed_begins_a_trace_elsewhere_and_goes_round() -> None:
    rows = TraceRows(np.arange(1000.0), np.arange(1, 1001), np.full(1000, 7))
    assert turned(rows, 0) is rows
    starts = [int(turned(rows, seed).prompt_tokens[0]) for seed in range(8)]
    assert np.diff(sorted(starts)).min() > 60, "spread over the trace"
    other = turned(rows, 1)
    assert sorted(other.prompt_tokens.tolist()) == rows.prompt_tokens.tolist()
    np.testing.assert_allclose(other.arrival_seconds, np.arange(1000.0))


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: make("mixed-v1", rate=0.0), "rate 0 requests/s is out of range; choose one above 0"),
        (lambda: make("mixed-v1").at_rate(-1.0), "rate -1 requests/s is out of range"),
        (lambda: make("mixed-v1", requests=0), "0 requests are out of range"),
        (lambda: make("mixed-v1", requests=None), "workload 'mixed-v1' has no end; say how many requests"),
        (lambda: make("mixed-v1", seed=-1), "seed -1 is negative"),
        (
            lambda: make("azure-conv"),
            "workload 'azure-conv' is recorded traffic; give --data FOLDER or set SLIDINGSERVE_DATA to the folder that "
            "holds azure_llm_2023/conv.csv, or use trace=PATH",
        ),
        (
            lambda: make("mooncake", data=Path("nowhere")),
            "nowhere/mooncake/conversation.csv is not there; give --data FOLDER or set SLIDINGSERVE_DATA",
        ),
        (
            lambda: part_of(TraceRows(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64)), "second-half"),
            "part=second-half: a trace of one request has no halves",
        ),
    ],
)
def test_refusals_say_what_to_do(make_it: Callable[[], object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        make_it()


def test_requests_that_arrive_at_once_have_no_other_rate(tmp_path: Path) -> None:
    text = f"trace={write_trace(tmp_path, [2.0, 2.0])}"
    with pytest.raises(WorkloadError, match=r"rate 3: all 2 requests of trace=.* arrive at once; leave the rate out"):
        make(text, rate=None).at_rate(3.0)


class LinearTimer:
    """1 ms + 0.1 ms per token + 1 us per token of context."""

    def seconds(self, chunk: Ints, context: Ints, count: int, /) -> float:
        return 1e-3 + 1e-4 * int(chunk[:count].sum()) + 1e-6 * int(context[:count].sum())


def requests_with(slos: list[tuple[float, float, float]], prompt: int = 900, output: int = 11) -> Workload:
    ttft, tbt, ttlt = np.array(slos).T
    count = len(slos)
    lengths = (np.full(count, prompt), np.full(count, output))
    return Workload("mine", np.zeros(count), *lengths, ttft, tbt, ttlt, np.ones(count, np.int64), ("all",), 1.0)


# Alone: prefill of 900 tokens 91 ms, a decode at context 900 2 ms, all 11 tokens at least 111 ms.
@pytest.mark.parametrize(
    ("slos", "words"),
    [
        ((0.090, 0.0, 0.0), "TTFT SLO 90 ms is below the 91 ms that the prefill of 900 tokens takes alone"),
        ((0.0, 0.0019, 0.0), r"TBT SLO 1.9 ms is below the 2 ms .* decodes one request of 900 tokens alone"),
        ((0.0, 0.0, 0.110), "TTLT SLO 110 ms is below the 111 ms that a request of 900 prompt tokens takes alone"),
    ],
)
def test_more_than_a_percent_with_slos_too_short_is_refused(slos: tuple[float, float, float], words: str) -> None:
    good = (0.0911, 0.00201, 0.112)
    assert check_feasible(requests_with([good] * 99 + [slos]), LinearTimer()) == pytest.approx(0.01)
    with pytest.raises(InfeasibleWorkload, match=words) as caught:
        check_feasible(requests_with([good] * 98 + [slos] * 2), LinearTimer(), profile="fast")
    assert "workload 'mine' on fast: even an idle engine cannot keep the SLOs of 2 % of its requests" in str(
        caught.value
    )


def test_requests_must_fit_and_single_tokens_need_no_tbt() -> None:
    workload = requests_with([(0.0, 0.0001, 0.0)], output=1)
    assert check_feasible(workload, LinearTimer()) == 0.0
    with pytest.raises(InfeasibleWorkload, match="100 % of the requests have more tokens than the 896 that fit"):
        check_feasible(workload, LinearTimer(), limits=EngineLimits(2048, 8, 56, 16))


class Overheard:
    """Keeps what a source is told, and leaves every decision to the engine."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> None:
        self.steps.append(step)


def test_no_message_tells_how_long_an_output_will_be() -> None:
    """Until the first request ends nothing that a policy is told differs between short and long outputs."""
    profile = load_profile("rtx3090-tp2")
    told = []
    for factor in (1, 3):
        workload = make("mixed-v1", rate=8.0, requests=40)
        workload.output_tokens[:] = factor * np.maximum(workload.output_tokens, 30)
        source = Overheard()
        SimulatedEngine(workload, engine_limits(profile), ProfileTimer(profile), source).run()  # type: ignore[arg-type]
        told.append(source.steps)
    assert all(not step.arrived.max_output_tokens.size for step in told[0] if step.arrived is not None)
    until = next(i for i, step in enumerate(told[0]) if len(step.finished_handles))
    assert until > 20
    assert [repr(step) for step in told[0][:until]] == [repr(step) for step in told[1][:until]]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "file", "mean_rate", "cv"),
    [
        ("azure-conv", "azure_llm_2023/conv.csv", 5.53, 1.09),
        ("azure-code", "azure_llm_2023/code.csv", 2.57, 13.0),
        ("mooncake", "mooncake/conversation.csv", 3.40, None),
        ("servegen-m-small", "servegen/composed_1h_m-small.csv", 4.05, None),
    ],
)
def test_recorded_workloads_by_name(
    data_folder: Path, name: str, file: str, mean_rate: float, cv: float | None
) -> None:
    rows = read_trace(data_folder / file)
    recorded = make(name, rate=None, requests=None, data=data_folder)
    np.testing.assert_array_equal(recorded.prompt_tokens, rows.prompt_tokens)
    assert recorded.rate == pytest.approx(mean_rate, rel=0.005)
    gaps = np.diff(recorded.arrival_seconds)
    if cv is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    if name == "mooncake":
        assert np.mean(gaps == 0) < 0.001, "quantised stamps are spread"
    scaled = make(name, rate=2.0, requests=3000, seed=2, data=data_folder)
    assert 2999 / scaled.arrival_seconds[-1] == pytest.approx(2.0)
    halves = [make(f"{name}:part={part}", requests=None, data=data_folder) for part in ("first-half", "second-half")]
    np.testing.assert_array_equal(np.concatenate([half.output_tokens for half in halves]), rows.output_tokens)
