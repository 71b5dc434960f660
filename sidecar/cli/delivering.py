"""Where results go: a table on stdout, JSON to a file or to stdout instead, what was fitted to folders."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import typer

from sidecar.cli.failing import fail


def check_writable(file: Path | None) -> None:
    """Looks whether results can be written to ``--json FILE``, before they are worked out; fails if not."""
    if file is None or str(file) == "-":
        return
    if file.is_dir():
        _fail_to_write(file, os.strerror(errno.EISDIR))
    if not file.parent.is_dir():
        _fail_to_write(file, f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        _fail_to_write(file, os.strerror(errno.EACCES))


def deliver(document: dict[str, Any], screen: str, file: Path | None) -> None:
    """Prints the screen and writes the document to the file; to stdout in its place, if the file is ``-``."""
    text = json.dumps(document, indent=2)
    if str(file) == "-":
        typer.echo(text)
        return
    typer.echo(screen)
    if file is not None:
        try:
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _fail_to_write(file, error.strerror)


def make_folders(out: Path | None, built_in: Path | None) -> list[Path]:
    """Returns the folders that what was fitted goes to, those of the two that are given; makes them where missing."""
    folders = [folder for folder in (out, built_in) if folder is not None]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def _fail_to_write(file: Path, reason: str | None) -> NoReturn:
    fail(f"--json {file}: cannot be written ({reason}); give another file")
