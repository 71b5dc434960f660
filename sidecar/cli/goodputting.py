"""``slidingserve goodput``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sidecar.cli.failing import evaluation_errors, fail, quiet_grpc
from sidecar.cli.options import COMPARED_POLICIES, effort_of, once, share_of


def goodput(options: dict[str, Any]) -> None:
    """Sweeps with progress on stderr; prints the tables, or the path of a shard's runs."""
    quiet_grpc()
    from evaluation.goodput.run import SweepRun, run
    from evaluation.goodput.screen import render
    from evaluation.reproduce.paper import paper_goodput
    from sidecar.cli.progress import SweepProgress

    folder: Path = options["out"]
    try:
        request = SweepRun(_sweep(options), folder, _shard(options["shard"]), options["jobs"], options["data"])
        with SweepProgress() as progress:
            summary = run(request, progress.update, paper_goodput, lambda profile, workload, policy: None)
    except evaluation_errors() as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted; every finished run is in {folder}, the same command goes on from there")
    if summary is None:
        typer.echo(
            f"shard {options['shard']} is done. When all shards are in {folder}, run the same command without --shard."
        )
        return
    typer.echo(render(summary, paper_goodput))
    typer.echo(f"All of it is in {folder}; `slidingserve report {folder}` makes a page of it.")


def _sweep(options: dict[str, Any]) -> Any:
    from evaluation.goodput.sweep import Sweep
    from evaluation.workloads import parse_workload

    return Sweep(
        profiles=once(options["profile"]),
        workloads=once(str(parse_workload(text)) for text in options["workload"]),
        policies=once(options["policy"] or COMPARED_POLICIES),
        effort=effort_of(options["quick"], options["requests"], options["seeds"], options["cap"]),
        limit=share_of(options["violations"]),
    )


def _shard(text: str | None) -> tuple[int, int] | None:
    from evaluation.goodput.run import shard_of

    if text is None:
        return None
    try:
        return shard_of(text)
    except ValueError as error:
        fail(f"--{error}")
