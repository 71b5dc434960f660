"""Log lines on stderr, for people (console) or for collectors (JSON); never in the way of an iteration."""

from __future__ import annotations

import logging
import sys
from typing import Any

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
        processors += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def logger() -> Any:
    """Returns the process's logger: ``logger().info("what happened", key=value)``."""
    return structlog.get_logger()
