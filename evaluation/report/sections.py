"""The parts of a report: each with its sentence, figures and tables, or a line that says why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from evaluation.report import panels, words
from evaluation.report.drawing import Panel, swatch, to_svg
from evaluation.report.page import Picture, Section, Table
from evaluation.report.reading import Cell, Results, Timeline
from evaluation.report.selecting import (
    Place,
    base,
    best_runs,
    cells_by_place,
    compared,
    costs,
    distributions,
    levels,
    policies,
    timelines_by_run,
    window,
)
from evaluation.report.style import CONTENTS, LIMIT, NOTHING, Look, counted, duration, looks, percent, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COST_LIMIT = 0.05
"""The most that decisions may take of the iterations' time."""

_SIZE = (4.6, 3.0)
_BROAD_WIDTH = 9.6
_MISSING_RUNS = (
    "The runs behind the goodputs are not in this folder (points.parquet or points.jsonl); repeat "
    "`slidingserve goodput` with this folder as --out."
)


@dataclass(frozen=True, slots=True)
class Part:
    """A section and the panels in it; ``legend`` is what a picture of all panels has to explain: policies, colours."""

    section: Section
    panels: tuple[Panel, ...] = ()
    legend: Mapping[str, Look | str] = field(default_factory=dict)
    columns: int = 2


def parts(results: Results) -> list[Part]:
    """Returns all parts in the order of the page."""
    look = looks(policies(results))
    return [
        _goodput(results, look),
        _violations(results, look),
        _distributions(results, look),
        _timelines(results),
        _costs(results, look),
    ]


def _goodput(results: Results, look: dict[str, Look]) -> Part:
    title = "Goodput: the highest rate that can be promised"
    places = cells_by_place(results)
    if not places:
        return Part(Section("goodput", title, missing="goodput.json has no cells: no policy was searched to its end."))
    pairs = compared(results)
    drawn = tuple(
        Panel(
            _named(results, place),
            words.goodput_at(cells, results.summary.differences),
            partial(_on_first, partial(panels.goodput, cells=cells, looks=look)),
            (_SIZE[0], 0.75 + 0.52 * len(cells)),
        )
        for place, cells in places.items()
    )
    how = (
        f"Bars: requests/s at which at most {results.summary.violation_limit * 100:g} % of the requests miss a "
        "deadline, with the policy's best cap of an iteration's tokens; thin line: 95 % interval. Hatched: what the "
        "paper prints, where it does (other machine and engine: compare order and ratios). Tick: upper bound for any "
        "policy, where one was worked out."
    )
    tables = [_fitting(results, _goodput_table(results))]
    if pairs:
        tables.append(_fitting(results, _difference_table(results)))
    seen = words.goodput(places, results.summary.differences)
    section = Section("goodput", title, seen, how, (), _pictures(drawn, "goodput"), tuple(tables))
    return Part(section, drawn)


def _goodput_table(results: Results) -> Table:
    def row(cell: Cell) -> tuple[str, ...]:
        interval = NOTHING if cell.low is None or cell.high is None else f"{rate(cell.low)} to {rate(cell.high)}"
        one = NOTHING if cell.one_cap is None else f"{rate(cell.one_cap.goodput)} (cap {cell.one_cap.cap})"
        of_bound = percent(cell.goodput / cell.bound, 0) if cell.bound else NOTHING
        return (
            cell.profile,
            cell.workload,
            cell.policy,
            NOTHING if cell.cap is None else str(cell.cap),
            ("≥ " if cell.highest_looked_at else "") + rate(cell.goodput),
            interval,
            one,
            rate(cell.paper),
            rate(cell.bound),
            of_bound,
        )

    headings = ("profile", "workload", "policy", "best cap", "goodput", "95 % interval", "with one cap for all")
    return Table(
        "Goodput, requests/s",
        (*headings, "paper", "bound", "of bound"),
        tuple(row(cell) for cell in results.summary.cells),
        frozenset(range(3, 10)),
    )


def _difference_table(results: Results) -> Table:
    rows = tuple(
        (
            one.profile,
            one.workload,
            one.policy,
            one.against,
            f"{one.ratio or 0.0:.3f}",
            NOTHING if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}",
            words.verdict(one),
        )
        for one in compared(results)
    )
    headings = ("profile", "workload", "policy", "against", "ratio of goodputs", "95 % interval", "verdict")
    return Table("Policies compared on the same requests", headings, rows, frozenset({4, 5}))


def _violations(results: Results, look: dict[str, Look]) -> Part:
    title = "Violations over rate"
    places = cells_by_place(results)
    curves = {
        place: found
        for place, cells in places.items()
        if (found := {c.policy: rows for c in cells if (rows := levels(best_runs(results, c)))})
    }
    if not curves:
        return Part(Section("violations", title, missing=_MISSING_RUNS))
    limit = results.summary.violation_limit
    drawn = tuple(
        Panel(
            _named(results, place),
            words.violations_at(found, limit),
            partial(_on_first, partial(panels.violations, curves=found, limit=limit, looks=look)),
            _SIZE,
        )
        for place, found in curves.items()
    )
    how = (
        f"Share of requests that missed a deadline: mean of {counted(len(results.summary.seeds), 'seed')}, band from "
        f"the lowest to the highest. Dashed: the limit of {limit * 100:g} %. Triangles: runs that were ended early, "
        "because they miss too many anyway; the share is at least so high. The axis is stretched below 5 %."
    )
    seen = words.violations(curves, places)
    shown = _shown(look, [policy for found in curves.values() for policy in found])
    return Part(
        Section("violations", title, seen, how, _legend(shown, "violations"), _pictures(drawn, "violations")),
        drawn,
        shown,
    )


def _distributions(results: Results, look: dict[str, Look]) -> Part:
    title = "TTFT and TBT at one rate"
    places = cells_by_place(results)
    found = {place: ones for place, cells in places.items() if (ones := distributions(results, cells))}
    if not found:
        missing = _MISSING_RUNS if not results.runs else "No run with quantiles of TTFT and TBT went to its end."
        return Part(Section("latency", title, missing=missing))
    drawn = []
    for place, ones in found.items():
        left_out = [cell.policy for cell in places[place] if cell.policy not in {one.policy for one in ones}]
        for what in ("TTFT", "TBT"):
            draw = partial(_on_first, partial(panels.distribution, found=ones, what=what, looks=look))
            told = words.distribution_at(ones, left_out, what)
            drawn.append(Panel(f"{_named(results, place)}: {what}", told, draw, _SIZE))
    how = (
        "Share of requests whose first token came within the time (TTFT), and of gaps between tokens that were at most "
        "so long (TBT), at a rate near the highest goodput that the policies have in common. Logarithmic time; marks "
        "at 10, 50, 90 and 99 %."
    )
    shown = _shown(look, [one.policy for ones in found.values() for one in ones])
    pictures = _pictures(drawn, "latency")
    section = Section(
        "latency", title, words.distributions(found), how, _legend(shown, "latency"), pictures, pairs=True
    )
    return Part(section, tuple(drawn), shown)


def _timelines(results: Results) -> Part:
    title = "One run, iteration by iteration"
    groups = [[(base(results, one), one) for one in group if one.iterations] for group in timelines_by_run(results)]
    groups = [group for group in groups if group]
    if not groups:
        return Part(Section("timeline", title, missing="No timelines were recorded (timelines.json)."))
    between = [window([one for _, one in group]) for group in groups]
    drawn = tuple(_timeline_panel(results, group, times) for group, times in zip(groups, between, strict=True))
    how = (
        "Each bar is an iteration: its width is its duration, its height the tokens in it (logarithmic), its colour "
        "what they are. Crosses: iterations in which requests missed their first deadline. All rows show the same time "
        "of the same arrivals."
    )
    legend = (
        *((colour, name) for name, colour in CONTENTS),
        (f'<b style="color:{LIMIT}" aria-hidden="true">&times;</b> ', "deadline missed"),
    )
    seen = words.timelines(groups, between)
    section = Section("timeline", title, seen, how, legend, _pictures(drawn, "timeline", broad=True))
    return Part(section, drawn, dict(CONTENTS), columns=1)


def _timeline_panel(results: Results, group: Sequence[tuple[str, Timeline]], between: tuple[float, float]) -> Panel:
    one = group[0][1]
    place = _named(results, (one.profile, one.workload))
    highest = max(row[2] + row[3] for _, each in group for row in each.iterations)

    def draw(axes: Sequence[Axes]) -> None:
        for (policy, each), on in zip(group, axes, strict=True):
            panels.timeline(on, each, between, max(highest, 10.0))
            on.set_title(policy, loc="left", fontsize=8.5)
        axes[-1].set_xlabel("time in the run, s")

    return Panel(
        f"{place}, {rate(one.rate)} requests/s, seed {one.seed}",
        words.timeline_at(group, between),
        draw,
        (_BROAD_WIDTH, 0.8 + 1.05 * len(group)),
        len(group),
    )


def _costs(results: Results, look: dict[str, Look]) -> Part:
    title = "What decisions cost"
    found = {name: rows for name in results.summary.profiles if (rows := costs(results, name))}
    if not found:
        missing = _MISSING_RUNS if not results.runs else "The runs hold no decision times."
        return Part(Section("cost", title, missing=missing))
    drawn = []
    for name, rows in found.items():
        size = (_SIZE[0], 0.9 + 0.42 * len(rows))
        time_of = partial(_on_first, partial(panels.cost, costs=rows, looks=look))
        share_of = partial(_on_first, partial(panels.share, costs=rows, limit=COST_LIMIT, looks=look))
        drawn.append(Panel(f"{name}: time of a decision", words.cost_times(rows), time_of, size))
        drawn.append(Panel(f"{name}: share of the iterations", words.cost_shares(rows, COST_LIMIT), share_of, size))
    how = (
        "Real time on the machine that ran the simulations, over all complete runs with the best caps: p50 is the "
        f"middle of the runs', p99 and share are the worst run's. Dashed: the limit of {COST_LIMIT * 100:g} %."
    )
    table = Table(
        "Decision cost",
        ("profile", "policy", "p50", "p99, worst", "share, worst", "where"),
        tuple(
            (name, c.policy, duration(c.p50_seconds), duration(c.p99_seconds), percent(c.share, 2), c.workload)
            for name, rows in found.items()
            for c in rows
        ),
        frozenset({2, 3, 4}),
    )
    seen = " ".join(
        (f"On {name}: " if len(found) > 1 else "") + words.cost_shares(rows, COST_LIMIT) for name, rows in found.items()
    )
    section = Section("cost", title, seen, how, (), _pictures(drawn, "cost"), (_fitting(results, table),), pairs=True)
    return Part(section, tuple(drawn))


def _on_first(draw: partial[None], axes: Sequence[Axes]) -> None:
    draw(axes[0])


def _pictures(drawn: Sequence[Panel], name: str, *, broad: bool = False) -> tuple[Picture, ...]:
    return tuple(
        Picture(to_svg(panel, f"{name}-{number}"), panel.described, broad) for number, panel in enumerate(drawn)
    )


def _fitting(results: Results, table: Table) -> Table:
    """Returns a table without its first column, the profile, where there is only one."""
    if len(results.summary.profiles) > 1:
        return table
    numbers = frozenset(column - 1 for column in table.numbers)
    return Table(table.caption, table.headings[1:], tuple(row[1:] for row in table.rows), numbers)


def _named(results: Results, place: Place) -> str:
    """Returns a workload, with its profile where there are several."""
    return place[1] if len(results.summary.profiles) == 1 else f"{place[1]}, {place[0]}"


def _shown(look: dict[str, Look], policies: Sequence[str]) -> dict[str, Look]:
    return {policy: one for policy, one in look.items() if policy in set(policies)}


def _legend(shown: dict[str, Look], name: str) -> tuple[tuple[str, str], ...]:
    return tuple((swatch(look, f"{name}-policy-{n}"), policy) for n, (policy, look) in enumerate(shown.items()))
