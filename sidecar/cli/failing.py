"""What a user gets to read when something goes wrong."""

from __future__ import annotations

import os
from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Ends the command with status 2 and one message on stderr."""
    typer.echo(f"slidingserve: {message}", err=True)
    raise typer.Exit(2)


def quiet_grpc() -> None:
    """Keeps gRPC's own warnings off stderr unless the user wants them; to be called before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
