"""vLLM's scheduler with an adviser: asks, follows, and goes on alone whenever anything is wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from engine_adapter.vllm.advisor import OWN_POLICY, Advice, Advisor
from engine_adapter.vllm.follower import PlanFollower
from engine_adapter.vllm.ledger import Ledger
from engine_adapter.vllm.reports import Reporter

_log = logging.getLogger("vllm.slidingserve")


class Staff(NamedTuple):
    """Who works for one scheduler."""

    advisor: Advisor
    ledger: Ledger
    reporter: Reporter


StaffFactory = Callable[[Any], Staff]
"""Makes the staff of a scheduler that has just been made."""


class AdvisedScheduler(PlanFollower):
    """Mixin before vLLM's ``Scheduler`` or ``AsyncScheduler``; takes ``make_staff`` besides vLLM's arguments.

    Whatever goes wrong on our side is logged once, and from then on vLLM is alone.
    """

    def __init__(self, *args: Any, make_staff: StaffFactory, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staff: Staff | None = None
        try:
            self._staff = make_staff(self)
        except Exception:
            self._give_up("starting")

    def add_request(self, request: Any) -> None:
        """Queues a request, and takes it into the books."""
        super().add_request(request)  # type: ignore[misc]
        if self._staff is not None:
            try:
                self._staff.ledger.arrive(request)
            except Exception:
                self._give_up("taking in a request")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules one iteration."""
        if self._staff is None:
            return self.schedule_own(*args, **kwargs)
        advice = self._advice(self._staff.advisor)
        if advice.orders is None:
            output = self.schedule_own(*args, token_limit=advice.token_limit, **kwargs)
        else:
            output = self.schedule_planned(advice.orders, *args, **kwargs)
        self._launched(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Takes in the result of an iteration."""
        if self._staff is not None:
            try:
                self._staff.advisor.finished(scheduler_output)
            except Exception:
                self._give_up("taking the time of an iteration")
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Ends the session, then vLLM's part."""
        self._dismiss()
        super().shutdown()  # type: ignore[misc]

    def _advice(self, advisor: Advisor) -> Advice:
        try:
            return advisor.advise()
        except Exception:
            self._give_up("deciding")
            return OWN_POLICY

    def _launched(self, output: Any) -> None:
        if self._staff is None:
            return
        try:
            self._staff.advisor.launched(output, output.num_scheduled_tokens, self._preempted(output))
            self._staff.reporter.tick(time.monotonic())
        except Exception:
            self._give_up("reporting what was scheduled")

    def _preempted(self, output: Any) -> list[str]:
        """Returns the ids of requests that were preempted, in the order in which that happened.

        Each was put before all that waited then, so they stand in the reverse order at the head. Who does not wait any
        more was preempted before this call, by a reset of the prefix cache, and has been resumed in it.
        """
        preempted = output.preempted_req_ids
        if not preempted:
            return []
        if len(preempted) == 1:
            return list(preempted)
        waiting = [r.request_id for r in self.waiting if r.request_id in preempted][::-1]
        return [name for name in preempted if name not in waiting] + waiting

    def _give_up(self, doing: str) -> None:
        _log.exception("slidingserve: failed while %s; vLLM goes on with its own policy until it is restarted", doing)
        self._dismiss()

    def _dismiss(self) -> None:
        staff, self._staff = self._staff, None
        if staff is not None:
            try:
                staff.advisor.close()
            except Exception:
                _log.exception("slidingserve: the session did not end cleanly")
