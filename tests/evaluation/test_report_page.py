"""The report: what the page says and shows, what it does without, and what it refuses to read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from evaluation.report import Report, make_report
from evaluation.report import words as say
from evaluation.report.reading import Cell, Difference, Timeline, read_results
from evaluation.report.selecting import best_runs, compared, distributions, levels, window
from evaluation.report.style import duration, looks
from sidecar.cli.app import app
from tests.evaluation import report_results as made

SECTIONS = ("goodput", "violations", "latency", "timeline", "cost")
PAPER = "https://arxiv.org/abs/2606.05933"
HOSTILE = 'x"&<script>alert(1)</script>$y$'
POLICIES = (HOSTILE, *made.POLICIES)


class Page(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._in = dict(attrs)["id"] or ""
            self.sections[self._in] = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.sections[self._in] += data.replace("\xa0", " ")

    def all(self, name: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(name)) is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_results(tmp_path_factory.mktemp("results"), workloads=("sharegpt",), policies=POLICIES)


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return make_report(read_results(folder), png=False)


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(report.page)


def test_every_section_says_in_words_what_its_figures_show(page: Page) -> None:
    assert tuple(page.sections) == SECTIONS
    for name, sentence in {
        "goodput": "slidingserve has the highest goodput, 3.30 requests/s, 14 % above qoserve, a clear difference "
        "(95 % interval +10 to +18 %); in the paper slidingserve is ahead, as here.",
        "violations": "; sarathi-edf up to 2.31 (",
        "latency": "TTFT at 2.31 requests/s; its 99th percentile is",
        "timeline": "the fewest requests missed a deadline with slidingserve",
        "cost": "with slidingserve, 0.80 % (sharegpt); all below the limit of 5 %",
    }.items():
        assert sentence in page.sections[name], name
    assert "2.24 to 2.38" in page.sections["goodput"]  # the interval of sarathi-edf
    assert "2.08 (cap 512)" in page.sections["goodput"]  # its result at one cap
    assert "64 %" in page.sections["goodput"]  # of the bound


def test_the_page_says_where_its_figures_come_from(report: Report) -> None:
    for fact in ("0123456789ab", "rtx3090-tp2 (83705c2e)", "0, 1, 2", "3,000 in each run"):
        assert fact in report.page


def test_nothing_is_fetched_and_every_id_is_its_own(page: Page, report: Report) -> None:
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "object", "embed", "image"})
    assert [target for target in [*page.all("src"), *page.all("href")] if "//" in target] == [PAPER]
    assert re.findall(r"url\((?!#)", report.page) == []
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    used = {target[1:] for target in page.all("href") if target.startswith("#")}
    assert used | set(re.findall(r"url\(#([^)]+)\)", report.page)) <= set(ids)
    labels = [attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg" and "role" in attributes]
    assert len(labels) == len(re.findall("<figure", report.page)) == 7
    assert all(labels)


def test_same_results_same_bytes(folder: Path, report: Report, tmp_path: Path) -> None:
    assert make_report(read_results(folder), png=False) == report
    made.write_json(tmp_path / "goodput.json", made.summary(("sharegpt",), POLICIES))
    pictures, again = (make_report(read_results(tmp_path)).pictures for _ in range(2))
    assert pictures == again
    assert pictures["goodput.png"].startswith(b"\x89PNG")


def test_lines_do_where_there_is_no_parquet(folder: Path, tmp_path: Path) -> None:
    other = made.write_results(tmp_path, workloads=("sharegpt",), policies=POLICIES, parquet=False)
    lines = (other / "points.jsonl").read_text().splitlines(keepends=True)
    (other / "points.jsonl").write_text("".join(lines[:40]))
    (other / "points-2of2.jsonl").write_text("".join(lines[30:]) + lines[0][:50])  # its process was killed
    assert read_results(other) == read_results(folder)


def test_names_are_text_whatever_they_hold(page: Page, report: Report) -> None:
    assert "<script" not in report.page
    for name in SECTIONS:
        assert HOSTILE in page.sections[name], name


def test_sections_without_data_say_so(tmp_path: Path) -> None:
    made.write_json(tmp_path / "goodput.json", made.summary())
    report = make_report(read_results(tmp_path))
    page = Page(report.page)
    assert set(report.pictures) == {"goodput.png"}
    assert tuple(page.sections) == SECTIONS
    for name in ("violations", "latency", "cost"):
        assert "are not in this folder" in page.sections[name]
    assert "No timelines were recorded" in page.sections["timeline"]


def test_without_any_cell_a_page_comes_all_the_same(tmp_path: Path) -> None:
    made.write_json(tmp_path / "goodput.json", {**made.summary(), "cells": [], "differences": []})
    assert "has no cells" in make_report(read_results(tmp_path)).page


def test_a_run_that_was_ended_early_bounds_but_is_not_drawn_as_known(folder: Path) -> None:
    results = read_results(folder)
    found = {round(level.rate / 3.3, 2): level for level in levels(best_runs(results, results.summary.cells[3]))}
    assert not found[1.06].complete
    assert found[1.06].high == 33 / 3000
    assert found[2.0].complete
    assert found[2.0].low < found[2.0].mean < found[2.0].high
    assert say.within(list(found.values()), 0.01) == 3.3


def test_overload_is_compared_at_twice_the_goodput(page: Page, folder: Path) -> None:
    results = read_results(folder)
    cell = results.summary.cells[3]
    at_twice = next(level for level in levels(best_runs(results, cell)) if level.rate == 6.6)
    assert "At twice its own goodput a policy misses: " in page.sections["violations"]
    assert f"slidingserve {at_twice.mean * 100:.1f} %" in page.sections["violations"]
    curves = {cell.place: {cell.policy: [at_twice]}}
    faster = cell.model_copy(update={"goodput": 5.0})
    assert "nothing can be said about overload" in say.violations(curves, {cell.place: [faster]})


def test_distributions_stand_at_one_rate_and_leave_out_who_has_no_run_near(folder: Path) -> None:
    results = read_results(folder)
    cells = results.summary.cells
    assert {one.rate for one in distributions(results, cells)} == {2.31}
    expected = np.mean([r.ttft_quantiles for r in best_runs(results, cells[0]) if r.rate == 2.31], axis=0)
    np.testing.assert_allclose(distributions(results, cells)[0].ttft_seconds, expected)
    alone = type(results)(results.summary, tuple(r for r in results.runs if r.rate == 6.6), ())
    assert len(distributions(alone, cells)) == 1


def test_pairs_are_compared_once_and_claims_need_the_interval(folder: Path) -> None:
    assert len(compared(read_results(folder))) == 6
    assert all((one.ratio or 0) > 1 for one in compared(read_results(folder)))
    pairs = [Difference(**one) for one in made.summary()["differences"]]
    assert {say.verdict(one) for one in pairs} == {"higher", "lower"}
    assert say.verdict(pairs[0].model_copy(update={"ratio": 1.1, "low": 0.99, "high": 1.2})) == "not clear"
    assert say.verdict(pairs[0].model_copy(update={"ratio": 1.02, "low": 1.01, "high": 1.03})) == "not clear"
    assert say.verdict(pairs[0].model_copy(update={"low": None})) == "no interval"


def test_a_tie_has_no_leader_and_an_unclear_lead_is_called_so() -> None:
    first, second = (Cell(profile="p", workload="w", policy=name, goodput=2.0) for name in "ab")
    assert say.goodput({("p", "w"): [first, second]}, []).startswith("No policy has a higher goodput")
    assert "2.5 times that of b (without" in say.goodput_at([second, first.model_copy(update={"goodput": 5.0})], [])
    better = first.model_copy(update={"goodput": 2.2})
    unclear = Difference(profile="p", workload="w", policy="a", against="b", ratio=1.1, low=0.95, high=1.2)
    assert "a has the highest goodput on 1 of 1 workload, clearly ahead of the second on none" in say.goodput(
        {("p", "w"): [second, better]}, [unclear]
    )
    assert "which is not a clear difference (95 % interval -5 to +20 %)" in say.goodput_at([second, better], [unclear])


def test_a_long_timeline_is_shown_where_most_deadlines_are_missed() -> None:
    rows = [(float(at), 1.0, 0.0, 1.0, 5.0 if 60 <= at < 70 else 0.0) for at in range(100)]
    one = Timeline(profile="p", workload="w", policy="a", rate=1.0, seed=0, limit_seconds=100.0, iterations=tuple(rows))
    start, end = window([one])
    assert end - start == 20.0
    assert start <= 60.0
    assert end >= 70.0


def test_policies_look_different() -> None:
    names = [str(number) for number in range(40)]
    assert len({(look.colour, look.marker) for look in looks(names).values()}) == 40


def test_durations_have_the_unit_that_fits() -> None:
    assert [duration(s) for s in (4.5e-5, 0.0012, 0.34, 0.99996, 12.0)] == ["45 µs", "1.2 ms", "340 ms", "1 s", "12 s"]


def command(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_command_writes_page_and_pictures_beside_the_results(tmp_path: Path) -> None:
    made.write_json(tmp_path / "goodput.json", made.summary())
    status, out, err = command(str(tmp_path))
    assert (status, err) == (0, "")
    assert str(tmp_path / "report" / "index.html") in out
    assert (tmp_path / "report" / "figures" / "goodput.png").stat().st_size > 1000
    assert command(str(tmp_path), "--out", str(tmp_path / "bare"), "--no-png")[0] == 0
    assert [file.name for file in (tmp_path / "bare").iterdir()] == ["index.html"]


def _text(name: str, text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def _summary(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: made.write_json(folder / "goodput.json", {**made.summary(), **changes})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "goodput.json").unlink(), r"has no goodput.json: it holds no results; give"),
        (_text("goodput.json", '{"schema": 1,'), r"goodput.json: is damaged \(.*\); repeat the command"),
        (_text("goodput.json", "[]"), r"goodput.json: has schema None, this release reads 1; make the report with"),
        (_summary(schema=7), r"goodput.json: has schema 7, this release reads 1; make the report with"),
        (_summary(cells=[{"profile": "p"}]), r"goodput.json: cells.0.workload: field required; repeat"),
        (_summary(kind="ablation"), r"goodput.json: kind: input should be 'goodput'; repeat"),
        (_text("points.parquet", "not Parquet"), r"points.parquet: is damaged \(.*\); repeat the command"),
        (_text("points.jsonl", "nothing\nof this\n"), r"points.jsonl: is damaged \(no line of it is a run\); repeat"),
        (_text("points.jsonl", '{"rate": 2}\n'), r"points.jsonl: 0.profile: field required; repeat"),
        (_text("timelines.json", '[{"profile": 3}]'), r"timelines.json: 0.profile: .*; remove the file"),
    ],
)
def test_bad_results_are_named_with_the_remedy(tmp_path: Path, spoil: Callable[[Path], None], complaint: str) -> None:
    made.write_json(tmp_path / "goodput.json", made.summary())
    spoil(tmp_path)
    status, out, err = command(str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(complaint, err), err
    assert not (tmp_path / "report").exists()


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert "nowhere: there is no such folder; give the --out of" in command(str(tmp_path / "nowhere"))[2]
    (tmp_path / "points-1of2.jsonl").write_text("")
    assert "its sweep has not ended; repeat the command that began it" in command(str(tmp_path))[2]
    made.write_json(tmp_path / "goodput.json", made.summary())
    assert "goodput.json: is a file, not a folder" in command(str(tmp_path / "goodput.json"))[2]
    taken = command(str(tmp_path), "--no-png", "--out", str(tmp_path / "goodput.json"))[2]
    assert re.search(r"--out .*goodput.json: cannot be written \(File exists\); give another folder", taken)


def test_what_is_not_installed_is_named_with_the_extra(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    assert read_results(folder).runs  # the same rows are there as lines
    made.write_json(tmp_path / "goodput.json", made.summary())
    (tmp_path / "points.parquet").write_bytes((folder / "points.parquet").read_bytes())
    assert "pyarrow is not installed; pip install 'slidingserve[evaluation]'" in command(str(tmp_path))[2]
    (tmp_path / "points.parquet").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is not installed; pip install 'slidingserve[evaluation]'" in command(str(tmp_path))[2]
