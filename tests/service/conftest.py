"""A running sidecar that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from evaluation.sidecar_process import SidecarProcess
from tests.service.support import channel_to, wait_ready


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with SidecarProcess() as process:
        wait_ready(process)
        yield process


@pytest.fixture
def channel(sidecar: SidecarProcess) -> Iterator[grpc.Channel]:
    with channel_to(sidecar.address) as channel:
        yield channel
