"""Turns panels into pictures: inline SVG for the page, PNG for elsewhere. The same input gives the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from evaluation.report.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, found by search
    "svg.hashsalt": "slidingserve",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,  # a policy's name may hold dollar signs
}
_DPI = 160
_LEGEND_INCHES = 0.4


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the page.

    Attributes:
        title: above it.
        described: what it shows, in words, for those who do not see it.
        draw: draws it on as many axes as there are ``rows``, which share their x axis.
        inches: width and height.
        rows: axes above each other.
    """

    title: str
    described: str
    draw: Callable[[Sequence[Axes]], None]
    inches: tuple[float, float]
    rows: int = 1


def to_svg(panel: Panel, name: str) -> str:
    """Returns an ``svg`` element to be put into a page; ``name`` keeps its ids apart from those of other pictures."""
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=panel.inches, layout="constrained")
        _draw(figure, panel)
        drawn = _svg(figure)
    label = f'<svg role="img" aria-label="{escape(panel.described)}" '
    return _own_ids(drawn, name).replace("<svg ", label, 1)


def swatch(look: Look, name: str) -> str:
    """Returns the line and marker of a policy as a small ``svg`` element, for legends; ``name`` as in `to_svg`."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with _settings():
        figure = Figure(figsize=(0.42, 0.16))
        for x, marker in (([0.05, 0.95], ""), ([0.5], look.marker)):
            options = {**_line(look), "marker": marker, "markersize": 6, "linewidth": 1.5}
            figure.add_artist(Line2D(x, [0.5] * len(x), transform=figure.transFigure, **options))
        drawn = _svg(figure)
    return _own_ids(drawn, name).replace("<svg ", '<svg aria-hidden="true" ', 1)


def to_png(panels: Sequence[Panel], legend: Mapping[str, Look | str], columns: int) -> bytes:
    """Returns one picture with all panels, and below them a legend of policies or colours where there is one."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    heights = [max(p.inches[1] for p in panels[at : at + columns]) for at in range(0, len(panels), columns)]
    if legend:
        heights.append(_LEGEND_INCHES)
    with _settings():
        whole = Figure(figsize=(panels[0].inches[0] * columns, sum(heights)), dpi=_DPI)
        grid = whole.add_gridspec(len(heights), columns, height_ratios=heights)
        for number, panel in enumerate(panels):
            _draw(whole.add_subfigure(grid[number // columns, number % columns]), panel)
        if legend:
            handles = [
                Patch(color=look, label=name) if isinstance(look, str) else Line2D([], [], **_line(look), label=name)
                for name, look in legend.items()
            ]
            below = whole.add_subfigure(grid[-1, :])
            below.legend(handles=handles, loc="center", ncols=4, frameon=False)
        whole.set_layout_engine("constrained")
        with io.BytesIO() as file:
            whole.savefig(file, format="png", metadata={"Software": None})
            return file.getvalue()


def _line(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": (0, look.dashes) if look.dashes else "-"}


def _draw(figure: Figure | SubFigure, panel: Panel) -> None:
    axes = figure.subplots(panel.rows, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(panel.title, fontsize=9.5, fontweight="bold")
    panel.draw(list(axes))


@contextmanager
def _settings() -> Iterator[None]:
    """Draws with our settings and nobody else's."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _svg(figure: Figure) -> str:
    """Returns the ``svg`` element without what a page does not need: declarations, metadata, comments."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        text = file.getvalue()
    text = text[text.index("<svg ") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", text).replace("xlink:href", "href")
    return re.sub(r"\n\s*\n+", "\n", text).strip()


def _own_ids(svg: str, name: str) -> str:
    """Drops ids that nothing refers to, and begins the others with ``name``: ids are unique in a page."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
