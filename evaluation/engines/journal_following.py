"""Measured iterations from journals that a sidecar is still writing."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from evaluation.engines.measured_iterations import IterationReader
from slidingserve.contract.values import Floats, OpenSession
from slidingserve.journal.v1 import journal_pb2
from slidingserve.scheduler.v1 import scheduler_pb2

Sample = tuple[Floats, float]
"""Features float64[8] of an iteration, and its seconds."""


class JournalFollower:
    """Reads what has been added to the journals of a folder since it was asked last.

    Args:
        folder: need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Followed] = {}

    @property
    def openings(self) -> list[OpenSession]:
        """How the sessions so far were opened, in the order of their files' names."""
        return [file.reader.opening for file in self._files.values() if file.reader and file.reader.opening]

    @property
    def censored(self) -> int:
        """Iterations left out because their time is only an upper bound."""
        return sum(file.reader.censored for file in self._files.values() if file.reader)

    def read(self) -> list[Sample]:
        """Returns the iterations measured since the last call. Linear in what was added.

        Raises:
            Refusal: a message that was answered makes no sense, so no sidecar wrote the file.
        """
        for path in sorted(self._folder.glob("*.journal")):
            self._files.setdefault(path, _Followed(path))
        return [sample for file in self._files.values() for sample in file.read()]


class _Followed:
    """One growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._request: scheduler_pb2.ScheduleRequest | None = None
        self.reader: IterationReader | None = None

    def read(self) -> list[Sample]:
        samples: list[Sample] = []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            while True:
                try:
                    entry = proto.parse_length_prefixed(journal_pb2.JournalEntry, stream)  # type: ignore[arg-type]
                except (ValueError, DecodeError):  # its end is not written yet
                    return samples
                if entry is None:
                    return samples
                self._offset = stream.tell()
                sample = self._take(entry)
                if sample is not None:
                    samples.append(sample)

    def _take(self, entry: journal_pb2.JournalEntry) -> Sample | None:
        payload = entry.WhichOneof("payload")
        if payload == "header":
            self.reader = IterationReader(entry.header)
        elif payload == "request":
            self._request = entry.request
        elif payload == "response" and self.reader is not None and self._request is not None:
            request, self._request = self._request, None
            return self.reader.take(request, entry.response)
        return None
