"""The result of the demonstration as a table and as JSON."""

from __future__ import annotations

import io
import math
from typing import Any

from evaluation.engines.demo import DemoResult, DemoRun

SCHEMA = 1
WIDTH = 100

LEGEND = """\
SLOs met  share of requests whose every token k reached the client by arrival + TTFT + (k-1) TBT
by plan   share of iterations that carried out the sidecar's plan; for the others it came too late"""

_COLUMNS = ("SLOs met", "chats", "documents", "TTFT p50", "p90", "TBT p50", "p99", "by plan")
_UNITS = ("%", "%", "%", "ms", "ms", "ms", "ms", "%")


def render(result: DemoResult) -> str:
    """Returns the screen: the title, one row for each policy, the legend. Plain ASCII."""
    from rich.box import ASCII
    from rich.console import Console
    from rich.table import Table

    table = Table(box=ASCII, show_edge=False, pad_edge=False, header_style="")
    table.add_column("policy", overflow="fold", max_width=30)
    for name, unit in zip(_COLUMNS, _UNITS, strict=True):
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for run in result.runs:
        table.add_row(run.policy, *_cells(run))
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    lines = "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())
    return "\n\n".join([_title(result), lines, LEGEND])


def to_json(result: DemoResult) -> dict[str, Any]:
    """Returns the result as JSON values; what was not measured is null."""
    slos = result.slos
    return {
        "schema": SCHEMA,
        "vllm_version": result.vllm_version,
        "tensor_parallel": result.tensor_parallel,
        "on_cpu": result.on_cpu,
        "rate": result.rate,
        "requests": result.requests,
        "seed": result.seed,
        "slos": {
            "chat": {"ttft_seconds": slos.chat_ttft, "tbt_seconds": slos.chat_tbt},
            "document": {"ttft_seconds": slos.document_ttft, "tbt_seconds": slos.document_tbt},
        },
        "measured_iterations": result.measured_iterations,
        "prediction_error": _finite(result.prediction_error),
        "runs": [_run(run) for run in result.runs],
    }


def _title(result: DemoResult) -> str:
    slos = result.slos
    ranks = "1 rank" if result.tensor_parallel == 1 else f"{result.tensor_parallel} ranks"
    where = f"{ranks} on {'CPUs' if result.on_cpu else 'GPUs'}"
    return (
        f"vLLM {result.vllm_version}, {where}, tiny random model: {result.requests} requests, {result.rate:g}/s, "
        f"seed {result.seed}\n"
        f"SLOs: chats TTFT {_ms(slos.chat_ttft)}, TBT {_ms(slos.chat_tbt)}; documents TTFT {_ms(slos.document_ttft)}, "
        f"TBT {_ms(slos.document_tbt)}\n"
        f"latency model: {result.measured_iterations} iterations of the warm-up, "
        f"mean error {100 * result.prediction_error:.1f} % on those it was not fitted to"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _cells(run: DemoRun) -> tuple[str, ...]:
    scores = run.scores
    times = (scores.ttft_seconds.p50, scores.ttft_seconds.p90, scores.tbt_seconds.p50, scores.tbt_seconds.p99)
    met = (1 - scores.violations.deadline, *run.met_by_class.values())
    return (
        *(_percent(share) for share in met),
        *("-" if math.isnan(seconds) else f"{1e3 * seconds:,.1f}" for seconds in times),
        _percent(run.planned_share),
    )


def _percent(share: float) -> str:
    """Rounds down: 100.0 means that not one is missing."""
    return "-" if math.isnan(share) else f"{math.floor(round(1e3 * share, 6)) / 10:.1f}"


def _run(run: DemoRun) -> dict[str, Any]:
    scores = run.scores
    return {
        "policy": run.policy,
        "met": {
            "deadline": 1 - scores.violations.deadline,
            "gap": 1 - scores.violations.gap,
            "tpot": 1 - scores.violations.tpot,
        },
        "met_by_class": {name: _finite(share) for name, share in run.met_by_class.items()},
        "ttft_seconds": _percentiles(scores.ttft_seconds),
        "tbt_seconds": _percentiles(scores.tbt_seconds),
        "met_requests_per_second": _finite(scores.met_requests_per_second),
        "tokens_per_second": _finite(scores.tokens_per_second),
        "planned_share": _finite(run.planned_share),
        "failed_requests": run.failed_requests,
        "wall_seconds": _finite(run.wall_seconds),
    }


def _percentiles(values: Any) -> dict[str, float | None]:
    return {"p50": _finite(values.p50), "p90": _finite(values.p90), "p99": _finite(values.p99)}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
