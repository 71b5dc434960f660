"""`slidingserve report`: one page, and pictures, of a folder of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evaluation.report.drawing import to_png
from evaluation.report.page import render
from evaluation.report.reading import ReportError, Results, read_results
from evaluation.report.sections import Part, parts
from evaluation.report.style import NOTHING

__all__ = ["Report", "ReportError", "Written", "make_report", "write_report"]

PAGE, FIGURES = "index.html", "figures"
PAPER = "https://arxiv.org/abs/2606.05933"


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and the pictures by file name."""

    page: str
    pictures: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """Where a report is."""

    page: Path
    pictures: tuple[Path, ...]


def write_report(results: Path, out: Path, *, png: bool = True) -> Written:
    """Reads a folder of results and writes ``out/index.html`` and, with ``png``, ``out/figures/*.png``.

    Raises:
        ReportError: results that cannot be shown, or a folder that cannot be written.
        ImportError: matplotlib or pyarrow is missing (extra ``evaluation``).
    """
    report = make_report(read_results(results), png=png)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / PAGE).write_text(report.page, encoding="utf-8")
        pictures = []
        if png:
            (out / FIGURES).mkdir(exist_ok=True)
            for name, data in report.pictures.items():
                pictures.append(out / FIGURES / name)
                pictures[-1].write_bytes(data)
    except OSError as error:
        raise ReportError(f"--out {out}: cannot be written ({error.strerror}); give another folder") from error
    return Written(out / PAGE, tuple(pictures))


def make_report(results: Results, *, png: bool = True) -> Report:
    """Returns the page and pictures; the same results give the same bytes.

    Time: O(runs x policies x workloads) plus drawing, about 0.2 s for each panel.

    Raises:
        ImportError: matplotlib is missing (extra ``evaluation``).
    """
    made = parts(results)
    page = render(
        "Goodput of scheduling policies",
        _facts(results),
        "Each policy schedules the same requests on a simulated engine. The figures stand beside those of the "
        f'SlidingServe paper, <a href="{PAPER}">arXiv:2606.05933</a>.',
        [part.section for part in made],
    )
    return Report(page, {f"{part.section.key}.png": _png(part) for part in made if png and part.panels})


def _png(part: Part) -> bytes:
    return to_png(part.panels, part.legend, min(part.columns, len(part.panels)))


def _facts(results: Results) -> list[tuple[str, str]]:
    summary = results.summary
    profiles = [f"{name} ({digest[:12]})" for name, digest in summary.profiles.items()]
    return [
        ("version", summary.version),
        ("commit", summary.commit or "unknown"),
        ("profiles", ", ".join(profiles) or NOTHING),
        ("workloads", ", ".join(dict.fromkeys(cell.workload for cell in summary.cells)) or NOTHING),
        ("seeds", ", ".join(map(str, summary.seeds)) or NOTHING),
        ("requests", f"{summary.requests:,} in each run"),
        ("runs", f"{len(results.runs):,}"),
        ("limit", f"{summary.violation_limit * 100:g} % of the requests may miss a deadline"),
        ("caps", ", ".join(map(str, summary.caps)) or NOTHING),
    ]
