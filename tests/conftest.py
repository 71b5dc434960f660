"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA_VARIABLE = "SLIDINGSERVE_DATA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", help=f"--data=FOLDER of the public traces and kernel tables (or set {DATA_VARIABLE})")


@pytest.fixture(scope="session")
def data_folder(request: pytest.FixtureRequest) -> Path:
    """The data folder; the test is skipped where there is none."""
    given = request.config.getoption("--data") or os.environ.get(DATA_VARIABLE)
    if not given:
        pytest.skip(f"needs the public traces and kernel tables: give --data=FOLDER or set {DATA_VARIABLE}")
    folder = Path(given)
    if not folder.is_dir():
        pytest.skip(f"--data {folder}: there is no such folder")
    return folder.resolve()
