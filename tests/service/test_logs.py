"""A failure in the log: where it was, and nothing of what the engine has sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from sidecar.logs import configure_logs, logger


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def fail(secret: str) -> None:
    raise KeyError("slack")


@pytest.mark.parametrize("form", ["console", "json"])
def test_tracebacks_hold_no_values(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(form, "info")
    try:
        fail("".join(["pro", "mpt"]))
    except KeyError:
        logger().exception("no decision")
    said = capsys.readouterr().err
    assert "no decision" in said
    assert "KeyError" in said
    assert "slack" in said
    assert "in fail" in said or '"name": "fail"' in said
    assert "prompt" not in said
    if form == "json":
        assert json.loads(said)["level"] == "error"
