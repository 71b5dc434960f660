"""Journals of a real sidecar: read back, and replayed to the same bytes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.sidecar_process import SidecarProcess
from sidecar.journal import JournalWriter, read_journal, replay
from sidecar.services.scheduler import SchedulerService
from sidecar.session.machine import SessionDefaults
from slidingserve.contract.codec import decode_response
from slidingserve.contract.values import (
    BatchAllocation,
    ErrorReason,
    OpenSession,
    Request,
    ResyncRequired,
    SessionError,
    SessionOpened,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.service.support import (
    OPEN,
    RawStream,
    ServerThread,
    channel_to,
    client_of,
    engine_for,
    wait_ready,
    wait_until,
)
from tests.strategies import LIMITS, columns, ints, random_feed, snapshot, step


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SidecarProcess, Path]]:
    folder = tmp_path_factory.mktemp("journals") / "made by the sidecar"
    arguments = ("--journal-dir", str(folder), "--default-tbt-seconds", "0.07", "--policy", "vllm:max_tokens=48")
    with SidecarProcess(arguments) as process:
        wait_ready(process)
        yield process, folder


def journal_of(folder: Path, session: str) -> Path:
    (path,) = folder.glob(f"*-{session}.journal")
    return path


def assert_replays(path: Path, exchanges: int) -> list[pb.ScheduleResponse]:
    """Every answer is the recorded one, byte by byte."""
    journal = read_journal(path)
    assert len(journal.exchanges) == exchanges
    answers = list(replay(journal))
    for (request, recorded), (same, answer) in zip(journal.exchanges, answers, strict=True):
        assert recorded is not None
        assert request == same
        assert answer.SerializeToString(deterministic=True) == recorded.SerializeToString(deterministic=True)
        assert not recorded.batch_allocation.HasField("phase_timings")
    return [answer for _, answer in answers]


def test_engine_run_replays_to_the_same_bytes(sidecar: tuple[SidecarProcess, Path]) -> None:
    process, folder = sidecar
    with client_of(process) as client:
        assert client.session is not None
        session = client.session.session
        outcome = engine_for(random_feed(2, 60, prompt=60, output=12, gap_seconds=0.05), client).run()
        decisions = client.counters.decisions
    assert outcome.preemptions > 0
    path = journal_of(folder, session)
    wait_until(lambda: len(read_journal(path).exchanges) == decisions + 1, "the last exchange is on disk")
    answers = assert_replays(path, decisions + 1)
    opened = answers[0].session_opened
    assert (opened.session, opened.policy, opened.slo_defaults.tbt_slo_seconds) == (session, "vllm", 0.07)
    header = read_journal(path).header
    assert (header.format_version, header.session, header.default_policy) == (1, session, "vllm:max_tokens=48")
    assert max(sum(answer.batch_allocation.tokens) for answer in answers) == 48


def test_resyncs_snapshots_and_errors_replay(sidecar: tuple[SidecarProcess, Path]) -> None:
    process, folder = sidecar
    rows = [(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)]
    with channel_to(process.address) as channel, RawStream(channel) as stream:
        messages: list[Request | pb.ScheduleRequest] = [
            pb.ScheduleRequest(),
            step(0),
            OpenSession(LIMITS, policy="nope"),
            OpenSession(LIMITS, policy="vllm", policy_parameters={"max_tokens": "32"}),
            OPEN,
            step(0, arrived=columns([1, 4], [9, 30])),
            step(0, arrived=columns([4], [9])),
            step(1),
            snapshot(rows, running=9, free=37, epoch=1, number=2),
            snapshot(rows, running=2, free=37, epoch=1, number=2),
            step(3, epoch=1, free=30, finished_handles=ints(99)),
            step(4, epoch=1, free=30),
            snapshot(rows, running=2, free=37, epoch=2, number=5, now_seconds=float("nan")),
            snapshot(rows, running=2, free=37, epoch=2, number=5),
            step(6, epoch=2, free=33, now=1.0),
        ]
        answers = [stream.ask(message) for message in messages]
        session = next(answer.session for answer in answers if isinstance(answer, SessionOpened))
        path = journal_of(folder, session)
        wait_until(lambda: len(read_journal(path).exchanges) == len(messages), "the last exchange is on disk")
    replayed = [decode_response(answer) for answer in assert_replays(path, len(messages))]
    assert [type(answer) for answer in replayed] == [type(answer) for answer in answers]
    kinds = {type(answer) for answer in answers}
    assert kinds >= {BatchAllocation, ResyncRequired, SessionError}


def test_drained_session_replays_with_its_last_answer(tmp_path: Path) -> None:
    with SidecarProcess(("--journal-dir", str(tmp_path), "--drain-seconds", "20")) as process:
        wait_ready(process)
        with channel_to(process.address) as channel, RawStream(channel) as stream:
            stream.ask(OPEN)
            stream.ask(step(0, arrived=columns([1, 2], [9, 30])))
            process.process.send_signal(signal.SIGTERM)
            number = 1
            while not stream.ask(step(number, free=30)).draining:  # type: ignore[union-attr]
                number += 1
            assert stream.ends_with() == "OK"
        assert process.process.wait(10) == 0
    (path,) = tmp_path.iterdir()
    answers = assert_replays(path, number + 2)
    assert [answer.batch_allocation.draining for answer in answers[-2:]] == [False, True]


def test_killed_sidecar_leaves_whole_exchanges(tmp_path: Path) -> None:
    with SidecarProcess(("--journal-dir", str(tmp_path))) as process:
        wait_ready(process)
        with channel_to(process.address) as channel, RawStream(channel) as stream:
            stream.ask(OPEN)
            for number in range(50):
                stream.ask(step(number, now=float(number)))
            process.process.send_signal(signal.SIGKILL)
            process.process.wait()
    (path,) = tmp_path.iterdir()
    count = len(read_journal(path).exchanges)
    assert count in (50, 51), "all but the one that may not have been written when the answer had left"
    assert_replays(path, count)


class BrokenFile:
    """A file that takes so many writes, and then says that the disk is full."""

    def __init__(self, writes: int) -> None:
        self.left, self.closed = writes, False

    def write(self, data: bytes) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_full_disk_ends_the_journal_and_not_the_session(tmp_path: Path) -> None:
    file = BrokenFile(3)

    class Service(SchedulerService):
        def _journal(self, session: str) -> JournalWriter | None:
            return JournalWriter(file, session, SessionDefaults())  # type: ignore[arg-type]

    with (
        ServerThread("127.0.0.1:0", lambda: Service(SessionDefaults(), 4)) as server,
        channel_to(server.address) as channel,
        RawStream(channel) as stream,
    ):
        stream.ask(OPEN)
        for number in range(5):
            assert isinstance(stream.ask(step(number)), BatchAllocation)
        assert file.closed


def test_journal_folder_that_vanishes_does_not_stop_sessions(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with (
        ServerThread("127.0.0.1:0", lambda: SchedulerService(SessionDefaults(), 4, gone)) as server,
        channel_to(server.address) as channel,
        RawStream(channel) as stream,
    ):
        stream.ask(OPEN)
        assert isinstance(stream.ask(step(0)), BatchAllocation)


def test_failure_of_ours_is_answered_recorded_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the core: the session gets an error and goes on with a snapshot; so does the replay."""
    from sidecar.session.mirror import Mirror

    update = Mirror.update

    def fails_at_one(self: Mirror, message: object, plan: object) -> None:
        if message.iteration.step == 1:  # type: ignore[attr-defined]
            raise ZeroDivisionError("a bug")
        update(self, message, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Mirror, "update", fails_at_one)
    with (
        ServerThread("127.0.0.1:0", lambda: SchedulerService(SessionDefaults(), 4, tmp_path)) as server,
        channel_to(server.address) as channel,
        RawStream(channel) as stream,
    ):
        stream.ask(OPEN)
        stream.ask(step(0, arrived=columns([1], [9])))
        failed = stream.ask(step(1, free=38))
        assert isinstance(failed, SessionError)
        assert failed.reason is ErrorReason.INTERNAL
        assert "ZeroDivisionError('a bug')" in failed.message
        assert isinstance(stream.ask(step(2, free=38)), ResyncRequired)
        assert isinstance(stream.ask(snapshot([(1, 9, 9, 1)], running=1, free=37, number=3)), BatchAllocation)
        (path,) = tmp_path.iterdir()
        wait_until(lambda: len(read_journal(path).exchanges) == 5, "the last exchange is on disk")
    assert_replays(path, 5)
