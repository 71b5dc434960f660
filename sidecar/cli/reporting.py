"""``slidingserve report``."""

from __future__ import annotations

from pathlib import Path

import typer

from sidecar.cli.failing import fail


def report(results: Path, out: Path | None, png: bool) -> None:
    """Writes the page and its pictures, and says where they are."""
    from evaluation.report import ReportError, write_report

    try:
        written = write_report(results, results / "report" if out is None else out, png=png)
    except ReportError as error:
        fail(str(error))
    except ImportError as error:
        missing = (error.name or "matplotlib").partition(".")[0]
        fail(f"report: {missing} is not installed; pip install 'slidingserve[evaluation]'")
    typer.echo(f"{written.page}: {written.page.stat().st_size / 1024:,.0f} kB")
    for picture in written.pictures:
        typer.echo(f"{picture}")
