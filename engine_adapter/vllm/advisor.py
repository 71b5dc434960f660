"""Asks the sidecar at the right moment, waits no longer than is worth it, and says what vLLM is to do.

Without async scheduling a round trip would stand between two iterations. So the question for the next one goes out as
soon as this one is launched (its outcome is known but for requests that end), and the answer is there when the loop
comes back. Requests that arrived meanwhile are worth a second question. With async scheduling the loop comes while an
iteration runs, and the round trip hides behind that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from engine_adapter.source import DecisionSource, PrefetchingSource
from engine_adapter.vllm.books import EnginePlan
from engine_adapter.vllm.follower import Orders
from engine_adapter.vllm.ledger import Ledger
from engine_adapter.vllm.settings import AdapterSettings
from engine_adapter.vllm.timing import IterationTimes
from engine_adapter.vllm.view import SchedulerView
from engine_adapter.vllm.watchdog import Watchdog
from slidingserve.contract.values import BatchAllocation, IterationState, Mode, PauseState, Snapshot, Step

SHORTEST_DEADLINE_SECONDS = 0.002
LONGEST_DEADLINE_SECONDS = 0.004
"""Without async scheduling a wait delays everybody: a tenth of an iteration, within these."""
LONGEST_HIDDEN_SECONDS = 0.010
"""With it, a wait costs nothing until the running iteration ends."""
_HAND_OVER_SECONDS = 0.001
OFF_POLL_SECONDS = 1.0
"""While the sidecar says ``off``, how often it is asked whether it still does."""
_REMEMBERED_PLANS = 64


class Advice(NamedTuple):
    """What vLLM is to do in one iteration.

    Attributes:
        orders: the plan; None: vLLM's own policy.
        token_limit: most tokens of vLLM's own policy; 0: its own limit.
    """

    orders: Orders | None = None
    token_limit: int = 0


OWN_POLICY = Advice()


class Asked(NamedTuple):
    """The last question: its number, what it was answered, and whether the answer was turned into orders."""

    step: int
    allocation: BatchAllocation | None
    plan: EnginePlan | None


NOBODY_ASKED = Asked(-1, None, None)


class Advisor:
    """For one engine core, on its loop's thread.

    Args:
        view, ledger, times, watchdog: its parts.
        source: who decides; prefetching needs a `PrefetchingSource`.
        settings: the adapter's.
        clock: monotonic seconds.

    Attributes:
        mode: how far the last answer was to be obeyed.
        planned, shadowed, own: iterations by plan, by vLLM's own policy beside a plan, and by it for want of one.
        policy_version: of the last answer.
    """

    def __init__(
        self,
        view: SchedulerView,
        ledger: Ledger,
        times: IterationTimes,
        watchdog: Watchdog,
        source: DecisionSource,
        settings: AdapterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._ledger, self._times, self.watchdog = view, ledger, times, watchdog
        self._source, self._settings, self._clock = source, settings, clock
        wanted = not view.is_async if settings.prefetch == "auto" else settings.prefetch
        self._prefetching = cast(PrefetchingSource, source) if wanted and hasattr(source, "send") else None
        self._step = 0
        self._sent = False
        self._asked = NOBODY_ASKED
        self._now_seconds = 0.0
        self._ask_at_seconds = 0.0
        self._all_held = False
        self._sizes: list[int] = []
        self._kv_blocks = view.limits().kv_blocks
        self.mode = Mode[settings.mode.upper()]
        self.policy_version = ""
        self.planned = self.shadowed = self.own = 0

    def advise(self) -> Advice:
        """Returns what to do in the iteration that is about to be scheduled.

        Linear in the running requests and in what changed, plus the wait for the answer.
        """
        self._asked = NOBODY_ASKED
        if self._view.pause_state is PauseState.PAUSED_ALL or not len(self._ledger):
            return OWN_POLICY
        now = self._clock()
        if now < self._ask_at_seconds:
            return OWN_POLICY
        allocation = self._answer(now)
        if allocation is None:
            self.own += 1
            return Advice(None, self._fallback_limit())
        self._follow_mode(allocation.mode, now)
        self.policy_version = allocation.policy_version
        plan = self._plan(allocation)
        self._asked = Asked(allocation.step, allocation, plan)
        if plan is None:
            self.own += self.mode is Mode.ACTIVE
            self.shadowed += self.mode is Mode.SHADOW
            return Advice(None, self._fallback_limit()) if self.mode is Mode.ACTIVE else OWN_POLICY
        self.planned += 1
        return Advice(self._orders(plan))

    def launched(self, output: Any, scheduled: Mapping[str, int], preempted: Iterable[str]) -> None:
        """Takes in what vLLM has scheduled, and asks for the next iteration where that is worth it.

        Linear in the running requests and the batch.
        """
        now = self._clock()
        asked = self._asked
        tokens = sum(scheduled.values())
        if asked.step >= 0 or tokens or preempted:
            self._ledger.record(scheduled, preempted, asked.plan)
        if asked.step < 0 and tokens:
            self._lose_step()
        predicted = (
            asked.allocation.predicted_seconds if asked.allocation is not None and asked.plan is not None else 0.0
        )
        self._times.launched(output, tokens, asked.step, predicted, now)
        if asked.plan is not None:
            # Where others are in flight, all may have been launched that there is.
            self._all_held = tokens == 0 and self._times.in_flight == 1
            if tokens:
                self._sizes = [*self._sizes[1 - _REMEMBERED_PLANS :], tokens]
        if self._prefetching is not None and tokens and asked.allocation is not None and self.mode is not Mode.OFF:
            step, snapshot = self._question(self._times.expected_end_seconds(now), 0.0)
            self._sent = self._prefetching.send(step, snapshot)

    def finished(self, output: Any) -> None:
        """Says that the result of an iteration is there. O(iterations in flight)."""
        self._times.finished(output, self._clock())

    def close(self) -> None:
        """Ends the session."""
        self._source.close()

    def _answer(self, now: float) -> BatchAllocation | None:
        """Returns the answer for this iteration; asks if nobody did, and again if somebody came or all have gone."""
        if self._sent:
            self._sent = False
            assert self._prefetching is not None
            allocation = self._prefetching.take(self._deadline(now))
            if allocation is None or not (self._ledger.has_news or self._is_void(allocation)):
                return allocation
            self._ledger.record_nothing()  # that plan is not carried out
        end = self._times.expected_end_seconds(now) if self._view.is_async else now
        return self._source.decide(*self._question(end, self._deadline(now)))

    def _is_void(self, allocation: BatchAllocation) -> bool:
        """Says whether everybody who is in the plan has ended since it was asked for."""
        return self.mode is Mode.ACTIVE and not self._ledger.any_live(allocation.handles)

    def _question(self, starts_seconds: float, deadline_seconds: float) -> tuple[Step, Callable[[], Snapshot]]:
        """Returns the next message, and what makes a snapshot of the same moment."""
        iteration = self._iteration(starts_seconds, deadline_seconds)
        step = self._ledger.message(iteration)
        if step is None:  # a gap in the numbers makes the client send the snapshot
            self._lose_step()
            iteration = iteration._replace(step=self._step)
            step = Step(iteration, applied_exactly=False)
        self._step = iteration.step + 1
        return step, lambda: self._ledger.snapshot(iteration)

    def _lose_step(self) -> None:
        """Skips a number: something happened that no step will tell."""
        self._step += 1

    def _iteration(self, starts_seconds: float, deadline_seconds: float) -> IterationState:
        self._now_seconds = max(self._now_seconds, starts_seconds)
        sample = self._times.take()
        depth, seconds, censored = self._times.in_flight, 0.0, False
        if sample is not None and 0 <= sample.step < self._step:
            # The sidecar takes the sample for that of message `step - 1 - depth`.
            depth, seconds, censored = self._step - 1 - sample.step, sample.seconds, sample.censored
        return IterationState(
            0,
            self._step,
            self._now_seconds,
            max(0, min(self._view.free_blocks, self._kv_blocks)),
            seconds,
            censored,
            self._view.pause_state,
            depth,
            deadline_seconds,
        )

    def _deadline(self, now: float) -> float:
        """Returns how long to wait for an answer."""
        if self._settings.deadline_seconds > 0.0:
            return self._settings.deadline_seconds
        if self._view.is_async and self._times.in_flight:
            left = self._times.expected_end_seconds(now) - now - _HAND_OVER_SECONDS
            return min(max(left, SHORTEST_DEADLINE_SECONDS), LONGEST_HIDDEN_SECONDS)
        tenth = self._times.typical_seconds / 10
        return min(max(tenth, SHORTEST_DEADLINE_SECONDS), LONGEST_DEADLINE_SECONDS)

    def _follow_mode(self, mode: Mode, now: float) -> None:
        self.mode = mode
        if mode is Mode.OFF:
            self._ask_at_seconds = now + OFF_POLL_SECONDS

    def _plan(self, allocation: BatchAllocation) -> EnginePlan | None:
        """Returns the plan to be obeyed; None: vLLM's own policy, this once."""
        if self.mode is not Mode.ACTIVE or not len(allocation.handles):
            return None
        if self._all_held:  # the last plan let nobody run
            self._all_held = False
            return None
        plan = self._ledger.resolve(allocation)
        may_admit = self._view.pause_state is PauseState.RUNNING
        plan = self.watchdog.extend(
            plan, self._ledger.told(), self._ledger.iterations, self._clock(), may_admit=may_admit
        )
        return plan if plan.caps else None

    def _orders(self, plan: EnginePlan) -> Orders:
        admit = []
        for name in plan.caps:
            known = self._ledger.find(name)
            if known is not None and known.waiting:
                admit.append(known.request)
        foreign, polled = [], []
        for known in self._ledger.untold:
            request = known.request
            is_foreign = self._view.is_foreign(request)
            if is_foreign:
                foreign.append(request.request_id)
            if self._view.waits(request) and (is_foreign or self._view.is_held(request)):
                polled.append(request)
        return Orders(plan.caps, plan.victims, admit, frozenset(foreign), polled)

    def _fallback_limit(self) -> int:
        """Returns how many tokens vLLM's own policy gets while the sidecar misses now and then; 0: as many as it likes.

        A greedy batch among planned ones would break the very promises that the plans keep.
        """
        return max(self._sizes, default=0) if self._settings.cap_fallback else 0
