"""Journals: what a session said, on disk, and replayed.

A file holds length-prefixed `JournalEntry` messages: a header, then each request of the engine followed by the answer
(without phase timings, the only part of an answer that depends on a clock). The same versions give the same bytes
again when `replay` puts the requests to a new session.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf import proto
from google.protobuf.message import DecodeError

from sidecar.answering import answer_request
from sidecar.session.machine import Session, SessionDefaults
from slidingserve import __version__
from slidingserve.contract.values import Mode, SloDefaults
from slidingserve.journal.v1 import journal_pb2
from slidingserve.scheduler.v1 import scheduler_pb2 as pb

FORMAT_VERSION = 1

_MODES = {int(mode): mode for mode in Mode}
_REMEDY = "give the path of a file that `slidingserve serve --journal-dir` wrote"


class JournalError(ValueError):
    """A file that is no journal, or a newer one; the message names file, place and remedy."""


class JournalWriter:
    """Writes one session.

    Args:
        stream: open for binary writing; closed by `close`.
        session: the session's name.
        defaults: what the sidecar decided where the session left it open.
    """

    def __init__(self, stream: BinaryIO, session: str, defaults: SessionDefaults) -> None:
        self._stream = stream
        header = journal_pb2.JournalHeader(
            format_version=FORMAT_VERSION,
            sidecar_version=__version__,
            session=session,
            default_policy=policy_spec(defaults),
            default_slos=pb.SloDefaults(
                ttft_slo_seconds=defaults.slos.ttft_slo_seconds,
                tbt_slo_seconds=defaults.slos.tbt_slo_seconds,
                ttlt_slo_seconds=defaults.slos.ttlt_slo_seconds,
            ),
            default_profile=defaults.profile,
        )
        self._write(journal_pb2.JournalEntry(header=header))

    def write(self, request: pb.ScheduleRequest, response: pb.ScheduleResponse) -> None:
        """Adds one exchange. Linear in the messages.

        Raises:
            OSError: the file takes no more; close the journal.
        """
        answer = journal_pb2.JournalEntry(response=response)
        drop_timings(answer.response)
        self._write(journal_pb2.JournalEntry(request=request), answer)

    def close(self) -> None:
        """Closes the file, even if it takes no more."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _write(self, *entries: journal_pb2.JournalEntry) -> None:
        """Hands entries over to the system, so that a crash of the sidecar leaves whole ones and at most one torn."""
        buffer = io.BytesIO()
        for entry in entries:
            proto.serialize_length_prefixed(entry, buffer)
        self._stream.write(buffer.getvalue())
        self._stream.flush()


def policy_spec(defaults: SessionDefaults) -> str:
    """Returns the default policy as text: name:key=value,..."""
    parameters = ",".join(f"{name}={value}" for name, value in defaults.policy_parameters.items())
    return f"{defaults.policy}:{parameters}" if parameters else defaults.policy


def recorded_mode(response: pb.ScheduleResponse) -> Mode:
    """Returns the mode that an answer was given in; UNSPECIFIED if it does not tell."""
    return _MODES.get(response.batch_allocation.mode or response.session_opened.mode, Mode.UNSPECIFIED)


def drop_timings(response: pb.ScheduleResponse) -> None:
    """Leaves of an answer what does not depend on any clock of the sidecar."""
    if response.HasField("batch_allocation"):
        response.batch_allocation.ClearField("phase_timings")


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal in memory: its header and its exchanges (request, answer or None if the file ends before it)."""

    header: journal_pb2.JournalHeader
    exchanges: tuple[tuple[pb.ScheduleRequest, pb.ScheduleResponse | None], ...]


def read_entries(path: Path) -> Iterator[journal_pb2.JournalEntry]:
    """Yields the entries of a file one by one; a torn last entry, as a crash leaves it, ends the iteration.

    Raises:
        JournalError: the file cannot be read, is no journal, is damaged, or is of another format.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise JournalError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
    with stream:
        size = os.fstat(stream.fileno()).st_size
        if not size:
            raise JournalError(f"{path}: is empty, no session was recorded; {_REMEDY}")
        number = 0
        while (start := stream.tell()) < size:
            try:
                entry = _read_entry(stream, size)
            except EOFError:
                if not number:
                    raise JournalError(f"{path}: is not a journal, it holds no whole entry; {_REMEDY}") from None
                return
            except DecodeError as error:
                if not number:
                    raise JournalError(f"{path}: is not a journal; {_REMEDY}") from error
                raise JournalError(
                    f"{path}: byte {start} begins no journal entry, the file is damaged; use another copy, or its "
                    f"first {start} bytes, which hold {number} entries"
                ) from error
            if not number:
                _check_header(path, entry)
            number += 1
            yield entry


def _read_entry(stream: BinaryIO, size: int) -> journal_pb2.JournalEntry:
    """Reads one entry of a file of ``size`` bytes; raises EOFError where that ends within the entry."""
    length = shift = 0
    while True:
        byte = stream.read(1)
        if not byte:
            raise EOFError
        length |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            break
        shift += 7
        if shift > 28:
            raise DecodeError("no message is that long")
    if stream.tell() + length > size:
        raise EOFError
    return journal_pb2.JournalEntry.FromString(stream.read(length))


def _check_header(path: Path, entry: journal_pb2.JournalEntry) -> None:
    if entry.WhichOneof("payload") != "header":
        raise JournalError(f"{path}: is not a journal, its first entry is no header; {_REMEDY}")
    version = entry.header.format_version
    if version != FORMAT_VERSION:
        raise JournalError(
            f"{path}: has format version {version}, this release reads {FORMAT_VERSION}; use the release that wrote it "
            f"({entry.header.sidecar_version or 'unknown'})"
        )


def read_journal(path: Path) -> Journal:
    """Reads a whole journal. See `read_entries` for errors."""
    entries = read_entries(path)
    header = next(entries).header
    exchanges: list[tuple[pb.ScheduleRequest, pb.ScheduleResponse | None]] = []
    for entry in entries:
        payload = entry.WhichOneof("payload")
        if payload == "request":
            exchanges.append((entry.request, None))
        elif payload == "response" and exchanges:
            exchanges[-1] = (exchanges[-1][0], entry.response)
    return Journal(header, tuple(exchanges))


def replay(journal: Journal) -> Iterator[tuple[pb.ScheduleRequest, pb.ScheduleResponse]]:
    """Yields each recorded request and what a new session answers to it now. Deterministic.

    That the sidecar was draining, or was switched to another mode, no request tells: both are taken from the recorded
    answers.
    """
    from sidecar.policies.registry import parse_spec

    header = journal.header
    name, parameters = parse_spec(header.default_policy)
    slos = SloDefaults(
        header.default_slos.ttft_slo_seconds, header.default_slos.tbt_slo_seconds, header.default_slos.ttlt_slo_seconds
    )
    session = Session(
        header.session, SessionDefaults(name, parameters, slos, header.default_profile), clock=lambda: 0.0
    )
    for request, recorded in journal.exchanges:
        session.draining = recorded is not None and recorded.batch_allocation.draining
        if recorded is not None and (mode := recorded_mode(recorded)):
            session.switch_mode(mode)
        _, response = answer_request(session, request)
        drop_timings(response)
        yield request, response
