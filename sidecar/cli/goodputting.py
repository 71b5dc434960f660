"""``slidingserve goodput``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sidecar.cli.failing import fail, quiet_grpc

DEFAULT_POLICIES = ("vllm", "sarathi-edf", "qoserve", "slidingserve")


def goodput(options: dict[str, Any]) -> None:
    """Sweeps with progress on stderr; prints the tables, or the path of a shard's runs."""
    quiet_grpc()
    from evaluation.reproduce.paper import paper_goodput

    from engine_adapter.simulated.profiles import ProfileError
    from evaluation.goodput.run import SweepRun, run
    from evaluation.goodput.screen import render
    from evaluation.goodput.store import StoreError
    from evaluation.inprocess import DecisionRefused
    from evaluation.traces import TraceError
    from evaluation.workloads import WorkloadError
    from sidecar.cli.progress import SweepProgress
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError

    folder: Path = options["out"]
    try:
        request = SweepRun(_sweep(options), folder, _shard(options["shard"]), options["jobs"], options["data"])
        with SweepProgress() as progress:
            summary = run(request, progress.update, paper_goodput, lambda profile, workload, policy: None)
    except (
        *(ProfileError, WorkloadError, TraceError, StoreError),
        *(PolicySpecError, PolicyParameterError, UnknownPolicyError, UnknownProfileError, DecisionRefused),
    ) as error:
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
    from evaluation.goodput.caps import full_effort, quick_effort
    from evaluation.goodput.sweep import Sweep
    from evaluation.workloads import parse_workload

    effort = quick_effort if options["quick"] else full_effort
    given = {name: options[name] for name in ("requests", "seeds") if options[name] is not None}
    for name, value in given.items():
        if value < 1:
            fail(f"--{name} {value}: give 1 or more")
    if options["cap"]:
        given["caps"] = tuple(sorted(set(options["cap"])))
        if given["caps"][0] < 1:
            fail(f"--cap {given['caps'][0]}: give 1 or more tokens")
    if not 0.0 < options["violations"] < 100.0:
        fail(f"--violations {options['violations']:g}: give a percentage above 0 and below 100")
    return Sweep(
        profiles=tuple(dict.fromkeys(options["profile"])),
        workloads=tuple(dict.fromkeys(str(parse_workload(text)) for text in options["workload"])),
        policies=tuple(dict.fromkeys(options["policy"] or DEFAULT_POLICIES)),
        effort=effort(**given),
        limit=options["violations"] / 100.0,
    )


def _shard(text: str | None) -> tuple[int, int] | None:
    from evaluation.goodput.run import shard_of

    if text is None:
        return None
    try:
        return shard_of(text)
    except ValueError as error:
        fail(f"--{error}")
