"""The command line ``slidingserve``: one module for each command, which imports what it needs when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; known mistakes end with status 2 and one message, not with a traceback."""
    from sidecar.cli.app import app

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
