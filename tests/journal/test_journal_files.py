"""Files that are no journals, or not whole: the error names the file and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.answering import answer_request
from sidecar.journal import FORMAT_VERSION, JournalError, JournalWriter, read_journal, replay
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.codec import encode_request
from slidingserve.journal.v1 import journal_pb2
from tests.service.support import OPEN
from tests.strategies import columns, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of three exchanges."""
    path = tmp_path / "session.journal"
    writer = JournalWriter(path.open("wb"), "1", SessionDefaults())
    session = Session("1")
    for message in (OPEN, step(0, arrived=columns([1, 2], [9, 30])), step(1, free=20)):
        request = encode_request(message)
        writer.write(request, answer_request(session, request)[1])
    writer.close()
    return path


def error_of(path: Path) -> str:
    with pytest.raises(JournalError) as caught:
        read_journal(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "; " in message, "there is a remedy"
    return message


def test_whole_file(path: Path) -> None:
    assert len(read_journal(path).exchanges) == 3
    assert len(list(replay(read_journal(path)))) == 3


def test_torn_anywhere_in_the_last_entry(path: Path) -> None:
    """Whatever a crash leaves of the last entries: what is whole is read, and nothing is raised."""
    whole = path.read_bytes()
    header = 1 + whole[0]
    counts = []
    for length in range(header, len(whole)):
        path.write_bytes(whole[:length])
        exchanges = read_journal(path).exchanges
        counts.append((len(exchanges), sum(answer is not None for _, answer in exchanges)))
    assert counts == sorted(counts)
    assert counts[0] == (0, 0)
    assert counts[-1] == (3, 2), "the last request is there, its answer is not"


def test_torn_request_without_answer_still_replays(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    answers = list(replay(read_journal(path)))
    assert len(answers) == 3


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "none")
    assert "Is a directory" in error_of(tmp_path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert "is empty" in error_of(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x00",
        b"\x00" * 100,
        b"\xff" * 100,
        b"\x80",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" * 40,
        b"\x7fELF\x02\x01\x01" + b"\x00" * 300,
        b"\x1f\x8b\x08\x00" + bytes(range(256)),
        b'{"policy": "vllm"}',
        b"\xff\xff\xff\xff\x07" + b"x" * 100,
        bytes((i * 37 + 11) % 256 for i in range(4000)),
    ],
    ids=["zero", "zeros", "ones", "torn varint", "csv", "elf", "gzip", "json", "2 GiB entry", "noise"],
)
def test_foreign_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    message = error_of(path)
    assert "is not a journal" in message
    assert "--journal-dir" in message


def header_bytes(**fields: object) -> bytes:
    entry = journal_pb2.JournalEntry(header=journal_pb2.JournalHeader(**fields))  # type: ignore[arg-type]
    data = entry.SerializeToString()
    return bytes([len(data)]) + data


def test_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "newer"
    path.write_bytes(header_bytes(format_version=FORMAT_VERSION + 1, sidecar_version="9.1"))
    message = error_of(path)
    assert f"format version {FORMAT_VERSION + 1}" in message
    assert "use the release that wrote it (9.1)" in message


def test_journal_without_its_beginning(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[1 + whole[0] :])
    assert "its first entry is no header" in error_of(path)


def test_damaged_in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = 1 + data[0]
    data[start + 1 : start + 20] = b"\xff" * 19
    path.write_bytes(data)
    message = error_of(path)
    assert f"byte {start} " in message
    assert "damaged" in message
    assert f"first {start} bytes" in message
    path.write_bytes(data[:start])
    assert read_journal(path).exchanges == ()


def test_tail_of_zeros_is_no_answer(path: Path) -> None:
    """What some file systems leave after a power cut."""
    before = read_journal(path).exchanges
    path.write_bytes(path.read_bytes() + b"\x00" * 64)
    assert read_journal(path).exchanges == before


def test_entries_of_a_kind_that_is_not_known_are_passed_over(path: Path) -> None:
    before = read_journal(path).exchanges
    path.write_bytes(path.read_bytes() + b"\x03\xa2\x06\x00")
    assert read_journal(path).exchanges == before
