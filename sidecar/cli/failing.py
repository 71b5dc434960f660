"""What a user gets to read when something goes wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Ends the command with status 2 and one message on stderr."""
    typer.echo(f"slidingserve: {message}", err=True)
    raise typer.Exit(2)


def quiet_grpc() -> None:
    """Keeps gRPC's own warnings off stderr unless the user wants them; to be called before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def check_writable(file: Path) -> None:
    """Looks whether the results can be written, before they are worked out."""
    if file.is_dir():
        fail_to_write(file, os.strerror(errno.EISDIR))
    if not file.parent.is_dir():
        fail_to_write(file, f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        fail_to_write(file, os.strerror(errno.EACCES))


def fail_to_write(file: Path, reason: str | None) -> NoReturn:
    """Ends the command: the results cannot go where ``--json`` says."""
    fail(f"--json {file}: cannot be written ({reason}); give another file")
