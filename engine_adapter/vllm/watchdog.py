"""No request starves, whatever the plans say.

A plan may leave a request out for good reasons, but not for ever: who has not been served for too long, and through too
many iterations (a single one may take seconds while kernels are compiled), is put before the plan. Waiting requests get
a longer time, for under overload somebody always waits, and to serve all of them after a second would be first come,
first served by another name.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_adapter.vllm.books import EnginePlan, Known

CHUNK_TOKENS = 256
"""Prompt tokens that a starving request is given at a time."""
FEWEST_ITERATIONS = 16
"""Nobody starves in fewer iterations than these."""
_LOOK_SECONDS = 0.1


class Watchdog:
    """Adds starving requests to plans.

    Args:
        running_seconds: how long a running request may go without tokens.
        waiting_seconds: the same for a waiting one.

    Attributes:
        rescues: requests that were added so far, counted each time.
    """

    def __init__(self, running_seconds: float, waiting_seconds: float) -> None:
        self._running_seconds, self._waiting_seconds = running_seconds, waiting_seconds
        self._look_at_seconds = 0.0
        self._starving: list[Known] = []
        self.rescues = 0

    def extend(
        self, plan: EnginePlan, told: Iterable[Known], iterations: int, now_seconds: float, *, may_admit: bool
    ) -> EnginePlan:
        """Returns the plan with starving requests before all others; ``iterations`` counts those so far.

        Linear in the requests ten times a second, else O(1) while nobody starves.
        """
        if now_seconds >= self._look_at_seconds:
            self._look_at_seconds = now_seconds + _LOOK_SECONDS
            self._starving = [known for known in told if self._starves(known, iterations, now_seconds)]
        if not self._starving:
            return plan
        added = {}
        for known in self._starving:
            name = known.request.request_id
            if name in plan.caps or (known.waiting and not may_admit):
                continue
            if self._starves(known, iterations, now_seconds):
                added[name] = CHUNK_TOKENS
        if not added:
            return plan
        self.rescues += len(added)
        return EnginePlan(added | plan.caps, plan.victims, False)

    def _starves(self, known: Known, iterations: int, now_seconds: float) -> bool:
        limit = self._waiting_seconds if known.waiting else self._running_seconds
        return now_seconds - known.served_seconds > limit and iterations - known.served_iteration >= FEWEST_ITERATIONS
