"""Lines in vLLM's log that say how it goes: every minute, and soon after the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine_adapter.client import SchedulerClient
from engine_adapter.vllm.advisor import Advisor
from slidingserve.contract.values import Mode

FIRST_REPORT_SECONDS = 10.0


class Reporter:
    """Says what happened since the last report, if anything did.

    Args:
        advisor: the one that is reported on.
        source: who decides; a `SchedulerClient` has counters to report.
        nonsense: counts SLOs that could not be read, by kind.
        target: the sidecar's address.
        every_seconds: time between reports; 0: none.
        info, warning: write a line.
    """

    def __init__(
        self,
        advisor: Advisor,
        source: Any,
        nonsense: Mapping[str, int],
        target: str,
        every_seconds: float,
        info: Callable[[str], None],
        warning: Callable[[str], None],
    ) -> None:
        self._advisor, self._nonsense, self._target = advisor, nonsense, target
        self._client = source if isinstance(source, SchedulerClient) else None
        self._every_seconds = every_seconds
        self._info, self._warning = info, warning
        self._due_seconds: float | None = None
        self._last: Counter[str] = Counter()

    def tick(self, now_seconds: float) -> None:
        """Reports if it is time to; called once in each iteration, O(1) but then."""
        if self._every_seconds <= 0.0:
            return
        if self._due_seconds is None:
            self._due_seconds = now_seconds + min(self._every_seconds, FIRST_REPORT_SECONDS)
        elif now_seconds >= self._due_seconds:
            self._due_seconds = now_seconds + self._every_seconds
            self._report()

    def _report(self) -> None:
        counts = self._counts()
        new = counts - self._last
        self._last = counts
        planned, shadowed, own = new["planned"], new["shadowed"], new["own"]
        if not (planned or shadowed or own):
            return
        reasons = {name.removeprefix("fallback "): n for name, n in new.items() if name.startswith("fallback ")}
        if own and not planned and not shadowed:
            why = _listed(reasons) or "nothing that could be obeyed"
            self._warning(
                f"slidingserve: vLLM decided all {own} iterations alone ({why}); is there a sidecar at {self._target}? "
                "`slidingserve doctor --vllm` looks"
            )
            return
        self._info(f"slidingserve: {self._summary(planned, shadowed, own, reasons)}{self._remarks(new)}")

    def _summary(self, planned: int, shadowed: int, own: int, reasons: dict[str, int]) -> str:
        advisor = self._advisor
        by = f" by {advisor.policy_version}" if advisor.policy_version else ""
        if advisor.mode is Mode.SHADOW:
            parts = [f"shadow{by}: {shadowed} iterations decided and not obeyed"]
        else:
            parts = [f"{advisor.mode.name.lower()}{by}: {planned} iterations by plan"]
        if own:
            parts.append(f"{own} by vLLM alone" + (f" ({_listed(reasons)})" if reasons else ""))
        if self._client is not None and len(self._client.counters.round_trips):
            p50, p99 = 1e3 * np.percentile(self._client.counters.round_trips.seconds(), [50, 99])
            parts.append(f"a decision held the loop for {p50:.2f} ms (p50), {p99:.2f} ms (p99)")
        return ", ".join(parts)

    def _remarks(self, new: Counter[str]) -> str:
        remarks = []
        if new["rescues"]:
            remarks.append(f"{new['rescues']} times a starving request was put before the plan")
        nonsense = {name.removeprefix("slo "): n for name, n in new.items() if name.startswith("slo ")}
        if nonsense:
            remarks.append(f"SLOs that could not be used: {_listed(nonsense)}")
        return "".join(f"; {remark}" for remark in remarks)

    def _counts(self) -> Counter[str]:
        advisor = self._advisor
        counts = Counter(
            planned=advisor.planned, shadowed=advisor.shadowed, own=advisor.own, rescues=advisor.watchdog.rescues
        )
        counts.update({f"slo {name}": count for name, count in self._nonsense.items()})
        if self._client is not None:
            counts.update({f"fallback {name}": count for name, count in self._client.counters.fallbacks.items()})
        return counts


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items() if count)
