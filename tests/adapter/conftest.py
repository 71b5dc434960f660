"""A running sidecar, a client of it, and an engine that has opened its session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapter.client import ClientSettings, SchedulerClient
from tests.adapter.engine import OPEN, Clock, Engine
from tests.adapter.scripted_sidecar import OPENED, ScriptedSidecar


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    sidecar = ScriptedSidecar(f"unix:{tmp_path}/s.sock")
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(sidecar: ScriptedSidecar, clock: Clock) -> Iterator[SchedulerClient]:
    client = SchedulerClient(ClientSettings(sidecar.address), clock=clock)
    yield client
    client.close()


@pytest.fixture
def engine(client: SchedulerClient) -> Engine:
    assert client.open(OPEN) == OPENED
    return Engine(client)
