from __future__ import annotations

from pathlib import Path

import numpy as np

from evaluation.pictures import HEIGHT, WIDTH, text_plot, write_png

RNG = np.random.default_rng(2)
MEASURED = RNG.lognormal(3.5, 0.8, 1500)
PREDICTED = MEASURED * RNG.lognormal(0.0, 0.05, 1500)


def grid(plot: str) -> list[str]:
    """The cells, the uppermost row first."""
    lines = plot.splitlines()
    start = lines.index("predicted, ms") + 1
    margin = max(lines[start].find("|"), lines[start].find("+")) + 1
    return [line[margin:].ljust(WIDTH) for line in lines[start : start + HEIGHT]]


def test_points_near_the_diagonal_lie_near_the_diagonal() -> None:
    plot = text_plot(MEASURED, PREDICTED, "a title")
    assert plot.isascii()
    assert plot.startswith("a title\npredicted, ms\n")
    assert "measured, ms" in plot
    assert max(len(line) for line in plot.splitlines()) <= 100
    cells = grid(plot)
    assert len(cells) == HEIGHT
    for row, line in enumerate(reversed(cells)):
        for column, cell in enumerate(line):
            if cell in ".:+*#@":
                assert abs(column / WIDTH - row / HEIGHT) < 0.15
    assert sum(line.count("@") for line in cells) > 3


def test_too_long_is_above_the_diagonal_and_too_short_below() -> None:
    measured = np.array([10.0, 20.0, 100.0, 10.0, 100.0])
    cells = grid(text_plot(measured, np.array([10.0, 20.0, 100.0, 85.0, 12.0]), ""))
    assert cells[0][-1] == "."
    assert cells[0][0] == cells[-1][-1] == " "
    assert cells[1][0] == "."  # 10 ms that were predicted as 85
    assert cells[-2][-1] == "."  # 100 ms that were predicted as 12
    assert cells[-1][0] == "."


def test_axes_have_numbers_where_the_ticks_are() -> None:
    lines = text_plot(np.array([10.0, 1000.0]), np.array([10.0, 1000.0]), "").splitlines()
    assert lines[2].startswith("1000 +")
    assert lines[2 + HEIGHT - 1].startswith("  10 +")
    below = lines[2 + HEIGHT]
    assert below.index("+", 6) == 6
    assert below[6:].index("+", 1) == 9  # 20 of 10 to 1000: log10(2) / 2 of 60 columns
    assert lines[3 + HEIGHT].split() == ["10", "20", "50", "100", "200", "500", "1000"]


def test_odd_times_are_counted_not_drawn() -> None:
    plot = text_plot(np.array([5.0, 5.0, 5.0, 7.0]), np.array([6.0, -1.0, np.nan, np.inf]), "odd")
    assert "(3 iterations without a positive time are not shown)" in plot
    assert sum(line.count(".") for line in grid(plot)) == 1
    assert text_plot(np.array([5.0]), np.array([-1.0]), "none") == "none\n(no iteration has two positive times)"
    assert text_plot(np.array([5.0]), np.array([5.0]), "one").count("\n") > HEIGHT


def test_the_png_is_one_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "picture.dat"
    predicted = PREDICTED.copy()
    predicted[:2] = np.inf, np.nan
    write_png(MEASURED, predicted, RNG.integers(0, 3, len(MEASURED)), "a title", file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 5000
