"""How the work of a decision grows with the number of requests, in executed lines.

Kernels run as plain Python in a process of its own (numba switched off), where each executed line is counted; a
compiled kernel could only be timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import log
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

from sidecar.policies.base import PolicyContext
from sidecar.policies.slidingserve.decision import PATHS, decide_batch
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.policy import make_rules
from sidecar.policies.slidingserve.workspace import FACTS, make_workspace
from sidecar.queues import ENTRY, REQUEST, RUNNING, WAITING, Table
from tests.slidingserve.scenes import LIMITS, linear

COUNTS = (100, 200, 400, 800)
BUDGET = 512
NOW_SECONDS = 100.0
LIMITED_SEATS = 10_000
MODEL = linear(2.0**-9, 2.0**-14)


def requests_of(count: int, slack_seconds: Callable[[int], float]) -> Table:
    """A quarter decodes, the others waiting prompts of many lengths; columns are attributes, as in kernels."""
    table = np.zeros(count, REQUEST)
    for i in range(count):
        row, decodes = table[i], i % 4 == 0
        row["state"] = RUNNING if decodes else WAITING
        row["prompt"] = 1 + (37 * i) % 100
        row["output"], row["tbt"] = (3, 0.05) if decodes else (0, 0.0)
        row["target"] = row["prompt"] + row["output"]
        row["computed"] = row["target"] - 1 if decodes else 0
        row["blocks"] = -(-row["computed"] // LIMITS.kv_block_tokens)
        row["ttft"] = 1.0
        slack = 0.03 + 1e-4 * (i % 7) if decodes else slack_seconds(i)
        row["arrival"] = NOW_SECONDS - 1.0 - row["output"] * row["tbt"] + slack
    return table.view(np.recarray)


class Case(NamedTuple):
    """Slack of the prompts, the way that decisions have to go, and parameters."""

    slack_seconds: Callable[[int], float]
    path: str
    parameters: dict[str, Any]


CASES = {
    "chunker": Case(lambda i: 5.0 + i % 11, "chunker", {}),
    "paper": Case(lambda i: 5.0 + i % 11, "chunker", {"mode": "paper"}),
    "expired": Case(lambda i: -1.0 - i % 11, "chunker", {}),
    # All at risk, the later in the order the sooner. The knapsack is bounded: 8 anchors, 32 candidates.
    "constructor": Case(lambda i: 0.030 - 0.00002 * ((37 * i) % 100), "constructor", {}),
}


class Lines:
    """Counts executed lines of what decides."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_globals["__name__"].startswith(("sidecar.", "predictor.")):
            return None
        self.count += event == "line"
        return self


def count_lines(case: Case, count: int) -> int:
    """Lines of one decision; only where kernels are plain Python."""
    requests = requests_of(count, case.slack_seconds)
    slots = [np.flatnonzero(requests["state"] == state) for state in (RUNNING, WAITING)]
    bounds = np.array([len(slots[0]), 0, len(slots[1])])
    rules = make_rules(SlidingServeParameters(**case.parameters).resolved(), PolicyContext(LIMITS), BUDGET)
    rules["max_sequences"] = LIMITED_SEATS
    work = make_workspace(count, rules[0])
    work = work._replace(pool=work.pool.view(np.recarray), lines=work.lines.view(np.recarray))
    entries, facts = np.zeros(count, ENTRY).view(np.recarray), np.zeros(1, FACTS).view(np.recarray)
    victims, demoted = np.zeros((2, count), np.int64)
    lines = Lines()
    sys.settrace(lines)
    try:
        decided = decide_batch(
            requests,
            slots[0],
            slots[1],
            bounds,
            entries,
            victims,
            demoted,
            True,
            NOW_SECONDS,
            1_000_000,
            10_000.0,
            work,
            rules.view(np.recarray),
            facts,
            MODEL.pack(),
        )
    finally:
        sys.settrace(None)
    assert PATHS[decided[3]] == case.path
    assert decided[0] > count // 4, "somebody beside the decodes gets tokens"
    return lines.count


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, int]]:
    """Lines by case and number of requests."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.slidingserve.{Path(__file__).stem}"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted: dict[str, dict[str, int]] = json.loads(done.stdout)
    return counted


@pytest.mark.parametrize("name", CASES)
def test_lines_grow_no_faster_than_n_log_n(lines: dict[str, dict[str, int]], name: str) -> None:
    """From each number of requests to twice as many, by at most what n log n grows by."""
    counted = lines[name]
    assert counted[str(COUNTS[0])] > 10 * COUNTS[0], "every request is looked at"
    for count in COUNTS[:-1]:
        growth = counted[str(2 * count)] / counted[str(count)]
        assert growth <= 2 * log(2 * count) / log(count), f"{count}: {counted}"


if __name__ == "__main__":
    print(json.dumps({name: {count: count_lines(case, count) for count in COUNTS} for name, case in CASES.items()}))
