"""Keeps every finished run: appended to a file of JSON lines at once, so that an interrupted sweep loses nothing.

A folder of results may hold several such files, one for each shard. ``points.parquet`` is written at the end, from all
of them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evaluation.goodput.points import Point, RunKey, from_row, to_row

POINTS = "points*.jsonl"
PARQUET = "points.parquet"
PARQUET_SCHEMA = b"1"


class StoreError(RuntimeError):
    """A folder of results that cannot be read or written; names the file, what is wrong and the remedy."""


class PointStore:
    """The runs in a folder.

    Args:
        folder: of the results; made if missing.
        shard: file to append to: ``points.jsonl``, or ``points-SHARD.jsonl``.
    """

    def __init__(self, folder: Path, shard: str = "") -> None:
        self._file = folder / (f"points-{shard}.jsonl" if shard else "points.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be made ({error.strerror}); give another --out") from error
        self._known = {point.key: point for point in read_points(folder)}

    def find(self, key: RunKey, *, complete: bool) -> Point | None:
        """Returns a run that was made before; with ``complete`` only one that went to its end."""
        point = self._known.get(key)
        return None if point is None or (complete and not point.complete) else point

    def add(self, point: Point) -> None:
        """Appends a run, whole or not at all; other processes may append to the same file."""
        known = self._known.get(point.key)
        if known is not None and known.complete:
            return
        self._known[point.key] = point
        line = json.dumps(to_row(point), allow_nan=False, separators=(",", ":")) + "\n"
        try:
            with self._file.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                _end_torn_line(file.fileno(), self._file)
                file.write(line.encode())
        except OSError as error:
            raise StoreError(f"{self._file}: cannot be written ({error.strerror}); free space or --out") from error

    def __iter__(self) -> Iterator[Point]:
        return iter(self._known.values())


def _end_torn_line(descriptor: int, file: Path) -> None:
    """Puts a line end behind what a process that was killed while it wrote has left."""
    size = os.fstat(descriptor).st_size
    if size:
        with file.open("rb") as reader:
            reader.seek(size - 1)
            if reader.read(1) != b"\n":
                os.write(descriptor, b"\n")


def read_points(folder: Path) -> list[Point]:
    """Returns all runs in a folder, a complete one rather than one that was ended early, in a fixed order.

    A line that was cut off (its process was killed) is passed over; any other damage raises StoreError.
    """
    found: dict[RunKey, Point] = {}
    for file in sorted(folder.glob(POINTS)):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn: the process was killed while it wrote
            try:
                point = from_row(row)
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(
                    f"{file}, line {number}: is not a run of this version ({error!r}); use another folder"
                ) from error
            if point.complete or point.key not in found:
                found[point.key] = point
    return sorted(found.values(), key=_order)


def _order(point: Point) -> tuple[object, ...]:
    key = point.key
    return key.profile, key.workload, key.policy, key.requests, key.rate, key.seed


def write_parquet(points: Iterable[Point], file: Path, metadata: dict[str, str]) -> None:
    """Writes runs as Parquet, one row each; mappings become columns such as ``violations_deadline``.

    Raises ImportError without pyarrow (extra ``evaluation``).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_flat(point) for point in points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    stamped = {b"slidingserve.schema": PARQUET_SCHEMA, **{k.encode(): v.encode() for k, v in metadata.items()}}
    pq.write_table(table.replace_schema_metadata(stamped), file)


def _flat(point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in to_row(point).items():
        if name == "class_violations":
            row[name] = json.dumps(value)  # classes differ by workload
        elif isinstance(value, dict):
            row.update({f"{name}_{inner}": inner_value for inner, inner_value in value.items()})
        else:
            row[name] = list(value) if isinstance(value, tuple) else value
    return row
