"""Recorded traffic under one name: `read_trace` and what it tells, `trace_workload` and what it does to stamps."""

from __future__ import annotations

from evaluation.workloads.recorded import SHORTEST_SPAN_SECONDS, spread_stamps, trace_workload
from evaluation.workloads.slos import LONG_PROMPT_TOKENS, LONG_TTFT_SECONDS, SHORT_TTFT_SECONDS, TBT_SECONDS
from evaluation.workloads.tracefiles import (
    AZURE,
    BURSTGPT,
    FORMATS,
    MAX_TOKENS,
    MOONCAKE,
    OURS,
    TABLE_FORMATS,
    TraceError,
    TraceFormat,
    TraceRows,
    read_trace,
)

__all__ = [
    "AZURE",
    "BURSTGPT",
    "FORMATS",
    "LONG_PROMPT_TOKENS",
    "LONG_TTFT_SECONDS",
    "MAX_TOKENS",
    "MOONCAKE",
    "OURS",
    "SHORTEST_SPAN_SECONDS",
    "SHORT_TTFT_SECONDS",
    "TABLE_FORMATS",
    "TBT_SECONDS",
    "TraceError",
    "TraceFormat",
    "TraceRows",
    "read_trace",
    "spread_stamps",
    "trace_workload",
]
