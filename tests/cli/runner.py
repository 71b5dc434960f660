"""Runs the command line, in this process and in one of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from sidecar.cli.app import app


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


OWN_SETTINGS = ("SLIDINGSERVE_", "GRPC_")
"""What names of variables begin with that a tested command must not find in the environment of the tests."""


def run_here(*arguments: str, **more: str) -> Ended:
    """Runs a command in this process, with no settings but ``more``; what is not caught is raised."""
    unset = {name: None for name in os.environ if name.startswith(OWN_SETTINGS)}
    result = CliRunner().invoke(app, list(arguments), env={**unset, **more}, catch_exceptions=False)
    return Ended(result.exit_code, result.stdout, result.stderr)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "sidecar", *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment of a command that finds what this process finds; no terminal, no settings."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(OWN_SETTINGS)}
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def run(*arguments: str, folder: Path | None = None, **more: str) -> Ended:
    """Runs a command as a user does."""
    ended = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, env=environment(**more), cwd=folder
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def run_on_a_terminal(*arguments: str) -> tuple[int, bytes, bytes]:
    """Runs a command whose stderr is a terminal; returns (status, stdout, what the terminal showed)."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=theirs, env=environment(TERM="xterm", COLUMNS="100")
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        results = process.stdout.read()
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return process.returncode, results, shown


def complaint(ended: Ended) -> str:
    """The one line that a command says when it cannot do what it was asked to."""
    assert ended.status == 2, ended
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("slidingserve: ")
    return lines[0].removeprefix("slidingserve: ")
