"""Pictures of predicted over measured iteration times: as text for terminals and logs, and as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.hardware.batches import Scenario
from slidingserve.contract.values import Floats, Ints

WIDTH, HEIGHT = 60, 20
# A cell's character says how many iterations lie in it: 1, 2 to 3, 4 to 7, ...
_SHADES = ".:+*#@"
_TICKS = (1, 2, 5)
_COLOURS = {Scenario.DECODE: "tab:green", Scenario.PREFILL: "tab:orange", Scenario.MIXED: "tab:blue"}


def text_plot(measured_ms: Floats, predicted_ms: Floats, title: str) -> str:
    """Returns a density plot in plain ASCII, both axes logarithmic and alike.

    Iterations with a time that is not positive and finite have no place on such axes; their number is said below.
    """
    shown = (measured_ms > 0.0) & (predicted_ms > 0.0) & _finite(measured_ms, predicted_ms)
    if not shown.any():
        return f"{title}\n(no iteration has two positive times)"
    x, y = np.log10(measured_ms[shown]), np.log10(predicted_ms[shown])
    low, high = _range(x, y)
    columns, rows = _cells(x, low, high, WIDTH), _cells(y, low, high, HEIGHT)
    counts = np.zeros((HEIGHT, WIDTH), np.int64)
    np.add.at(counts, (rows, columns), 1)
    ticks = _ticks(low, high)
    labels = {_cell(np.log10(tick), low, high, HEIGHT): f"{tick:g}" for tick in ticks}
    margin = max(len(label) for label in labels.values())
    lines = [title, "predicted, ms"]
    for row in range(HEIGHT - 1, -1, -1):
        cells = "".join(_character(counts[row, column], row, column) for column in range(WIDTH))
        lines.append(f"{labels.get(row, ''):>{margin}} {'+' if row in labels else '|'}{cells}".rstrip())
    lines += _axis(ticks, low, high, margin)
    lines.append(_legend())
    if not shown.all():
        lines.append(f"({int((~shown).sum())} iterations without a positive time are not shown)")
    return "\n".join(lines)


def write_png(measured_ms: Floats, predicted_ms: Floats, scenarios: Ints, title: str, path: Path) -> None:
    """Writes a scatter plot, one colour for each scenario, as PNG whatever the file is called.

    Raises ImportError without matplotlib (extra ``fit``), OSError when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 7.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    finite = _finite(measured_ms, predicted_ms)
    for scenario, colour in _COLOURS.items():
        at = (scenarios == scenario) & finite
        axes.plot(measured_ms[at], predicted_ms[at], ".", color=colour, alpha=0.4, label=scenario.name.lower())
    ends = _range(measured_ms[finite], predicted_ms[finite]) if finite.any() else (0.0, 1.0)
    axes.plot(ends, ends, "k-", linewidth=0.8, label="predicted = measured")
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", aspect="equal")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    figure.savefig(path, format="png")


def _finite(measured_ms: Floats, predicted_ms: Floats) -> NDArray[np.bool_]:
    return np.isfinite(measured_ms) & np.isfinite(predicted_ms)


def _range(x: Floats, y: Floats) -> tuple[float, float]:
    """Returns the ends of both axes; never of length 0."""
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    return (low, high) if high - low > 1e-3 else (low - 0.05, high + 0.05)


def _cells(values: Floats, low: float, high: float, cells: int) -> Ints:
    return np.minimum((values - low) / (high - low) * cells, cells - 1).astype(np.int64)


def _cell(value: float, low: float, high: float, cells: int) -> int:
    return int(_cells(np.array([value]), low, high, cells)[0])


def _ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2, 5, 10, ... within the axis; the two ends where it is too short for those."""
    exponents = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in _TICKS]
    inside = [tick for tick in ticks if low <= np.log10(tick) <= high]
    return inside if len(inside) > 1 else [float(f"{10.0**end:.3g}") for end in (low, high)]


def _character(count: int, row: int, column: int) -> str:
    if count:
        return _SHADES[min(int(count).bit_length(), len(_SHADES)) - 1]
    on_diagonal = int((column + 0.5) / WIDTH * HEIGHT) == row
    return "/" if on_diagonal else " "


def _axis(ticks: Sequence[float], low: float, high: float, margin: int) -> list[str]:
    """Returns the line below the plot, the numbers under it (where they have room), and what they are."""
    line, numbers = ["-"] * WIDTH, [" "] * (WIDTH + 8)
    free_from = 0
    for tick in ticks:
        at = _cell(np.log10(tick), low, high, WIDTH)
        line[at] = "+"
        label = f"{tick:g}"
        start = max(at - len(label) // 2, 0)
        if start >= free_from:
            numbers[start : start + len(label)] = label
            free_from = start + len(label) + 1
    indent = " " * (margin + 2)
    return [
        f"{' ' * margin} +{''.join(line)}",
        f"{indent}{''.join(numbers)}".rstrip(),
        f"{indent}{'measured, ms':^{WIDTH}}".rstrip(),
    ]


def _legend() -> str:
    shades = [f"{shade} {2**i}" + (f"-{2 ** (i + 1) - 1}" if i else "") for i, shade in enumerate(_SHADES[:-1])]
    return f"iterations: {', '.join(shades)}, {_SHADES[-1]} more; / predicted = measured; log axes"
