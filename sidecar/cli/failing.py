"""How a command ends when the user can do something about it."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Ends the command with status 2 and one message on stderr."""
    typer.echo(f"slidingserve: {message}", err=True)
    raise typer.Exit(2)
