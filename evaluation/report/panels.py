"""Draws one panel of a figure on matplotlib's axes. Used for the page (a picture each) and the PNGs (all in one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.report.reading import Cell, Timeline
from evaluation.report.selecting import Cost, Distribution, Level
from evaluation.report.style import CONTENTS, FAINT, INK, LIMIT, Look, duration, rate, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Looks = Mapping[str, Look]

_OURS, _PAPERS = -0.16, 0.24
"""Where two bars of a policy lie, from the middle of its row; rows are 1 apart and count downwards."""


def goodput(axes: Axes, cells: Sequence[Cell], looks: Looks) -> None:
    """Draws goodput bars: ours filled, with its interval and cap; the paper's hatched; the upper bound as a tick."""
    reach = max((v for c in cells for v in (c.goodput, c.high, c.paper, c.bound) if v is not None), default=0.0) or 1.0
    for row, cell in enumerate(cells):
        colour = looks[cell.policy].colour
        ours = row if cell.paper is None else row + _OURS
        axes.barh(ours, cell.goodput, height=0.42, color=colour)
        if cell.low is not None and cell.high is not None:
            axes.plot([cell.low, cell.high], [ours] * 2, color=INK, linewidth=1.2, marker="|", markersize=7)
        if cell.paper is not None:
            axes.barh(
                row + _PAPERS, cell.paper, height=0.28, facecolor="white", edgecolor=colour, hatch="/////", linewidth=1
            )
            axes.text(cell.paper + reach * 0.02, row + _PAPERS, rate(cell.paper), va="center", fontsize=7.5)
        if cell.bound is not None:
            axes.plot([cell.bound] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.2)
        cap = "" if cell.cap is None else f" cap {cell.cap}"
        end = max(v for v in (cell.goodput, cell.high) if v is not None)
        told = f"{'≥ ' if cell.highest_looked_at else ''}{rate(cell.goodput)}{cap}"
        axes.text(end + reach * 0.02, ours, told, va="center", fontsize=7.5, bbox=_behind())
    axes.set_yticks(range(len(cells)), [wrapped(cell.policy) for cell in cells])
    axes.set(xlim=(0.0, reach * 1.32), ylim=(len(cells) - 0.45, -0.55), xlabel="goodput, requests/s")
    axes.tick_params(axis="y", length=0)


def violations(axes: Axes, curves: Mapping[str, Sequence[Level]], limit: float, looks: Looks) -> None:
    """Draws violations over rate: the seeds' mean and range; carets where only a lower bound is known.

    The axis is linear up to 5 % and logarithmic above, so that the limit and overload can both be read.
    """
    from matplotlib.markers import CARETUPBASE

    for policy, levels in curves.items():
        look = looks[policy]
        whole = [level for level in levels if level.complete]
        at = [level.rate for level in whole]
        axes.fill_between(
            at, [v.low * 100 for v in whole], [v.high * 100 for v in whole], color=look.colour, alpha=0.2, linewidth=0
        )
        axes.plot(at, [v.mean * 100 for v in whole], color=look.colour, marker=look.marker, **_line(look))
        part = [level for level in levels if not level.complete]
        axes.plot(
            [v.rate for v in part],
            [v.high * 100 for v in part],
            linestyle="none",
            marker=CARETUPBASE,
            color=look.colour,
            markersize=6,
        )
    axes.axhline(limit * 100, color=LIMIT, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_yscale("symlog", linthresh=5.0, linscale=1.6)
    axes.minorticks_off()
    ticks = [0, 1, 2, 3, 4, 5, 10, 20, 50, 100]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set(ylim=(-0.15, 115), xlabel="rate, requests/s", ylabel="missed a deadline, %")
    axes.grid(axis="y", color=FAINT, linewidth=0.5)


def distribution(axes: Axes, found: Sequence[Distribution], what: str, looks: Looks) -> None:
    """Draws the share of requests (``what`` = "TTFT") or gaps ("TBT") that were at most so long."""
    shares = np.arange(101)
    ends: list[float] = []
    for one in found:
        seconds = np.maximum(one.ttft_seconds if what == "TTFT" else one.tbt_seconds, 1e-4)
        look = looks[one.policy]
        axes.plot(seconds, shares, color=look.colour, marker=look.marker, markevery=[10, 50, 90, 99], **_line(look))
        ends += [float(seconds[1]), float(seconds[100])]
    axes.set_xscale("log")
    low, high = min(ends) * 0.8, max(ends) * 1.25
    axes.set_xlim(low, high)
    ticks = [tick for tick in _log_ticks(low, high) if low <= tick <= high]
    axes.set_xticks(ticks, [duration(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(ylim=(0, 102), xlabel=what, ylabel="requests, %" if what == "TTFT" else "gaps between tokens, %")
    axes.grid(color=FAINT, linewidth=0.5)


def timeline(axes: Axes, one: Timeline, between: tuple[float, float], highest: float) -> None:
    """Draws iterations as bars: width = duration, height = tokens (logarithmic), colour = content.

    A cross stands where deadlines were missed. One element for each colour, however many iterations there are.
    """
    start, end = between
    rows = np.array([row for row in one.iterations if start <= row[0] < end]).reshape(-1, 5)
    prefill, decode = rows[:, 2] > 0, rows[:, 3] > 0
    top = highest * 2.6
    for (_, colour), which in zip(CONTENTS, (~prefill, prefill & decode, prefill & ~decode), strict=True):
        _bars(axes, rows[which], colour)
    missed = rows[rows[:, 4] > 0]
    axes.plot(
        missed[:, 0] + missed[:, 1],
        np.full(len(missed), highest * 1.6),
        linestyle="none",
        marker="x",
        color=LIMIT,
        markersize=4.5,
        markeredgewidth=1.2,
    )
    axes.set_yscale("log")
    ticks = [tick for tick in (1, 10, 100, 1000, 10000) if tick <= highest]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=between, ylim=(0.8, top))
    axes.set_ylabel("tokens", fontsize=7.5)


def cost(axes: Axes, costs: Sequence[Cost], looks: Looks) -> None:
    """Draws the p50 (filled) and p99 (open) of decision times."""
    for row, one in enumerate(costs):
        look = looks[one.policy]
        axes.plot([one.p50_seconds, one.p99_seconds], [row, row], color=look.colour, linewidth=1.4)
        axes.plot(one.p50_seconds, row, look.marker, color=look.colour, markersize=7)
        axes.plot(one.p99_seconds, row, look.marker, color=look.colour, markersize=7, markerfacecolor="white")
    axes.set_xscale("log")
    low = min(one.p50_seconds for one in costs) / 1.6
    high = max(one.p99_seconds for one in costs) * 1.6
    axes.set_xlim(low, high)
    ticks = [tick for tick in _log_ticks(low, high) if low <= tick <= high]
    axes.set_xticks(ticks, [duration(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    axes.set(xlabel="one decision: p50 (filled), p99 (open)")
    _policy_rows(axes, costs)


def share(axes: Axes, costs: Sequence[Cost], limit: float, looks: Looks) -> None:
    """Draws the decisions' share of the iterations' time, and the most that it may be."""
    for row, one in enumerate(costs):
        axes.barh(row, one.share * 100, height=0.5, color=looks[one.policy].colour)
        axes.text(one.share * 100 + 0.1, row, f"{one.share * 100:.2f}", va="center", fontsize=7.5, bbox=_behind())
    axes.axvline(limit * 100, color=LIMIT, linewidth=1, linestyle=(0, (4, 2)))
    axes.set(xlim=(0, max(limit * 120, *(one.share * 118 for one in costs))), xlabel="of the iterations' time, %")
    _policy_rows(axes, costs)


def _policy_rows(axes: Axes, costs: Sequence[Cost]) -> None:
    axes.set_yticks(range(len(costs)), [wrapped(one.policy) for one in costs])
    axes.set_ylim(len(costs) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _bars(axes: Axes, rows: np.ndarray, colour: str) -> None:
    """Draws rectangles from 1 token upwards as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not len(rows):
        return
    left, right = rows[:, 0], rows[:, 0] + rows[:, 1]
    top, bottom = np.maximum(rows[:, 2] + rows[:, 3], 1.0), np.full(len(rows), 0.8)
    corners = np.stack([left, bottom, left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(rows))
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, edgecolor="none"))


def _line(look: Look) -> dict[str, Any]:
    return {"linewidth": 1.5, "markersize": 4.5, "linestyle": (0, look.dashes) if look.dashes else "-"}


def _behind() -> dict[str, Any]:
    """Returns a white ground for text that may lie on a line."""
    return {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten from below to above, with 2 and 5 between where there are few of them."""
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    factors = (1, 2, 5) if high / low < 200 else (1, 3) if high / low < 2000 else (1,)
    return [factor * 10.0**exponent for exponent in exponents for factor in factors]
