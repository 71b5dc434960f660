"""Scores by hand, the three rules against a plain count over tokens, and the JSON of results."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.simulated.outcome import Outcome
from evaluation.results import RunResult, Tail, tail, to_json
from evaluation.scores import Percentiles, Scores, Violations, percentiles, score
from evaluation.workloads import Workload


def workload_of(arrivals: list[float], ttft: float = 1.0, tbt: float = 0.1, ttlt: float = 0.0) -> Workload:
    count = len(arrivals)
    return Workload(
        name="hand",
        arrival_seconds=np.array(arrivals, np.float64),
        prompt_tokens=np.full(count, 10, np.int64),
        output_tokens=np.full(count, 4, np.int64),
        ttft_slo_seconds=np.full(count, ttft),
        tbt_slo_seconds=np.full(count, tbt),
        ttlt_slo_seconds=np.full(count, ttlt),
        class_index=np.ones(count, np.int64),
        class_names=("hand",),
        rate=1.0,
    )


def record_of(workload: Workload, tokens: list[list[float]], finished: list[bool] | None = None) -> Outcome:
    """What an engine would have recorded for the given token times, judged token by token."""
    deadline_missed, gap_missed, gaps = [], [], []
    for i, times in enumerate(tokens):
        arrival, ttft, tbt = (
            float(column[i])
            for column in (workload.arrival_seconds, workload.ttft_slo_seconds, workload.tbt_slo_seconds)
        )
        own = [later - earlier for earlier, later in pairwise(times)]
        deadline_missed.append(any(time > arrival + ttft + k * tbt for k, time in enumerate(times)))
        gap_missed.append(any(gap > tbt for gap in own))
        gaps.extend(own)
    return Outcome(
        arrival_seconds=workload.arrival_seconds,
        first_token_seconds=np.array([times[0] if times else math.nan for times in tokens]),
        last_token_seconds=np.array([times[-1] if times else math.nan for times in tokens]),
        output_tokens=np.array([len(times) for times in tokens], np.int64),
        deadline_missed=np.array(deadline_missed, np.bool_),
        gap_missed=np.array(gap_missed, np.bool_),
        finished=np.array(finished if finished is not None else [bool(times) for times in tokens], np.bool_),
        token_gaps=np.array(gaps, np.float64),
        makespan_seconds=max([time for times in tokens for time in times], default=1.0),
    )


def test_the_rules_part_where_they_should() -> None:
    workload = workload_of([0.0] * 6)  # TTFT 1 s, TBT 0.1 s
    record = record_of(
        workload,
        [
            [0.9, 0.95, 1.0, 1.05],  # met by all
            [0.5, 0.9, 0.95, 1.0],  # one long gap: early enough for the deadlines, but not for gap and mean (0.167)
            [0.5, 0.7, 0.71, 0.72],  # one long gap, mean 0.073: only the gap rule counts it
            [1.2, 1.21, 1.22, 1.23],  # late first token: all
            [0.8],  # a single token has no gap and TPOT 0
            [],  # never served: all
        ],
    )
    assert score(workload, record).violations == Violations(deadline=2 / 6, gap=4 / 6, tpot=3 / 6)


def test_slo_met_to_the_instant_is_met_as_in_vllm() -> None:
    workload = workload_of([0.0], ttft=0.5, tbt=0.25)
    assert score(workload, record_of(workload, [[0.5, 0.75, 1.0]])).violations == Violations(0.0, 0.0, 0.0)


def test_an_unfinished_request_is_a_miss_under_each_rule() -> None:
    workload = workload_of([0.0, 0.0])
    record = record_of(workload, [[0.1, 0.2], [0.1, 0.2]], finished=[True, False])
    assert score(workload, record).violations == Violations(0.5, 0.5, 0.5)


def test_a_late_last_token_is_a_miss_only_where_it_has_an_slo() -> None:
    tokens = [[0.1, 0.15, 0.2]]
    for ttlt, missed in ((0.0, 0.0), (0.2, 0.0), (0.19, 1.0)):
        workload = workload_of([0.0], ttlt=ttlt)
        assert score(workload, record_of(workload, tokens)).violations == Violations(missed, missed, missed)


def test_an_absent_ttft_or_tbt_slo_is_never_missed() -> None:
    workload = workload_of([0.0], ttft=0.0, tbt=0.0)
    record = dataclasses.replace(
        record_of(workload, [[50.0, 90.0]]), deadline_missed=np.array([False]), gap_missed=np.array([False])
    )
    assert score(workload, record).violations == Violations(0.0, 0.0, 0.0)


def test_latencies_and_rates_by_hand() -> None:
    workload = workload_of([0.0, 1.0, 2.0, 3.0])
    record = record_of(workload, [[0.1, 0.2, 0.4], [1.2, 1.3], [3.5, 3.6], []])
    scores = score(workload, record)
    assert scores.ttft_seconds.p50 == pytest.approx(0.2)  # of 0.1, 0.2, 1.5
    assert scores.ttft_seconds.p90 == pytest.approx(0.2 + 0.8 * 1.3)
    assert scores.ttft_seconds.p99 == pytest.approx(0.2 + 0.98 * 1.3)
    assert scores.tbt_seconds.p50 == pytest.approx(0.1)  # of 0.1, 0.1, 0.1, 0.2
    assert scores.tbt_seconds.p90 == pytest.approx(0.17)
    assert scores.tokens_per_second == pytest.approx(7 / 3.6)
    assert scores.met_requests_per_second == pytest.approx(2 / 3.6)


def test_percentiles_agree_with_a_known_column() -> None:
    assert percentiles(np.arange(101.0)) == Percentiles(50.0, 90.0, 99.0)
    assert percentiles(np.array([math.nan, 3.0])) == Percentiles(3.0, 3.0, 3.0)
    assert math.isnan(percentiles(np.array([math.nan])).p50)


def test_columns_that_do_not_fit_are_refused() -> None:
    workload = workload_of([0.0, 1.0])
    record = record_of(workload, [[0.1], [1.1]])
    short = dataclasses.replace(record, gap_missed=np.array([False]))
    with pytest.raises(ValueError, match="gap_missed has 1 values; it needs one for each of the 2 requests"):
        score(workload, short)
    for makespan in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"makespan {makespan} s; it must be above 0"):
            score(workload, dataclasses.replace(record, makespan_seconds=makespan))
    nothing = workload_of([])
    with pytest.raises(ValueError, match="a workload of 0 requests has no scores"):
        score(nothing, record_of(nothing, []))


@given(
    requests=st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=8), st.booleans()), min_size=1, max_size=20),
    ttft=st.integers(1, 60),
    tbt=st.integers(1, 40),
)
def test_the_rules_agree_with_a_plain_count(requests: list[tuple[list[int], bool]], ttft: int, tbt: int) -> None:
    # Times are multiples of 1/64 s, exact in binary, so that the comparisons here and there cannot differ by rounding.
    workload = workload_of([float(i) for i in range(len(requests))], ttft=ttft / 64, tbt=tbt / 64)
    tokens = [(i + np.cumsum(gaps) / 64).tolist() for i, (gaps, _) in enumerate(requests)]
    finished = [done and bool(gaps) for gaps, done in requests]
    violations = score(workload, record_of(workload, tokens, finished)).violations

    counts = {"deadline": 0, "gap": 0, "tpot": 0}
    for (gaps, _), done in zip(requests, finished, strict=True):
        failed = not done or gaps[0] > ttft
        counts["deadline"] += failed or any(sum(gaps[: k + 1]) > ttft + k * tbt for k in range(len(gaps)))
        counts["gap"] += failed or any(gap > tbt for gap in gaps[1:])
        counts["tpot"] += failed or (len(gaps) > 1 and sum(gaps[1:]) / (len(gaps) - 1) > tbt)
    expected = {rule: count / len(requests) for rule, count in counts.items()}
    assert dataclasses.asdict(violations) == pytest.approx(expected)
    assert violations.deadline <= violations.gap  # gaps within TBT imply the deadlines
    assert violations.tpot <= violations.gap  # and a mean within TBT


RESULT = RunResult(
    policy="vllm",
    policy_parameters="cap=256",
    workload="mixed-v1",
    profile="rtx4090-tp1",
    transport="grpc",
    rate=2.0,
    seed=3,
    requests=600,
    floor_seconds=0.2,
    slos="TBT 40 ms",
    scores=Scores(Violations(0.01, 0.02, 0.03), Percentiles(0.1, 0.2, 0.3), Percentiles(0.01, 0.02, 0.03), 1.9, 500.0),
    decision_seconds=Tail(2e-5, 5e-5),
    round_trip_seconds=Tail(4e-4, 9e-4),
    fallbacks=1,
    allocation_digest="ab" * 32,
    iterations=1000,
    mean_batch=12.5,
    wall_seconds=4.5,
)
PROMISED: dict[str, Any] = {
    "policy": "vllm",
    "workload": "mixed-v1",
    "profile": "rtx4090-tp1",
    "rate": 2.0,
    "seed": 3,
    "requests": 600,
    "violations": {"deadline": 0.01, "gap": 0.02, "tpot": 0.03},
    "ttft_seconds": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
    "tbt_seconds": {"p50": 0.01, "p90": 0.02, "p99": 0.03},
    "decision_seconds": {"p50": 2e-5, "p99": 5e-5},
    "round_trip_seconds": {"p50": 4e-4, "p99": 9e-4},
    "tokens_per_second": 500.0,
    "fallbacks": 1,
    "allocation_digest": "ab" * 32,
}


def test_json_has_the_promised_keys_first_and_in_order() -> None:
    document = to_json([RESULT, RESULT])
    assert list(document) == ["schema", "runs"]
    assert document["schema"] == 1
    assert len(document["runs"]) == 2
    run = document["runs"][0]
    assert list(run.items())[: len(PROMISED)] == list(PROMISED.items())
    assert run["policy_parameters"] == "cap=256"
    assert run["met_requests_per_second"] == 1.9
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_json_never_holds_nan_and_takes_numpy_numbers() -> None:
    nothing = Percentiles(math.nan, math.nan, math.inf)
    result = dataclasses.replace(
        RESULT,
        seed=cast(int, np.int64(3)),
        rate=np.float64(2.0),
        scores=dataclasses.replace(RESULT.scores, tbt_seconds=nothing),
        round_trip_seconds=None,
        decision_seconds=tail(np.zeros(0)),
        mean_batch=math.nan,
    )
    run = json.loads(json.dumps(to_json([result]), allow_nan=False))["runs"][0]
    assert run["tbt_seconds"] == {"p50": None, "p90": None, "p99": None}
    assert run["round_trip_seconds"] == {"p50": None, "p99": None}
    assert run["decision_seconds"] == {"p50": None, "p99": None}
    assert run["mean_batch"] is None
    assert (run["seed"], run["rate"]) == (3, 2.0)


def test_tail_and_label() -> None:
    assert tail(np.arange(101.0)) == Tail(50.0, 99.0)
    assert RESULT.label == "vllm:cap=256"
    assert dataclasses.replace(RESULT, policy_parameters="").label == "vllm"
