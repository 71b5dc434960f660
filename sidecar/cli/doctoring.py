"""``slidingserve doctor``."""

from __future__ import annotations

import os

import typer

from sidecar.cli.failing import fail, quiet_grpc


def doctor(*, vllm: bool, additional_config: str | None) -> None:
    """Prints the findings as they come; ends with status 1 if anything fails."""
    quiet_grpc()
    if not vllm:
        fail("say which engine to look at: slidingserve doctor --vllm")
    from evaluation.engines.doctor import examine

    failures = 0
    for finding in examine(additional_config, os.environ):
        failures += finding.state == "fails"
        typer.echo(f"{finding.state:>7}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"         -> {finding.remedy}")
    if failures:
        typer.echo(f"{failures} of these must be put right; until then vLLM serves with its own policy")
        raise typer.Exit(1)
    typer.echo("vLLM with this adapter and this sidecar fit together")
