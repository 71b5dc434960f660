"""``slidingserve policies``."""

from __future__ import annotations

from dataclasses import fields

import typer

from sidecar.policies.registry import broken_packages, registrations


def policies() -> None:
    """Prints each policy, what it is, and its parameters with their defaults."""
    for entry in registrations():
        typer.echo(f"{entry.name}: {entry.summary}")
        for parameter in fields(entry.parameters):
            typer.echo(f"    {parameter.name} = {parameter.default}")
    for name, why in broken_packages().items():
        typer.echo(f"{name}: {why}", err=True)
