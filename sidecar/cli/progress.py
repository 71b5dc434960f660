"""How far a sweep is: a bar on a terminal, a line every ten seconds elsewhere; always on stderr."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from evaluation.goodput.sweep import Clock

LINE_EVERY_SECONDS = 10.0


class SweepProgress:
    """Shows the share that is done, what was just finished, and how long is left if the rest goes on as before.

    Use as a context manager; ``update`` is what `evaluation.goodput.sweep.Report` asks for.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f} %  {task.fields[left]:<10} {task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=1.0, left="")

    def __enter__(self) -> SweepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float, text: str) -> None:
        """Tells the share that is done, from 0 to 1, and what was finished."""
        left = remaining(self._clock.left_seconds(share))
        if self._bar is not None:
            self._bar.update(self._task, completed=share, description=text, left=left)
        elif time.monotonic() - self._said >= LINE_EVERY_SECONDS:
            self._said = time.monotonic()
            print(f"{100 * share:3.0f} %  {left + '  ' if left else ''}{text}", file=sys.stderr, flush=True)  # noqa: T201


def remaining(seconds: float) -> str:
    """Returns the time left as text, such as ``4:05 left``; empty where it is not known."""
    if not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left"
