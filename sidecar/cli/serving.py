"""``slidingserve serve`` and ``slidingserve check-config``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from sidecar.cli.failing import fail, quiet_grpc
from sidecar.config import ConfigError, SidecarSettings, load_settings, unknown_variables


def serve(flags: dict[str, Any], file: Path | None) -> None:
    """Serves until the process is told to end."""
    settings, _ = _load(flags, file)
    quiet_grpc()
    from sidecar.server import ServeError, run

    try:
        run(settings)
    except ServeError as error:
        fail(str(error))


def check_config(flags: dict[str, Any], file: Path | None) -> None:
    """Prints the settings, each with its source."""
    settings, sources = _load(flags, file)
    rows = [(name, getattr(settings, name), sources[name]) for name in SidecarSettings.model_fields]
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        typer.echo(f"{name:<{width}} = {'' if value is None else value!s:<28}  ({source})")
    for name in unknown_variables(os.environ):
        typer.echo(f"note: {name} is no setting and has no effect", err=True)
    typer.echo("settings are valid")


def _load(flags: dict[str, Any], file: Path | None) -> tuple[SidecarSettings, dict[str, str]]:
    try:
        return load_settings(flags, file)
    except ConfigError as error:
        fail(str(error))
