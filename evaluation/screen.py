"""The result screen: one table that compares the policies of a run, metrics down and policies across.

Plain ASCII without colours or escape codes, so it reads the same in a terminal, a pipe and a log.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from evaluation.results import RunResult, Tail
from evaluation.scores import Percentiles
from evaluation.workloads import Workload
from slidingserve.contract.values import Floats

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100
_NARROWEST_POLICY = 10
_WIDEST_POLICY = 24
_GUTTER = 3
_DIGEST_DIGITS = 8

LEGEND = """\
SLO attainment: share of requests that met their SLOs; a late first token misses under each rule.
  deadlines  the papers' rule: token k is in by arrival + TTFT + (k-1) TBT; met requests count these
  every gap  no gap between consecutive tokens is longer than TBT
  mean TPOT  the mean gap is at most TBT, as `vllm bench serve --goodput` counts
TTFT and TBT are in the engine's virtual time, decision (server core) and round trip in real time."""


@dataclass(frozen=True, slots=True)
class _Metric:
    """One row of the table: its labels, and the text of a result's cell."""

    group: str
    name: str
    unit: str
    cell: Callable[[RunResult], str]


def render(results: Sequence[RunResult], width: int = WIDTH) -> str:
    """Returns the screen as text: a title and a table for each set of runs that can be compared, then the legend.

    Runs are comparable if they differ in nothing but the policy. A table too wide for ``width`` columns continues in
    another one below; narrower than one policy needs, it is wider than asked for.
    """
    width = max(width, _LABELS_WIDTH + _WIDEST_POLICY)
    parts = []
    for _, group in groupby(results, key=_setting):
        runs = list(group)
        parts.append(_title(runs[0], width))
        parts.extend(_text(_table(columns), width) for columns in _columns_that_fit(runs, width))
    return "\n\n".join([*parts, LEGEND]) + "\n"


def slo_summary(workload: Workload) -> str:
    """Returns the SLOs of a workload for the title, such as ``TTFT 48 ms to 2.9 s, TBT 40 ms``."""
    named = (
        ("TTFT", workload.ttft_slo_seconds),
        ("TBT", workload.tbt_slo_seconds),
        ("TTLT", workload.ttlt_slo_seconds),
    )
    return ", ".join(f"{name} {_range(slos[slos > 0])}" for name, slos in named if np.any(slos > 0))


def _setting(result: RunResult) -> tuple[object, ...]:
    """What must be equal for two runs to stand in one table."""
    return (
        result.workload,
        result.profile,
        result.transport,
        result.rate,
        result.requests,
        result.seed,
        result.floor_seconds,
        result.slos,
    )


def _title(result: RunResult, width: int) -> str:
    facts = (
        f"{result.rate:.4g} requests/s",
        f"{result.requests:,} requests",
        f"seed {result.seed}",
        f"TTFT floor {1e3 * result.floor_seconds:g} ms",
        result.transport,
    )
    title = f"{result.workload} on {result.profile}: {', '.join(facts)}"
    lines = [title, f"SLOs: {result.slos}"] if result.slos else [title]
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in lines)


def _range(seconds: Floats) -> str:
    low, high = (_duration(edge) for edge in (float(seconds.min()), float(seconds.max())))
    return low if low == high else f"{low} to {high}"


def _duration(seconds: float) -> str:
    if seconds >= 1000:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _attainment(violations: float) -> str:
    """Rounds down: 100.00 % means that not one request missed."""
    return "-" if math.isnan(violations) else f"{math.floor(round(1e4 * (1 - violations), 6)) / 100:.2f}"


def _milliseconds(digits: int) -> Callable[[float], str]:
    def text(seconds: float) -> str:
        return f"{1e3 * seconds:,.{digits}f}" if math.isfinite(seconds) else "-"

    return text


def _plain(value: float) -> str:
    return f"{value:,.2f}" if math.isfinite(value) else "-"


def _latency_rows(group: str, read: Callable[[RunResult], Percentiles]) -> list[_Metric]:
    text = _milliseconds(1)
    return [
        _Metric(group, "p50", "ms", lambda r: text(read(r).p50)),
        _Metric(group, "p90", "ms", lambda r: text(read(r).p90)),
        _Metric(group, "p99", "ms", lambda r: text(read(r).p99)),
    ]


def _tail_rows(group: str, read: Callable[[RunResult], Tail | None]) -> list[_Metric]:
    """Rows of a time that may not have been measured; it takes microseconds, hence three digits."""
    text = _milliseconds(3)

    def cell(pick: Callable[[Tail], float]) -> Callable[[RunResult], str]:
        def of(result: RunResult) -> str:
            measured = read(result)
            return "-" if measured is None else text(pick(measured))

        return of

    return [_Metric(group, "p50", "ms", cell(lambda t: t.p50)), _Metric(group, "p99", "ms", cell(lambda t: t.p99))]


_METRICS = (
    _Metric("SLO attainment", "deadlines", "%", lambda r: _attainment(r.scores.violations.deadline)),
    _Metric("SLO attainment", "every gap", "%", lambda r: _attainment(r.scores.violations.gap)),
    _Metric("SLO attainment", "mean TPOT", "%", lambda r: _attainment(r.scores.violations.tpot)),
    *_latency_rows("TTFT", lambda r: r.scores.ttft_seconds),
    *_latency_rows("TBT", lambda r: r.scores.tbt_seconds),
    _Metric("Throughput", "met requests", "/s", lambda r: _plain(r.scores.met_requests_per_second)),
    _Metric("Throughput", "tokens", "/s", lambda r: _plain(r.scores.tokens_per_second)),
    *_tail_rows("Decision", lambda r: r.decision_seconds),
    *_tail_rows("Round trip", lambda r: r.round_trip_seconds),
    _Metric("Prediction", "mean error", "%", lambda r: _plain(100 * r.prediction_error)),
    _Metric("Run", "fallbacks", "", lambda r: f"{r.fallbacks:,}"),
    _Metric("Run", "iterations", "", lambda r: f"{r.iterations:,}"),
    _Metric("Run", "mean batch", "requests", lambda r: _plain(r.mean_batch)),
    _Metric("Run", "took", "s", lambda r: _plain(r.wall_seconds)),
    _Metric("Run", "digest", "", lambda r: r.allocation_digest[:_DIGEST_DIGITS]),
)

_LABELS_WIDTH = sum(
    max(map(len, labels)) + _GUTTER for labels in zip(*((m.group, m.name, m.unit) for m in _METRICS), strict=True)
)


def _headings(result: RunResult) -> list[str]:
    """The policy's name, and its parameters one below another."""
    return [result.policy, *(part for part in result.policy_parameters.split(",") if part)]


def _policy_width(result: RunResult) -> int:
    cells = (*_headings(result), *(metric.cell(result) for metric in _METRICS))
    return min(max(_NARROWEST_POLICY, *map(len, cells)), _WIDEST_POLICY)


def _columns_that_fit(runs: list[RunResult], width: int) -> Iterator[list[RunResult]]:
    """Splits the runs into tables of at most ``width`` columns, at least one run in each."""
    columns: list[RunResult] = []
    used = _LABELS_WIDTH
    for run in runs:
        needed = _policy_width(run) + _GUTTER
        if columns and used + needed - _GUTTER > width:  # nothing stands behind the last column
            yield columns
            columns, used = [], _LABELS_WIDTH
        columns.append(run)
        used += needed
    yield columns


def _table(runs: list[RunResult]) -> Table:
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    # A line under the headings and an empty one between groups; ASCII for terminals that know no more.
    lines = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, 1), header_style="", show_footer=False)
    for _ in range(2):
        table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for run in runs:
        width = _policy_width(run)
        table.add_column(Text("\n".join(_headings(run))), justify="right", width=width, overflow="fold")
    for group, metrics in groupby(_METRICS, key=lambda metric: metric.group):
        rows = list(metrics)
        for place, metric in enumerate(rows):
            labels = (group if place == 0 else "", metric.name, metric.unit)
            cells = [Text(text) for text in (*labels, *(metric.cell(run) for run in runs))]
            table.add_row(*cells, end_section=place == len(rows) - 1)
    return table


def _text(table: Table, width: int) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())
