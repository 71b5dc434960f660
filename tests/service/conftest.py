"""A running sidecar that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from evaluation.sidecar_process import SidecarProcess
from tests.service.support import channel_to, free_address, wait_ready


@pytest.fixture(scope="package")
def probes() -> str:
    """The second address of `sidecar`, for probes."""
    return free_address()


@pytest.fixture(scope="package")
def sidecar(probes: str) -> Iterator[SidecarProcess]:
    with SidecarProcess(("--health-listen", probes)) as process:
        wait_ready(process)
        yield process


@pytest.fixture(scope="package")
def small_sidecar() -> Iterator[SidecarProcess]:
    """A sidecar for three engines with small messages."""
    with SidecarProcess(("--max-sessions", "3", "--max-message-bytes", "4096")) as process:
        wait_ready(process)
        yield process


@pytest.fixture
def channel(sidecar: SidecarProcess) -> Iterator[grpc.Channel]:
    with channel_to(sidecar.address) as channel:
        yield channel
