"""What QoServe's artifact decides chunks by: its step time, its grid of budgets, its deadlines of tokens.

Source of all numbers: microsoft/sarathi-serve, branch niyama_asplos2026, commit 72339db5 (A100-80G, Llama-3-8B). The
steps of the grid between 512 and 2048 are an assumption: 256.
"""

from __future__ import annotations

import numpy as np

from sidecar.policies.common.intake import start_slack_seconds
from sidecar.policies.common.sorting import FAR_SECONDS
from sidecar.queues import Table
from slidingserve.jit import kernel

MODEL_VERSION = "a100-tp1/qoserve-artifact@72339db5"
SAFETY = 1.2
DECAY, INITIAL_TOKENS_PER_SECOND = 0.995, 8500.0  # of the average prefill throughput
BUDGETS = np.array([128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552])
SCARCE_BUDGETS = np.array([128, 256, 384, 512])
SCARCE_KV_TOKENS = 32_000

_SHORT_TOKENS = 512
# Intercept, and seconds for each of: all tokens, prefill tokens, decodes, decodes' context, prefill context.
_SHORT = np.array([14.936e-3, 5.88e-5, 2.25e-5, 3.63e-5, 1.11e-7, 7.55e-7])
_LONG = np.array([5.004e-3, 2.72e-5, 6.86e-5, -4.14e-5, 1.66e-7, 2.73e-6])


@kernel
def artifact_seconds(prefill: float, decodes: float, decode_context: float, prefill_context: float) -> float:
    """Returns the step time of so many tokens, without the safety factor. O(1)."""
    tokens = prefill + decodes
    weights = _SHORT if tokens <= _SHORT_TOKENS else _LONG
    return float(
        weights[0]
        + weights[1] * tokens
        + weights[2] * prefill
        + weights[3] * decodes
        + weights[4] * decode_context
        + weights[5] * prefill_context
    )


@kernel
def artifact_budget(
    slack: float, decodes: float, decode_context: float, prefill_context: float, free_tokens: int, cap: int
) -> int:
    """Returns the largest budget of the grid, of ``cap`` tokens at most, whose time, by bisection, is within the slack.

    The least of the grid where none is. O(log grid).
    """
    grid = SCARCE_BUDGETS if free_tokens < SCARCE_KV_TOKENS else BUDGETS
    low = 0
    high = len(grid) - 1
    while low < high:
        middle = (low + high + 1) // 2
        total = min(grid[middle], cap)
        if artifact_seconds(total - decodes, decodes, decode_context, prefill_context) * SAFETY <= slack:
            low = middle
        else:
            high = middle - 1
    return min(int(grid[low]), cap)


@kernel
def artifact_slack_seconds(
    requests: Table,
    slot: int,
    now_seconds: float,
    first_seconds: float,
    output_tokens: float,
    seconds_per_output: float,
) -> float:
    """Returns the slack of a decode, its later deadlines moved by a first token that was late.

    ``first_seconds``: when its first token was there; 0 if that is not known.
    """
    request = requests[slot]
    interactive = request.ttft > 0.0
    pace = request.tbt if interactive else seconds_per_output
    if (interactive and request.tbt <= 0.0) or (not interactive and request.ttlt <= 0.0):
        return FAR_SECONDS
    due = request.arrival + request.ttft
    if not interactive:  # its slack less what has been generated since: that of its first token
        due = now_seconds + start_slack_seconds(requests, slot, now_seconds, output_tokens, seconds_per_output)
        expected = float(request.max_output) if request.max_output > 0 else output_tokens
        due -= min(expected, float(request.output)) * seconds_per_output
    return float(max(first_seconds, due) + pace * request.output - now_seconds)
