"""Journals of sessions whose modes were switched: the replay gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evaluation.sidecar_process import SidecarProcess
from sidecar.journal import read_journal, replay
from slidingserve.contract.values import Mode, OpenSession
from slidingserve.control.v1 import control_pb2
from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub
from slidingserve.scheduler.v1 import scheduler_pb2
from tests.evaluation.recorded_runs import record
from tests.service.support import LONG_SECONDS, OPEN, RawStream, channel_to, wait_ready, wait_until
from tests.strategies import LIMITS, LinearTimer, columns, random_feed, step


def replayed_modes(path: Path) -> list[int]:
    """Replays a journal to the recorded bytes; returns the mode of each allocation."""
    journal = read_journal(path)
    answers = [answer for _, answer in replay(journal)]
    for (_, recorded), answer in zip(journal.exchanges, answers, strict=True):
        assert recorded is not None
        assert answer.SerializeToString(deterministic=True) == recorded.SerializeToString(deterministic=True)
    return [answer.batch_allocation.mode for answer in answers if answer.HasField("batch_allocation")]


@pytest.mark.parametrize("asked", [Mode.UNSPECIFIED, Mode.OFF, Mode.SHADOW])
def test_random_switches_replay(asked: Mode, tmp_path: Path) -> None:
    rng = np.random.default_rng(int(asked))
    path = tmp_path / "session.journal"
    switches = {int(number): Mode(int(rng.integers(1, 4))) for number in rng.choice(100, 30, replace=False)}
    outcome = record(
        path, random_feed(3, 120, 60, 12, 0.05), LinearTimer(), OpenSession(LIMITS, mode=asked), switches=switches
    )
    modes = replayed_modes(path)
    assert len(modes) == outcome.iterations
    assert set(modes) == {1, 2, 3}
    for number, mode in switches.items():
        assert modes[number] == mode


def test_sidecar_with_a_mode_of_its_own_and_a_switch_replays(tmp_path: Path) -> None:
    with SidecarProcess(("--journal-dir", str(tmp_path), "--mode", "off")) as process:
        wait_ready(process)
        with channel_to(process.address) as channel, RawStream(channel) as stream:
            stream.ask(OPEN)
            stream.ask(step(0, arrived=columns([1, 2], [9, 30])))
            request = control_pb2.SetModeRequest(mode=scheduler_pb2.MODE_ACTIVE)
            ControlServiceStub(channel).SetMode(request, timeout=LONG_SECONDS)
            stream.ask(step(1, applied_exactly=False))
            stream.ask(step(2, free=30))
            (path,) = tmp_path.iterdir()
            wait_until(lambda: len(read_journal(path).exchanges) == 4, "the last exchange is on disk")
    assert replayed_modes(path) == [1, 3, 3]
    assert len(read_journal(path).exchanges[2][1].batch_allocation.handles) == 2  # type: ignore[union-attr]
