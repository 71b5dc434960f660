"""Log lines on stderr, for people (console) or for collectors (JSON).

Tracebacks are plain and without the values of variables: a pretty one takes 50 ms, in which every engine would wait.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO

import structlog


def configure_logs(form: str, level: str) -> None:
    """Sets the form ("console" or "json") and the least level of the process's log lines."""
    least = logging.getLevelNamesMapping()[level.upper()]
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors += [structlog.processors.ExceptionRenderer(transform), structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        processors += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *arguments: LineLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def logger() -> Any:
    """Returns the process's logger: ``logger().info("what happened", key=value)``."""
    return structlog.get_logger()


class LineLogger:
    """Writes each line at once; when nobody reads any more, the line is lost and the sidecar goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Writes one line."""
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk, a closed stream
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = log = msg
