"""The result of a benchmark for readers: tables in plain ASCII, and JSON (schema 1) with units in the names."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from evaluation.bench.codec import ARRIVALS, CodecCost
from evaluation.bench.core import STATES, DecisionCost
from evaluation.bench.engine import EngineSpeed
from evaluation.bench.kernels import DECODES, STEP_TOKENS, KernelCost
from evaluation.bench.loads import LONGEST_PROMPT, OUTPUT_TOKENS, SHORTEST_PROMPT, Load
from evaluation.bench.run import BenchResult, Facts
from evaluation.bench.states import MOST_TOKENS
from evaluation.bench.transport import RoundTripCost
from evaluation.results import Tail

SCHEMA = 1
WIDTH = 100
_GAP = "  "
_LOADS: dict[Load, str] = {"decoding": "all decode", "turnover": "come and go"}
_DECODING = "all decode: the same requests get a token in every iteration."
_TURNOVER = (
    f"come and go: {SHORTEST_PROMPT}-{LONGEST_PROMPT} prompt and on average {OUTPUT_TOKENS} output tokens, arriving so "
    "fast that about so many are in the engine; live: how many were, those that wait included."
)
_SHARED = (
    "Figures of a shared machine vary from run to run, p99 most of all: others' work counts in. Run it again on an "
    "idle machine before you compare."
)


def render(result: BenchResult) -> str:
    """Returns the screen as text, at most WIDTH columns."""
    parts = [
        _facts(result.facts),
        *_round_trips(result.round_trips),
        *_decisions(result.decisions),
        *_kernels(result.kernels),
        *_codec(result.codec),
        *_engine(result.engine),
        _filled(_SHARED),
    ]
    return "\n\n".join(parts) + "\n"


def to_json(result: BenchResult) -> dict[str, Any]:
    """Returns everything as JSON values, in a fixed order of keys."""
    facts = result.facts
    return {
        "schema": SCHEMA,
        "machine": {
            "cpu": facts.cpu,
            "cpus": facts.cpus,
            "load_average": facts.load_average,
            "python": facts.python,
            "packages": facts.packages,
        },
        "policy": facts.policy,
        "policy_version": facts.policy_version,
        "model_version": facts.model_version,
        "profile": facts.profile,
        "round_trips": [_round_trip_json(cost) for cost in result.round_trips],
        "decisions": [_decision_json(cost) for cost in result.decisions],
        "predictor": None if result.kernels is None else _kernels_json(result.kernels),
        "codec": [_codec_json(cost) for cost in result.codec],
        "engine": [_engine_json(speed) for speed in result.engine],
    }


def _facts(facts: Facts) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in facts.packages.items())
    policy = f"policy {facts.policy} ({facts.policy_version}), profile {facts.profile}"
    if facts.model_version:
        policy += f", model {facts.model_version}"
    machine = f"{facts.cpu}, {facts.cpus} CPUs, load average {facts.load_average:.2f} at the beginning"
    return "\n".join(
        _filled(line) for line in ("What a decision costs here", machine, f"Python {facts.python}, {packages}", policy)
    )


def _round_trips(costs: Sequence[RoundTripCost]) -> list[str]:
    if not costs:
        return []
    pairs = {
        (cost.load, cost.requests): [c for c in costs if (c.load, c.requests) == (cost.load, cost.requests)]
        for cost in costs
    }
    rows = []
    for (load, requests), both in pairs.items():
        unix, tcp = sorted(both, key=lambda cost: cost.transport, reverse=True)
        core = unix.core
        rows.append(
            (
                _LOADS[load],
                f"{requests:,}",
                f"{unix.live:,.0f}",
                f"{unix.batch:,.0f}",
                *_ms(unix.round_trip),
                *_ms(tcp.round_trip),
                *_us(core),
                f"{unix.round_trip.p50 / core.p50:.0f}",
                max(unix.paths, key=lambda path: unix.paths[path]) or "-",
            )
        )
    headings = (
        "requests",
        "wanted",
        "live",
        "batch",
        "unix p50 ms",
        "p99 ms",
        "tcp p50 ms",
        "p99 ms",
        "core p50 us",
        "p99 us",
        "unix/ core",
        "mostly",
    )
    return [
        "Round trip: client to sidecar process and back, back to back",
        _table(headings, rows, texts=(0, 11)),
        "\n".join(
            _filled(line)
            for line in (
                _DECODING,
                _TURNOVER,
                "core: of the Unix round trip, mirror, policy and guard in the sidecar; mostly: its usual path.",
            )
        ),
    ]


def _decisions(costs: Sequence[DecisionCost]) -> list[str]:
    if not costs:
        return []
    rows = [
        (
            cost.label,
            STATES[cost.state],
            cost.path or "-",
            f"{cost.requests:,}",
            f"{cost.batch:,}",
            _us(cost.mirror)[0],
            _us(cost.policy)[0],
            _us(cost.guard)[0],
            *_us(cost.core),
        )
        for cost in costs
    ]
    headings = (
        "policy",
        "requests",
        "path",
        "live",
        "batch",
        "mirror p50 us",
        "policy p50 us",
        "guard p50 us",
        "core p50 us",
        "p99 us",
    )
    note = (
        "One decision of a session, timed inside. half prompts: half of the requests decode, the others wait for "
        "their prompt. 1 new, 1 gone: since the decision before; elsewhere nobody. at risk: a full batch would make "
        "8 first tokens late; a smaller one saves some (constructor), or cannot (infeasible)."
    )
    return ["Decision core, in one process", _table(headings, rows, texts=(0, 1, 2)), _filled(note)]


def _kernels(cost: KernelCost | None) -> list[str]:
    if cost is None:
        return []
    rows = [
        (what, f"{1e6 * spread.p50:.3f}", f"{1e6 * spread.p99:.3f}")
        for what, spread in (
            ("one prediction", cost.prediction),
            ("TimeToBudget, half of its budgets", cost.time_to_budget),
            ("TimeToBudget, all of its budgets", cost.time_to_budget_all),
            ("a call of it from Python", cost.python_call),
        )
    ]
    note = (
        f"{MOST_TOKENS} tokens in steps of {STEP_TOKENS}; {DECODES} decodes, then prompts of "
        f"{SHORTEST_PROMPT}-{LONGEST_PROMPT} tokens. The call from Python is one that fits at once."
    )
    return ["Predictor, inside compiled code", _table(("", "p50 us", "p99 us"), rows, texts=(0,)), _filled(note)]


def _codec(costs: Sequence[CodecCost]) -> list[str]:
    if not costs:
        return []
    rows = [
        (
            f"{cost.requests:,}",
            f"{cost.step_bytes:,}",
            *_us(cost.encode_step),
            *_us(cost.decode_step),
            f"{cost.allocation_bytes:,}",
            *_us(cost.encode_allocation),
            *_us(cost.decode_allocation),
        )
        for cost in costs
    ]
    both_ways = ("encode p50 us", "p99 us", "decode p50 us", "p99 us")
    headings = ("requests", "step bytes", *both_ways, "answer bytes", *both_ways)
    note = (
        f"step: {ARRIVALS} requests arrived, {ARRIVALS} finished. answer: the allocation of all requests. encode: "
        "value to bytes, decode: bytes to value; a round trip has all four."
    )
    return ["Codec", _table(headings, rows), _filled(note)]


def _engine(speeds: Sequence[EngineSpeed]) -> list[str]:
    if not speeds:
        return []
    rows = [
        (
            speed.policy,
            _LOADS[speed.load],
            f"{speed.requests:,}",
            f"{speed.live:,.0f}",
            f"{speed.median:,.0f}",
            f"{speed.slowest:,.0f}",
            f"{speed.fastest:,.0f}",
            f"{1e6 / speed.median:.1f}",
        )
        for speed in speeds
    ]
    headings = ("policy", "requests", "wanted", "live", "median /s", "slowest /s", "fastest /s", "median us")
    return [
        "Iterations per second in one process, one core: simulated engine, mirror, policy, guard",
        _table(headings, rows, texts=(0, 1)),
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """Returns aligned columns; a heading is broken at its blanks. ``texts`` are left-aligned columns, numbers right."""
    broken = [heading.split(" ") for heading in headings]
    height = max(len(words) for words in broken)
    tops = [[""] * (height - len(words)) + words for words in broken]
    widths = [max(len(cell) for cell in (*top, *(row[i] for row in rows))) for i, top in enumerate(tops)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if i in texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return _GAP.join(aligned).rstrip()

    lines = [line([top[level] for top in tops]) for level in range(height)]
    return "\n".join([*lines, _GAP.join("-" * width for width in widths), *(line(row) for row in rows)])


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _ms(spread: Tail) -> tuple[str, str]:
    return f"{1e3 * spread.p50:.2f}", f"{1e3 * spread.p99:.2f}"


def _us(spread: Tail) -> tuple[str, str]:
    return f"{1e6 * spread.p50:,.1f}", f"{1e6 * spread.p99:,.1f}"


def _microseconds(name: str, spread: Tail) -> dict[str, float]:
    return {f"{name}_p50_us": 1e6 * spread.p50, f"{name}_p99_us": 1e6 * spread.p99}


def _round_trip_json(cost: RoundTripCost) -> dict[str, Any]:
    return {
        "load": cost.load,
        "transport": cost.transport,
        "requests": cost.requests,
        "mean_live_requests": cost.live,
        "mean_batch_requests": cost.batch,
        "round_trips": cost.round_trips,
        "round_trip_p50_ms": 1e3 * cost.round_trip.p50,
        "round_trip_p99_ms": 1e3 * cost.round_trip.p99,
        **_microseconds("core", cost.core),
        "decisions_by_path": cost.paths,
    }


def _decision_json(cost: DecisionCost) -> dict[str, Any]:
    return {
        "policy": cost.label,
        "state": cost.state,
        "path": cost.path,
        "requests": cost.requests,
        "decisions": cost.decisions,
        "batch_requests": cost.batch,
        **_microseconds("mirror", cost.mirror),
        **_microseconds("policy", cost.policy),
        **_microseconds("guard", cost.guard),
        **_microseconds("core", cost.core),
    }


def _kernels_json(cost: KernelCost) -> dict[str, float]:
    return {
        **_microseconds("prediction", cost.prediction),
        **_microseconds("time_to_budget_half", cost.time_to_budget),
        **_microseconds("time_to_budget_all", cost.time_to_budget_all),
        **_microseconds("python_call", cost.python_call),
    }


def _codec_json(cost: CodecCost) -> dict[str, Any]:
    return {
        "requests": cost.requests,
        "step_bytes": cost.step_bytes,
        "allocation_bytes": cost.allocation_bytes,
        **_microseconds("encode_step", cost.encode_step),
        **_microseconds("decode_step", cost.decode_step),
        **_microseconds("encode_allocation", cost.encode_allocation),
        **_microseconds("decode_allocation", cost.decode_allocation),
    }


def _engine_json(speed: EngineSpeed) -> dict[str, Any]:
    return {
        "policy": speed.policy,
        "load": speed.load,
        "requests": speed.requests,
        "mean_live_requests": speed.live,
        "iterations_per_second_median": speed.median,
        "iterations_per_second_slowest": speed.slowest,
        "iterations_per_second_fastest": speed.fastest,
    }
