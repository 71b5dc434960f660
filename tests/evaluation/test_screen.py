"""The result screen: what it says, that it fits, and that it is plain text."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.results import RunResult, Tail
from evaluation.scores import Percentiles, Scores, Violations
from evaluation.screen import LEGEND, render, slo_summary
from evaluation.workloads import Workload

RESULT = RunResult(
    policy="vllm",
    policy_parameters="",
    workload="mixed-v1",
    profile="rtx4090-tp1",
    transport="grpc",
    rate=2.5,
    seed=7,
    requests=3000,
    floor_seconds=0.2,
    slos="TTFT 248 ms to 3.4 s, TBT 40 ms to 80 ms",
    scores=Scores(
        Violations(0.015, 0.03, 1 / 30_000),
        Percentiles(0.0423, 0.2311, 1.4),
        Percentiles(0.0123, 0.0311, 0.0425),
        1.97,
        1234.5,
    ),
    decision_seconds=Tail(21e-6, 55e-6),
    round_trip_seconds=Tail(0.44e-3, 1.05e-3),
    fallbacks=2,
    allocation_digest="0123456789abcdef" * 4,
    iterations=12_345,
    mean_batch=33.2,
    wall_seconds=12.3,
)


def with_policy(policy: str, parameters: str = "") -> RunResult:
    return dataclasses.replace(RESULT, policy=policy, policy_parameters=parameters)


def cells(screen: str) -> dict[tuple[str, str], list[str]]:
    """Returns the values of each row by (group, name)."""
    found: dict[tuple[str, str], list[str]] = {}
    group = ""
    for line in screen.splitlines():
        parts = re.split(r"\s{2,}", line)
        if len(parts) >= 3 and not line.startswith("  mean TPOT  "):
            group = parts[0] or group
            found.setdefault((group, parts[1]), parts[2:])
    return found


def test_every_figure_stands_in_its_row() -> None:
    rows = cells(render([RESULT]))
    assert rows["SLO attainment", "deadlines"] == ["%", "98.50"]
    assert rows["SLO attainment", "every gap"] == ["%", "97.00"]
    assert rows["TTFT", "p50"] == ["ms", "42.3"]
    assert rows["TTFT", "p90"] == ["ms", "231.1"]
    assert rows["TTFT", "p99"] == ["ms", "1,400.0"]
    assert rows["TBT", "p99"] == ["ms", "42.5"]
    assert rows["Throughput", "met requests"] == ["/s", "1.97"]
    assert rows["Throughput", "tokens"] == ["/s", "1,234.50"]
    assert rows["Decision", "p50"] == ["ms", "0.021"]
    assert rows["Round trip", "p99"] == ["ms", "1.050"]
    assert rows["Run", "fallbacks"] == ["2"]
    assert rows["Run", "digest"] == ["01234567"]


def test_the_title_names_the_run_and_the_legend_the_rules() -> None:
    lines = render([RESULT]).splitlines()
    assert lines[0] == "mixed-v1 on rtx4090-tp1: 2.5 requests/s, 3,000 requests, seed 7, TTFT floor 200 ms, grpc"
    assert lines[1] == "SLOs: TTFT 248 ms to 3.4 s, TBT 40 ms to 80 ms"
    legend = "\n".join(lines[-5:])
    for words in ("arrival + TTFT + (k-1) TBT", "every gap", "vllm bench serve --goodput", "virtual"):
        assert words in legend


def test_attainment_is_rounded_down_so_that_100_means_no_miss() -> None:
    rows = cells(render([RESULT]))
    assert rows["SLO attainment", "mean TPOT"] == ["%", "99.99"]
    for violations, text in ((0.0, "100.00"), (1.0, "0.00"), (0.01, "99.00"), (0.0001, "99.99"), (1e-9, "99.99")):
        scores = dataclasses.replace(RESULT.scores, violations=Violations(violations, violations, violations))
        shown = cells(render([dataclasses.replace(RESULT, scores=scores)]))
        assert shown["SLO attainment", "deadlines"] == ["%", text]


def test_what_was_not_measured_is_a_dash() -> None:
    nothing = Percentiles(math.nan, math.nan, math.nan)
    result = dataclasses.replace(
        RESULT, round_trip_seconds=None, scores=dataclasses.replace(RESULT.scores, tbt_seconds=nothing)
    )
    rows = cells(render([result]))
    assert rows["Round trip", "p50"] == ["ms", "-"]
    assert rows["TBT", "p99"] == ["ms", "-"]
    assert "nan" not in render([result])


def test_policies_stand_side_by_side_with_their_parameters_below_their_names() -> None:
    results = [with_policy("vllm"), *(with_policy("slidingserve", f"cap={cap},alpha=0.0002") for cap in (64, 256))]
    screen = render(results)
    heading = screen.splitlines()[3:7]
    assert [line.split() for line in heading[:3]] == [
        ["slidingserve", "slidingserve"],
        ["cap=64", "cap=256"],
        ["vllm", "alpha=0.0002", "alpha=0.0002"],
    ]
    assert set(heading[3]) == {"-"}
    assert cells(screen)["TTFT", "p50"] == ["ms", "42.3", "42.3", "42.3"]
    assert screen.count("mixed-v1 on") == 1


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.integers(1, 40), min_size=1, max_size=8), width=st.integers(68, 200))
def test_tables_use_the_width_but_no_more(names: list[int], width: int) -> None:
    results = [with_policy(chr(ord("a") + i) * length) for i, length in enumerate(names)]
    screen = render(results, width)
    assert screen.isascii()  # rich marks what it cuts with an ellipsis
    assert len(re.findall(r" 01234567\b", screen)) == len(names)
    lines = screen.splitlines()[: -len(LEGEND.splitlines())]
    assert max(map(len, lines)) <= width
    rules = [line for line in lines if line.startswith("-----")]
    assert len(rules) == 1 or min(map(len, rules[:-1])) > width - 3 - 24


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_asked_and_no_run_is_lost(count: int, width: int) -> None:
    results = [with_policy(f"policy-{i}", "cap=256,alpha=0.0002,window=64") for i in range(count)]
    screen = render(results, width)
    above_legend = screen[: screen.index("SLO attainment: share")]
    assert max(map(len, (screen if width >= 100 else above_legend).splitlines())) <= width
    assert all(len(re.findall(rf"policy-{i}\b", screen)) == 1 for i in range(count))


def test_a_policy_with_a_very_long_name_and_a_narrow_terminal_keep_the_figures_whole() -> None:
    rows = cells(render([with_policy("a" * 90, "b" * 50)], width=20))
    assert rows["TTFT", "p99"] == ["ms", "1,400.0"]
    assert rows["SLO attainment", "every gap"] == ["%", "97.00"]


def test_runs_that_cannot_be_compared_get_tables_of_their_own() -> None:
    faster = dataclasses.replace(RESULT, rate=5.0)
    screen = render([RESULT, faster])
    assert screen.count("mixed-v1 on rtx4090-tp1: 2.5 requests/s") == 1
    assert screen.count("mixed-v1 on rtx4090-tp1: 5 requests/s") == 1
    assert screen.count("SLO attainment: share") == 1


def test_the_screen_is_plain_ascii_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    screen = render([with_policy("vllm", "[bold]=1"), with_policy(":smile:")])
    assert screen.isascii()
    assert "\x1b" not in screen
    assert "[bold]=1" in screen
    assert ":smile:" in screen


def test_slo_summary_gives_ranges_and_leaves_out_what_is_not_asked_for() -> None:
    workload = Workload(
        name="x",
        arrival_seconds=np.zeros(2),
        prompt_tokens=np.ones(2, np.int64),
        output_tokens=np.ones(2, np.int64),
        ttft_slo_seconds=np.array([0.0475, 3.4]),
        tbt_slo_seconds=np.array([0.04, 0.04]),
        ttlt_slo_seconds=np.zeros(2),
        class_index=np.ones(2, np.int64),
        class_names=("x",),
        rate=1.0,
    )
    assert slo_summary(workload) == "TTFT 47.5 ms to 3.4 s, TBT 40 ms"
    last = dataclasses.replace(workload, ttlt_slo_seconds=np.array([0.0, 600.0]))
    assert slo_summary(last) == "TTFT 47.5 ms to 3.4 s, TBT 40 ms, TTLT 600 s"
