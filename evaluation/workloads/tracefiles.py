"""Reads recorded traffic in the published trace formats.

The format is told by the content, never by the file's name: gzip by its magic number, JSON lines by the first
character, tables by the names in their header.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import IO, TypeAlias, TypeVar, cast

import numpy as np

from evaluation.workloads.checks import check_requests
from slidingserve.contract.values import Floats, Ints

MAX_TOKENS = 10_000_000

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceError(ValueError):
    """A trace that cannot be used; says where (file, line, column), what was found and the remedy."""

    def __init__(self, path: Path, problem: str, remedy: str, *, line: int = 0, column: str = "") -> None:
        place = f"{path}" + (f", line {line}" if line else "") + (f", column {column}" if column else "")
        super().__init__(f"{place}: {problem}; {remedy}")
        self.path, self.line, self.column = path, line, column


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """A trace as recorded: n requests in order of arrival, the first at 0 s; seconds and tokens.

    ``skipped`` counts rows left out because nothing was generated (failed requests of BurstGPT have 0 response tokens).
    """

    arrival_seconds: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    skipped: int = 0

    def __len__(self) -> int:
        """Returns the number of requests."""
        return self.arrival_seconds.size


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A published format: its columns, how an arrival is read, and how many of its units make a second."""

    name: str
    arrival: str
    prompt: str
    output: str
    read_arrival: Callable[[object], float]
    units_per_second: float = 1.0

    @property
    def columns(self) -> tuple[str, str, str]:
        """The names of the columns that are read."""
        return (self.arrival, self.prompt, self.output)


def _number(value: object) -> float:
    """Returns a finite number that is not negative; raises ValueError with what is wrong."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("is not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    if number < 0:
        raise ValueError("is negative")
    return number


def _tokens(value: object) -> int:
    """Returns a whole number of tokens; raises ValueError with what is wrong."""
    number = _number(value)
    if number != int(number):
        raise ValueError("is not a whole number of tokens")
    if number > MAX_TOKENS:
        raise ValueError(f"is more than {MAX_TOKENS} tokens")
    return int(number)


def _nanoseconds(value: object) -> int:
    """Reads a date and time with up to 9 fractional digits (Azure writes 7); no time zone means UTC.

    An integer, because a float of seconds since 1970 only resolves 240 ns.
    """
    parts = re.fullmatch(r"([^.]+)(?:\.(\d{1,9}))?([^.]*)", str(value).strip())
    if parts is None:
        raise ValueError("is not a date and time")
    base, fraction, zone = parts.groups(default="")
    try:
        moment = datetime.fromisoformat(base + zone)
    except ValueError:
        raise ValueError("is not a date and time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int(fraction.ljust(9, "0"))


OURS = TraceFormat("ours", "arrival_s", "prompt_tokens", "output_tokens", _number)
AZURE = TraceFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _nanoseconds, 1e9)
BURSTGPT = TraceFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number)
MOONCAKE = TraceFormat("Mooncake (JSON lines)", "timestamp", "input_length", "output_length", _number, 1e3)
TABLE_FORMATS = (OURS, AZURE, BURSTGPT)
FORMATS = (*TABLE_FORMATS, MOONCAKE)

_KNOWN = "the known formats are " + "; ".join(f"{f.name}: {', '.join(f.columns)}" for f in FORMATS)

T = TypeVar("T")
_Cells: TypeAlias = tuple[object, object, object]


def read_trace(path: str | PathLike[str], limit: int | None = None) -> TraceRows:
    """Reads a trace of any of ``FORMATS``, plain or gzip; further columns are ignored.

    With ``limit`` reading ends after so many requests, and what comes later is not checked. Raises TraceError, and
    WorkloadError for a limit out of range. O(rows).
    """
    if limit is not None:
        check_requests(limit)
    file = Path(path)
    with _reported(file), _open(file) as (text, is_json):
        layout, records = _json_records(file, text) if is_json else _table_records(file, text)
        return _collect(file, layout, records, limit)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns what reading a file raises into TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(path, "no such file", "check the path") from None
    except IsADirectoryError:
        raise TraceError(path, "is a folder", "name a file in it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, f"is a damaged or truncated gzip file ({error})", "fetch it again") from None
    except UnicodeDecodeError:
        raise _binary(path) from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})", "check the path and its rights") from None


def _binary(path: Path) -> TraceError:
    return TraceError(path, "is a binary file, not UTF-8 text", _KNOWN)


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[str], bool]]:
    """Opens a trace as text, unzipped, and says whether it holds JSON."""
    with path.open("rb") as plain:
        zipped = plain.peek(2)[:2] == _GZIP_MAGIC
        # GzipFile is a BufferedIOBase with peek, which typeshed does not say of TextIOWrapper's buffers.
        source = cast(io.BufferedReader, gzip.GzipFile(fileobj=plain)) if zipped else plain
        with source:
            head = source.peek(4096)[:4096]
            if b"\0" in head:
                raise _binary(path)
            is_json = head.removeprefix(_UTF8_BOM).lstrip().startswith(b"{")
            with io.TextIOWrapper(source, encoding="utf-8-sig", newline="") as text:
                yield text, is_json


def _table_records(path: Path, text: IO[str]) -> tuple[TraceFormat, Iterator[tuple[int, _Cells]]]:
    """Reads the header; returns its format, and line number and the three cells of each row."""
    reader = csv.reader(text)
    rows = _table_rows(path, reader)
    header = next(rows, None)
    if header is None:
        raise TraceError(path, "is empty", _KNOWN)
    found = [cell.strip() for cell in header[1]]
    layout = max(TABLE_FORMATS, key=lambda f: len(set(f.columns) & set(found)))
    missing = [column for column in layout.columns if column not in found]
    if missing:
        names = ", ".join(repr(_short(column)) for column in found[:20])
        raise TraceError(
            path, f"no column {', '.join(map(repr, missing))} in the header, only {names}", _KNOWN, line=header[0]
        )
    places = [found.index(column) for column in layout.columns]

    def records() -> Iterator[tuple[int, _Cells]]:
        for line, row in rows:
            for place, column in zip(places, layout.columns, strict=True):
                if place >= len(row):
                    problem = f"is missing, the row has {len(row)} of {len(found)} cells"
                    raise TraceError(path, problem, "complete the row or remove it", line=line, column=column)
            yield line, (row[places[0]], row[places[1]], row[places[2]])

    return layout, records()


def _table_rows(path: Path, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and cells of each row that is not blank."""
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row  # type: ignore[attr-defined]  # the type of csv.reader has no public name
    except csv.Error as error:
        line = reader.line_num  # type: ignore[attr-defined]
        raise TraceError(path, f"is not a table of comma-separated values ({error})", _KNOWN, line=line) from None


def _json_records(path: Path, text: IO[str]) -> tuple[TraceFormat, Iterator[tuple[int, _Cells]]]:
    """Returns Mooncake's format, and line number and the three values of each line."""

    def records() -> Iterator[tuple[int, _Cells]]:
        for line, content in enumerate(text, start=1):
            if not content.strip():
                continue
            try:
                entry = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise TraceError(path, f"is not JSON ({error})", "put one object on each line", line=line) from None
            if not isinstance(entry, dict):
                raise TraceError(path, "is not a JSON object", "put one object on each line", line=line)
            for column in MOONCAKE.columns:
                if column not in entry:
                    names = ", ".join(repr(_short(key)) for key in list(entry)[:20])
                    raise TraceError(path, f"no field {column!r}, only {names}", _KNOWN, line=line)
            yield line, (entry[MOONCAKE.arrival], entry[MOONCAKE.prompt], entry[MOONCAKE.output])

    return MOONCAKE, records()


def _collect(path: Path, layout: TraceFormat, records: Iterator[tuple[int, _Cells]], limit: int | None) -> TraceRows:
    """Checks and gathers the rows; arrivals are shifted so that the first kept one is 0."""
    arrivals: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    skipped, last, last_line = 0, -math.inf, 0
    for line, (arrival_cell, prompt_cell, output_cell) in records:
        arrival = _cell(path, line, layout.arrival, arrival_cell, layout.read_arrival)
        prompt = _cell(path, line, layout.prompt, prompt_cell, _tokens)
        output = _cell(path, line, layout.output, output_cell, _tokens)
        if arrival < last:
            problem = f"{_short(arrival_cell)!r} is earlier than the arrival in line {last_line}"
            raise TraceError(path, problem, "sort the rows by arrival", line=line, column=layout.arrival)
        last, last_line = arrival, line
        if output == 0:
            skipped += 1
            continue
        if prompt == 0:
            problem = f"{_short(prompt_cell)!r} is an empty prompt"
            raise TraceError(path, problem, "use 1 or more tokens, or remove the row", line=line, column=layout.prompt)
        arrivals.append(arrival)
        prompts.append(prompt)
        outputs.append(output)
        if len(arrivals) == limit:
            break
    if not arrivals:
        problem = f"all {skipped} requests have 0 output tokens" if skipped else "holds a header but no request"
        raise TraceError(path, problem, "use a trace with at least one request that generates a token")
    shifted = np.array([arrival - arrivals[0] for arrival in arrivals], np.float64) / layout.units_per_second
    return TraceRows(shifted, np.array(prompts, np.int64), np.array(outputs, np.int64), skipped)


def _cell(path: Path, line: int, column: str, cell: object, read: Callable[[object], T]) -> T:
    try:
        return read(cell)
    except ValueError as error:
        remedy = "correct the value or remove the row"
        raise TraceError(path, f"{_short(cell)!r} {error}", remedy, line=line, column=column) from None


def _short(value: object) -> str:
    """Returns a value as text of at most 60 characters, for messages."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
