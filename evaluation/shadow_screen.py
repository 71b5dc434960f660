"""The shadow report for people and as JSON (schema 1)."""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from evaluation.scores import Percentiles
from evaluation.shadow import Column, ShadowReport
from evaluation.shadow_reading import Decisions, SessionRecord
from slidingserve.contract.values import Mode

SCHEMA = 1
WIDTH = 100

LEGEND = """\
met: share of requests whose every token k was in by arrival + TTFT + (k-1) TBT. A token counts when the
step after its iteration began; simulated iterations take what the latency model says."""


def render(report: ShadowReport) -> str:
    """Returns the report as plain text."""
    parts = ["\n".join(_facts(report)), _table(report), "\n".join(_decisions(report)), LEGEND]
    parts += [textwrap.fill(f"WARNING: {text}", WIDTH, subsequent_indent="  ") for text in report.warnings]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(report: ShadowReport) -> dict[str, Any]:
    """Returns the report as JSON values; what is not finite becomes null."""
    return {
        "schema": SCHEMA,
        "requests": report.requests,
        "left_out": {"unfinished": report.unfinished, "unfollowed": report.unfollowed},
        "calibration": {"points": report.calibration_points, "trusted": report.is_trusted},
        "columns": [_column_document(column) for column in report.columns],
        "sessions": [
            _session_document(session, model) for session, model in zip(report.sessions, report.models, strict=True)
        ],
        "warnings": list(report.warnings),
    }


def _facts(report: ShadowReport) -> Iterator[str]:
    yield (
        f"{report.requests:,} requests, followed from arrival to end; left out: {report.unfinished:,} not finished, "
        f"{report.unfollowed:,} not seen all the way"
    )
    for session, model in zip(report.sessions, report.models, strict=True):
        engine = session.opening.engine
        name = " ".join(filter(None, (engine.name, engine.version, engine.instance))) or "engine"
        seconds = session.last_seconds - session.first_seconds
        modes = session.decisions.modes
        share = ", ".join(f"{100 * modes[mode] / modes.total():.0f} % {mode.name.lower()}" for mode in sorted(modes))
        line = (
            f"{session.path.name}: {name}, {session.opened.policy_version}, {share}; {modes.total():,} iterations in "
            f"{seconds:,.1f} s; times by {model}"
        )
        if session.overhead_seconds >= 5e-5:
            line += f" and {1e3 * session.overhead_seconds:.1f} ms between iterations"
        yield textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _heading(column: Column) -> str:
    if column.role == "actual":
        return "actually"
    policy = column.policy.replace(":", "\n").replace(",", "\n") or "what ran"
    return f"{policy},\nsimulated\n(calibration)" if column.role == "calibration" else f"{policy},\nwould have"


def _table(report: ShadowReport) -> str:
    """Returns the metrics down and the columns across."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for _ in range(2):
        table.add_column("", no_wrap=True)
    for column in report.columns:
        table.add_column(Text(_heading(column)), justify="right", vertical="bottom", no_wrap=True)
    for name, unit, cell in _rows(report):
        table.add_row(*(Text(text) for text in (name, unit, *(cell(column) for column in report.columns))))
    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())


def _rows(report: ShadowReport) -> Iterator[tuple[str, str, Callable[[Column], str]]]:
    yield "met, deadlines", "%", lambda c: _percent(c.met)
    classes = report.columns[0].met_by_class
    if len(classes) > 1:
        for name in classes:
            yield f"  of {name or 'no class'}", "%", lambda c, name=name: _percent(c.met_by_class[name])  # type: ignore[misc]
    yield "met, every gap", "%", lambda c: _percent(1 - c.scores.violations.gap)
    yield "TTFT p50", "ms", lambda c: _ms(c.scores.ttft_seconds.p50)
    yield "TTFT p90", "ms", lambda c: _ms(c.scores.ttft_seconds.p90)
    yield "TTFT p99", "ms", lambda c: _ms(c.scores.ttft_seconds.p99)
    yield "TBT p50", "ms", lambda c: _ms(c.scores.tbt_seconds.p50)
    yield "TBT p90", "ms", lambda c: _ms(c.scores.tbt_seconds.p90)
    yield "TBT p99", "ms", lambda c: _ms(c.scores.tbt_seconds.p99)


def _percent(share: float) -> str:
    """Rounds down: 100.0 means all of them."""
    return f"{math.floor(round(1e3 * share, 6)) / 10:.1f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if math.isfinite(seconds) else "-"


def _decisions(report: ShadowReport) -> Iterator[str]:
    compared = sum(session.decisions.compared for session in report.sessions)
    active = sum(session.decisions.active for session in report.sessions)
    if compared:
        equal = sum(session.decisions.equal for session in report.sessions)
        yield f"shadow decisions: {compared:,}, of which {_percent(equal / compared)} % equal what the engine did"
    if active:
        obeyed = sum(session.decisions.obeyed for session in report.sessions)
        yield f"active decisions: {active:,}, of which {_percent(obeyed / active)} % were executed to the letter"
    paths: Counter[str] = Counter()
    for session in report.sessions:
        paths.update(session.decisions.paths)
    if paths:
        shares = ", ".join(f"{path or '-'} {100 * count / paths.total():.1f} %" for path, count in paths.most_common())
        yield textwrap.fill(f"decided by: {shares}", WIDTH, subsequent_indent="  ")


def _column_document(column: Column) -> dict[str, Any]:
    violations = column.scores.violations
    return {
        "role": column.role,
        "policy": column.policy,
        "met": {"deadline": 1 - violations.deadline, "gap": 1 - violations.gap, "tpot": 1 - violations.tpot},
        "met_by_class": column.met_by_class,
        "ttft_seconds": _percentiles(column.scores.ttft_seconds),
        "tbt_seconds": _percentiles(column.scores.tbt_seconds),
    }


def _session_document(session: SessionRecord, model: str) -> dict[str, Any]:
    engine, decisions = session.opening.engine, session.decisions
    return {
        "journal": str(session.path),
        "session": session.session,
        "engine": {"name": engine.name, "version": engine.version, "instance": engine.instance, "model": engine.model},
        "policy": session.opened.policy,
        "policy_version": session.opened.policy_version,
        "model_version": model,
        "overhead_seconds": session.overhead_seconds,
        "seconds": _finite(session.last_seconds - session.first_seconds),
        "iterations_by_mode": {mode.name.lower(): decisions.modes[mode] for mode in sorted(Mode) if mode},
        "decisions": _decisions_document(decisions),
        "requests": len(session.requests),
    }


def _decisions_document(decisions: Decisions) -> dict[str, Any]:
    return {
        "shadow": decisions.compared,
        "equal_share": decisions.equal / decisions.compared if decisions.compared else None,
        "active": decisions.active,
        "obeyed_share": decisions.obeyed / decisions.active if decisions.active else None,
        "paths": dict(decisions.paths.most_common()),
    }


def _percentiles(values: Percentiles) -> dict[str, float | None]:
    return {"p50": _finite(values.p50), "p90": _finite(values.p90), "p99": _finite(values.p99)}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
