"""The violation check: whose first token would be late if the batch were simply filled (Algorithm 2)."""

from __future__ import annotations

from typing import Any

from sidecar.policies.slidingserve.workspace import Workspace
from slidingserve.jit import kernel


@kernel
def is_at_risk(slack: float, expired: bool, full_seconds: float, rules: Any) -> bool:
    """Says whether a prompt would be late after a full batch; what has expired is not at risk any more, if so ruled."""
    return slack < full_seconds and not (expired and rules.drop_expired_risks)


@kernel
def find_risks(work: Workspace, kept: int, full_seconds: float, rules: Any) -> int:
    """Lists the places (in the order) of the prompts at risk in column ``risk``, least slack first, then shortest.

    One that lacks KV blocks cannot be finished and is none. At most ``max_anchors`` are kept (0: all). Returns how
    many. O(kept x anchors) with a cap, for each prompt at risk is put into its place among those found so far.
    """
    most = rules.max_anchors if rules.max_anchors > 0 else kept
    count = 0
    for place in range(kept):
        prompt = work.pool[work.lines[place].row]
        if not (prompt.whole and is_at_risk(prompt.slack, prompt.expired, full_seconds, rules)):
            continue
        position = count
        while position > 0:
            before = work.pool[work.lines[work.lines[position - 1].risk].row]
            if before.slack < prompt.slack or (before.slack == prompt.slack and before.remaining <= prompt.remaining):
                break
            position -= 1
        if position >= most:
            continue
        count = min(count + 1, most)
        for moved in range(count - 1, position, -1):
            work.lines[moved].risk = work.lines[moved - 1].risk
        work.lines[position].risk = place
    return count
