"""The table of a sweep, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from evaluation.goodput.summary import CellSummary, Reference, Summary

LEGEND = """\
goodput   the highest rate, in requests/s, up to which every rate looked at has at most {limit:g} % of requests that
          miss a deadline: token k is due at arrival + TTFT + (k-1) TBT
95 %      interval by resampling runs of consecutive requests, the same for all policies
cap       most tokens of an iteration, decodes included; each policy has its best of those tried
one cap   the goodput with the cap that is best over all workloads together
at 1.5 x  requests that miss a deadline at 1.5 times the goodput, and at twice the goodput"""


def render(summary: Summary, paper: Reference = lambda profile, workload, policy: None) -> str:
    """Returns the tables, one for each profile, and the legend."""
    parts = []
    for profile, group in groupby(summary.cells, key=lambda cell: cell.profile):
        parts.append(_title(summary, profile))
        cells = list(group)
        parts.append(_table(cells, paper))
        if len(summary.sweep.effort.caps) > 2:
            parts.append(by_cap(summary, cells))
    parts.append(LEGEND.format(limit=100 * summary.sweep.limit))
    return "\n\n".join(parts) + "\n"


def _title(summary: Summary, profile: str) -> str:
    final = summary.sweep.effort.final
    seeds = f"{len(final.seeds)} seed{'s' if len(final.seeds) > 1 else ''}"
    origin = f"commit {summary.origin.commit}, " if summary.origin.commit else ""
    return (
        f"Goodput on {profile}, requests/s; {final.requests} requests x {seeds}\n"
        f"({origin}profile digest {summary.origin.profiles[profile][:8]})"
    )


def _table(cells: Sequence[CellSummary], paper: Reference) -> str:
    published = {id(cell): paper(cell.profile, cell.workload, cell.policy) for cell in cells}
    header = ["workload", "policy", "goodput", "95 %", "cap", "one cap", "at 1.5 x, 2 x"]
    if any(value is not None for value in published.values()):
        header.append("paper")
    rows, last = [], None
    for cell in cells:
        row = [
            "" if cell.workload == last else cell.workload,
            cell.policy,
            _rate(cell.goodput) + ("+" if cell.highest_looked_at else ""),
            "" if cell.low is None or cell.high is None else f"{_rate(cell.low)} to {_rate(cell.high)}",
            "-" if cell.cap is None else str(cell.cap),
            "-" if cell.one_cap is None else f"{_rate(cell.one_cap.goodput)} ({cell.one_cap.cap})",
            ", ".join(f"{100 * share:.1f} %" for share in cell.violations_beyond.values()),
        ]
        value = published[id(cell)]
        if len(header) > len(row):
            row.append("" if value is None else _rate(value))
        rows.append(row)
        last = cell.workload
    return columns(header, rows)


def by_cap(summary: Summary, cells: Sequence[CellSummary]) -> str:
    """Returns the goodput with each cap, as the first round found it."""
    caps, first = summary.sweep.effort.caps, summary.sweep.effort.rounds[0]
    rows = [
        [cell.workload, cell.policy, *(_rate(cell.by_cap[cap]) if cap in cell.by_cap else "" for cap in caps)]
        for cell in cells
        if cell.by_cap
    ]
    title = f"With each cap, by {first.requests} requests x {len(first.seeds)}; 0: less than a tenth of the capacity"
    return f"{title}\n" + columns(["workload", "policy", *map(str, caps)], rows)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns left-aligned columns, two blanks apart, with a line under the header."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in (lines[0], "-" * len(lines[0].rstrip()), *lines[1:]))


def _rate(value: float) -> str:
    return f"{value:.3g}"
