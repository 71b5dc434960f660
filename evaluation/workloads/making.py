"""Makes the requests of a workload."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evaluation.workloads.arrivals import Recorded, Switching
from evaluation.workloads.checks import WorkloadError, check_rate, check_requests, check_seed
from evaluation.workloads.classes import DrawnRequests, Stream, draw_requests, random_stream
from evaluation.workloads.recorded import first_rows, part_of, recorded_workload, spread_rows, turned
from evaluation.workloads.slos import SloColumns, absolute_slos, qoserve_slos
from evaluation.workloads.solo import SoloTtft, checked_solo
from evaluation.workloads.spec import TRACE_PREFIX, WorkloadSpec
from evaluation.workloads.tracefiles import read_trace
from evaluation.workloads.values import Workload


def make_workload(
    spec: WorkloadSpec,
    *,
    rate: float | None,
    requests: int | None,
    seed: int,
    solo_ttft_seconds: SoloTtft,
    data: Path | None = None,
) -> Workload:
    """Makes the requests of a workload; its name is the spec's text.

    The same seed gives the same requests whatever the rate, and fewer requests are the first of more: lengths, SLOs and
    arrivals, except that a trace put to a rate is scaled by the recorded rate of the requests that are kept. Another
    seed begins a trace at another place. O(requests), and for a trace O(its rows).

    Args:
        spec: what workload.
        rate: mean requests/s; None: `WorkloadSpec.usual_rate`.
        requests: how many; a shorter trace gives all that it has. None: all of a trace.
        seed: of every random column.
        solo_ttft_seconds: what relative SLOs are multiples of, see `solo_ttft`.
        data: folder of the recorded traces.

    Raises:
        WorkloadError: a value out of range, or no data folder.
        TraceError: a trace cannot be read.
    """
    rate = spec.usual_rate if rate is None else rate
    if rate is not None:
        check_rate(rate)
    if requests is not None:
        check_requests(requests)
    check_seed(seed)
    if spec.is_recorded:
        return _recorded(spec, rate, requests, seed, data)
    if requests is None:
        raise WorkloadError(f"workload {spec.name!r} has no end; say how many requests")
    assert rate is not None
    return _generated(spec, rate, requests, seed, solo_ttft_seconds)


def _generated(spec: WorkloadSpec, rate: float, requests: int, seed: int, solo_ttft_seconds: SoloTtft) -> Workload:
    assert not isinstance(spec.arrivals, Recorded)
    drawn = draw_requests(spec.mix, requests, seed)
    slos = _slos_of_drawn(spec, drawn, seed, solo_ttft_seconds).overridden(spec.ttft_seconds, spec.tbt_seconds)
    return Workload(
        name=str(spec),
        arrival_seconds=spec.arrivals.arrivals(random_stream(seed, Stream.ARRIVALS), requests, rate),
        prompt_tokens=drawn.prompt_tokens,
        output_tokens=drawn.output_tokens,
        ttft_slo_seconds=slos.ttft_slo_seconds,
        tbt_slo_seconds=slos.tbt_slo_seconds,
        ttlt_slo_seconds=slos.ttlt_slo_seconds,
        class_index=slos.class_index,
        class_names=slos.class_names,
        rate=float(rate),
        switching=spec.arrivals if isinstance(spec.arrivals, Switching) else None,
    )


def _slos_of_drawn(spec: WorkloadSpec, drawn: DrawnRequests, seed: int, solo_ttft_seconds: SoloTtft) -> SloColumns:
    if spec.slos == "qoserve":
        return qoserve_slos(drawn.kind.size, seed)
    names = tuple(c.name for c in drawn.classes)
    if spec.slos == "absolute":
        return absolute_slos(drawn.prompt_tokens, drawn.kind + 1, names)
    ttft = np.zeros(drawn.kind.size)
    if spec.ttft_ms is None:
        factor = np.array([c.ttft_factor for c in drawn.classes])[drawn.kind]
        ttft = factor * checked_solo(solo_ttft_seconds, drawn.prompt_tokens) + spec.floor_ms / 1e3
    tbt = np.array([c.tbt_slo_seconds for c in drawn.classes])[drawn.kind]
    return SloColumns(ttft, tbt, np.zeros(drawn.kind.size), drawn.kind + 1, names)


def _recorded(spec: WorkloadSpec, rate: float | None, requests: int | None, seed: int, data: Path | None) -> Workload:
    rows = part_of(read_trace(spec.trace_file(data)), spec.part)
    rows = first_rows(turned(spread_rows(rows, seed), seed), requests)
    if spec.slos == "qoserve":
        slos = qoserve_slos(len(rows), seed)
    else:
        class_name = Path(spec.name.removeprefix(TRACE_PREFIX)).name
        slos = absolute_slos(rows.prompt_tokens, np.ones(len(rows), np.int64), (class_name,))
    return recorded_workload(rows, str(spec), slos.overridden(spec.ttft_seconds, spec.tbt_seconds), rate)
