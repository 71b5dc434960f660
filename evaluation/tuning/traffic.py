"""The traffic that is tuned for: what is chosen on, and what the choice is tested on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.goodput.store import StoreError
from evaluation.workloads import WorkloadError, WorkloadSpec
from evaluation.workloads.tracefiles import read_trace

MOST_REQUESTS = 10_000
"""Of each part, where nobody says how many."""

LEAST_REQUESTS = 100
"""Of each part: with fewer a single miss is more than 1 %."""

DRAWN_REQUESTS = 6000
"""Of a synthetic workload, where nobody says how many."""

HELD_OUT_SEED = 1000
"""Of the requests that a synthetic workload is tested with; searches use seeds from 0."""

FILE = "trace.json"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is chosen on (``tuning``), and what is tested on (``held_out``): workload texts, requests, seeds.

    Attributes:
        name: for people.
        recorded_rate: mean requests/s of the whole trace; None where it is none.
        recorded_seconds: how long the trace is; None where it is none.
    """

    name: str
    tuning: str
    tuning_requests: int
    held_out: str
    held_out_requests: int
    held_out_seed: int
    recorded_rate: float | None = None
    recorded_seconds: float | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether it is a trace."""
        return self.recorded_seconds is not None


def traffic_of(spec: WorkloadSpec, requests: int | None, data: Path | None) -> Traffic:
    """Splits a trace into halves by its requests; draws other requests of a synthetic workload for the test.

    Args:
        spec: the workload.
        requests: most requests of each part; None: `MOST_REQUESTS` of a trace, `DRAWN_REQUESTS` else.
        data: folder of the recorded traces.

    Raises:
        WorkloadError: too few requests, or a part was asked for.
        TraceError: the trace cannot be read.
    """
    if requests is not None and requests < LEAST_REQUESTS:
        raise WorkloadError(f"requests {requests}: a promise needs {LEAST_REQUESTS} or more, better 3000")
    if not spec.is_recorded:
        count = DRAWN_REQUESTS if requests is None else requests
        return Traffic(str(spec), str(spec), count, str(spec), count, HELD_OUT_SEED)
    if spec.part != "all":
        raise WorkloadError(f"part={spec.part}: both halves are needed, one to choose on and one to test; leave it out")
    rows = read_trace(spec.trace_file(data))
    most = MOST_REQUESTS if requests is None else requests
    first = (len(rows) + 1) // 2
    if len(rows) - first < LEAST_REQUESTS:
        raise WorkloadError(
            f"{spec.trace_file(data)} has {len(rows)} requests; a promise needs at least {2 * LEAST_REQUESTS}, "
            "one half to choose on and one to test, better 6000: record for longer"
        )
    span = float(rows.arrival_seconds[-1])
    if span <= 0.0:
        raise WorkloadError(
            f"all {len(rows)} requests of {spec.trace_file(data)} arrive at once; there is no rate to scale, so record "
            "arrival times"
        )
    return Traffic(
        name=str(spec),
        tuning=str(replace(spec, part="first-half")),
        tuning_requests=min(first, most),
        held_out=str(replace(spec, part="second-half")),
        held_out_requests=min(len(rows) - first, most),
        held_out_seed=0,
        recorded_rate=(len(rows) - 1) / span,
        recorded_seconds=span,
    )


def claim_trace(folder: Path, spec: WorkloadSpec, data: Path | None) -> None:
    """Marks a folder of results as being of this trace; runs are found again by the trace's name only.

    Raises StoreError if the file has changed since. O(size of the file).
    """
    if not spec.is_recorded:
        return
    path = spec.trace_file(data)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = folder / FILE
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except ValueError as error:
        raise StoreError(f"{file}: is damaged ({error}); give another --results") from error
    if known.setdefault(spec.name, digest) != digest:
        raise StoreError(f"{folder} holds results of another content of {path}; give another --results")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
