"""What the sidecar knows of each request, so that it is told what changed and nothing else.

The sidecar advances its mirror by its own answers. The ledger does the same sum for each request; where vLLM's own
numbers differ (prefix hits, rejected drafts), it says so, and where they cannot be explained, it asks for a snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from engine_adapter.vllm.books import UNTOLD, EnginePlan, Known, Names, floats, ints, progress_of
from engine_adapter.vllm.slos import TermsReader
from engine_adapter.vllm.view import SchedulerView
from slidingserve.contract.values import (
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    Ints,
    IterationState,
    ProgressColumns,
    RequestColumns,
    Snapshot,
    Step,
)

LONGEST_AGE_SECONDS = 60.0
"""A request is not older than that when it reaches the engine; what is more is a clock that was set."""


class Ledger:
    """Keeps the books of one engine core; duck-typed on vLLM's ``Request``.

    Args:
        view: the scheduler.
        terms: reads SLOs.
        clock: monotonic seconds.
        wall_clock: seconds since 1970, which vLLM stamps arrivals with.
    """

    def __init__(
        self,
        view: SchedulerView,
        terms: TermsReader,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._view, self._terms, self._clock, self._wall_clock = view, terms, clock, wall_clock
        self._known: dict[str, Known] = {}
        self._by_handle: dict[int, Known] = {}
        self._untold: dict[str, Known] = {}
        self._preempted: dict[str, Known] = {}  # told, waiting, and with output that may still grow
        self._running = 0  # told requests that the sidecar believes to run
        self._next_handle = 0
        self._classes, self._tenants = Names(), Names()
        self._exact = False
        self._applied: AppliedBatch | None = None
        self._news = False
        self._iterations = 0

    def __len__(self) -> int:
        """Returns the number of live requests."""
        return len(self._known)

    @property
    def iterations(self) -> int:
        """Iterations recorded so far."""
        return self._iterations

    @property
    def has_news(self) -> bool:
        """Whether a request has come since the last message."""
        return self._news

    @property
    def untold(self) -> Iterable[Known]:
        """Live requests that the sidecar does not know, in order of arrival."""
        return self._untold.values()

    def told(self) -> Iterable[Known]:
        """Returns the live requests that the sidecar knows."""
        return self._by_handle.values()

    def find(self, request_id: str) -> Known | None:
        """Returns a live request."""
        return self._known.get(request_id)

    def arrive(self, request: Any) -> None:
        """Takes in a request that vLLM has queued. One whose id is known continues a session; the sidecar forgets it.

        O(1), plus reading its SLOs.
        """
        now = self._clock()
        age = min(max(self._wall_clock() - request.arrival_time, 0.0), LONGEST_AGE_SECONDS)
        parameters = request.sampling_params
        extra = parameters.extra_args if parameters is not None else None
        known = Known(request, self._terms.read(extra, request.priority), now - age)
        known.served_seconds, known.served_iteration = now, self._iterations
        if request.request_id not in self._known:
            self._known[request.request_id] = self._untold[request.request_id] = known
            self._news = True

    def message(self, iteration: IterationState) -> Step | None:
        """Returns what changed since the last message; None if only a snapshot can tell.

        Linear in the running requests and in what changed. The changes count as told.
        """
        finished = self._drop_finished()
        progress, explained = self._progress()
        finished += self._withdraw_held()
        arrived = [known for known in self._untold.values() if self._can_be_told(known)] if self._untold else []
        explained = explained and all(known.request.num_computed_tokens == 0 for known in arrived)
        self._news = False
        if not explained:
            return None
        columns = self._arrivals(arrived) if arrived else None
        exact, applied = self._exact, self._applied
        self.record_nothing()
        return Step(iteration, exact, applied, progress, ints(finished) if finished else NO_INTS, columns)

    def snapshot(self, iteration: IterationState) -> Snapshot:
        """Returns everything that the sidecar can be told. Linear in the live requests."""
        self._drop_finished()
        self._by_handle.clear()
        self._untold = {}
        self._preempted = {}
        running = self._tell_all(self._view.running, waiting=False)
        waiting = self._tell_all(self._view.waiting(), waiting=True)
        self._running = len(running)
        for name, known in self._known.items():
            if known.handle not in self._by_handle:
                known.handle = UNTOLD
                self._untold[name] = known
        rows = running + waiting
        progress = ProgressColumns(
            NO_INTS,
            ints(known.computed for known in rows),
            ints(known.output for known in rows),
            ints(0 if known.waiting else int(known.request.num_in_flight_tokens) for known in rows),
        )
        self._news = False
        self.record_nothing()
        return Snapshot(iteration, self._columns(rows, everything=True), len(running), progress)

    def resolve(self, allocation: BatchAllocation) -> EnginePlan:
        """Returns the allocation in vLLM's terms; what is unknown or gone is left out. Linear in the batch."""
        caps: dict[str, int] = {}
        requests = self._view.requests
        complete = True
        for handle, tokens in zip(allocation.handles.tolist(), allocation.tokens.tolist(), strict=True):
            known = self._by_handle.get(handle)
            if known is None or known.request.request_id not in requests:
                complete = False
            else:
                caps[known.request.request_id] = tokens
        victims = [
            self._by_handle[h].request.request_id for h in allocation.preempted_handles.tolist() if h in self._by_handle
        ]
        return EnginePlan(caps, tuple(victims), complete and not victims and len(caps) == len(allocation.handles))

    def any_live(self, handles: Ints) -> bool:
        """Says whether any of them is a live request. Linear in those that are not, before the first that is."""
        requests = self._view.requests
        found = (self._by_handle.get(handle) for handle in handles.tolist())
        return any(known is not None and known.request.request_id in requests for known in found)

    def record_nothing(self) -> None:
        """Says that nothing of the last answer was executed."""
        self._exact, self._applied = False, None

    def record(self, scheduled: Mapping[str, int], preempted: Iterable[str], plan: EnginePlan | None) -> None:
        """Takes in what vLLM scheduled; ``plan`` is the answer to the last message, if it was to be obeyed.

        ``preempted`` in the order in which they lost their blocks. Linear in the batch.
        """
        now = self._clock()
        self._iterations += 1
        victims: list[int] = []
        for name in preempted:
            known = self._known.get(name)
            if known is not None and known.told and not known.waiting:
                victims.append(known.handle)
                known.waiting, known.computed = True, 0
                self._preempted[name] = known
                self._running -= 1
        handles: list[int] = []
        for name, tokens in scheduled.items():
            known = self._known.get(name)
            if known is None:
                continue
            known.served_seconds, known.served_iteration = now, self._iterations
            if known.handle == UNTOLD:
                continue
            handles.append(known.handle)
            if known.waiting:
                known.waiting = False
                self._running += 1
                self._preempted.pop(name, None)
            self._advance(known, tokens)
        self._exact = (
            plan is not None
            and plan.complete
            and not victims
            and len(handles) == len(plan.caps)
            and (scheduled == plan.caps or all(scheduled.get(name) == cap for name, cap in plan.caps.items()))
        )
        tokens_of = ints(scheduled[self._by_handle[handle].request.request_id] for handle in handles)
        self._applied = None if self._exact else AppliedBatch(ints(handles), tokens_of, ints(victims))

    @staticmethod
    def _advance(known: Known, tokens: int) -> None:
        """Advances a request as the sidecar advances its mirror (`sidecar.queues.advance`)."""
        target = known.request.num_prompt_tokens + known.output
        known.computed = min(known.computed + tokens, target)
        if known.computed >= target:
            known.output += 1

    def _drop_finished(self) -> list[int]:
        """Forgets the requests that are gone; returns the handles of those that the sidecar knows."""
        handles = []
        for name in self._view.finished(self._known):
            known = self._known.pop(name)
            self._untold.pop(name, None)
            self._preempted.pop(name, None)
            if known.told:
                handles.append(known.handle)
                del self._by_handle[known.handle]
                self._running -= not known.waiting
        return handles

    def _progress(self) -> tuple[ProgressColumns | None, bool]:
        """Returns where the sidecar is wrong about running requests, and whether it is right about which run."""
        wrong: list[tuple[int, int, int]] = []
        seen = 0
        for request in self._view.running:
            known = self._known.get(request.request_id)
            if known is None or known.handle == UNTOLD:
                if known is None or not self._view.is_foreign(request):
                    return None, False
                continue
            if known.waiting:
                return None, False
            seen += 1
            computed, output = progress_of(request)
            if computed != known.computed or output != known.output:
                known.computed, known.output = computed, output
                wrong.append((known.handle, computed, output))
        for known in self._preempted.values():
            output = int(known.request.num_output_tokens)
            if output != known.output:
                known.output = output
                wrong.append((known.handle, 0, output))
        if seen != self._running:
            return None, False
        if not wrong:
            return None, True
        handles, computed_tokens, output_tokens = zip(*wrong, strict=True)
        return ProgressColumns(ints(handles), ints(computed_tokens), ints(output_tokens)), True

    def _withdraw_held(self) -> list[int]:
        """Takes waiting requests that vLLM would skip out of the sidecar's sight; they arrive anew in their time."""
        if not self._view.holds_back:
            return []
        held = [
            known
            for known in self._by_handle.values()
            if known.waiting and known.output == 0 and self._view.is_held(known.request)
        ]
        handles = [known.handle for known in held]
        for known in held:
            del self._by_handle[known.handle]
            known.handle = UNTOLD
            self._untold[known.request.request_id] = known
        return handles

    def _can_be_told(self, known: Known) -> bool:
        return not self._view.is_foreign(known.request) and not self._view.is_held(known.request)

    def _arrivals(self, arrived: list[Known]) -> RequestColumns:
        cached = []
        for known in arrived:
            self._tell(known)
            self._untold.pop(known.request.request_id, None)
            known.computed = self._view.cached_prefix_tokens(known.request)
            cached.append(known.computed)
        columns = self._columns(arrived, everything=False)
        return columns._replace(cached_prefix_tokens=ints(cached)) if any(cached) else columns

    def _tell_all(self, requests: Iterable[Any], *, waiting: bool) -> list[Known]:
        rows = []
        for request in requests:
            known = self._known.get(request.request_id)
            if known is None:  # queued by other ways than add_request
                self.arrive(request)
                known = self._known[request.request_id]
            if self._view.is_foreign(request) or (waiting and self._view.is_held(request)):
                continue
            self._tell(known)
            known.waiting = waiting
            known.computed, known.output = progress_of(request)
            if waiting:
                known.computed = 0
                if known.output:
                    self._preempted[request.request_id] = known
            rows.append(known)
        return rows

    def _tell(self, known: Known) -> None:
        """Gives the request a handle above all before, if it has none."""
        if known.handle == UNTOLD:
            known.handle = self._next_handle
            self._next_handle += 1
        self._by_handle[known.handle] = known

    def _columns(self, rows: list[Known], *, everything: bool) -> RequestColumns:
        terms = [known.terms for known in rows]
        classes = ints(self._classes.index(t.class_name) for t in terms)
        tenants = ints(self._tenants.index(t.tenant) for t in terms)
        drafts = self._view.speculative_tokens
        return RequestColumns(
            handles=ints(known.handle for known in rows),
            arrival_seconds=floats(known.arrival_seconds for known in rows),
            prompt_tokens=ints(int(known.request.num_prompt_tokens) for known in rows),
            ttft_slo_seconds=floats(t.ttft_slo_seconds for t in terms),
            tbt_slo_seconds=floats(t.tbt_slo_seconds for t in terms),
            ttlt_slo_seconds=floats(t.ttlt_slo_seconds for t in terms),
            priority=ints(t.priority for t in terms),
            class_index=classes,
            tenant_index=tenants,
            weight=floats(t.weight for t in terms),
            max_output_tokens=ints(int(known.request.max_tokens) for known in rows),
            speculative_tokens=np.full(len(rows), drafts, np.int64) if drafts else NO_INTS,
            request_ids=tuple(known.request.request_id for known in rows),
            class_names=self._classes.new(everything=everything),
            tenant_names=self._tenants.new(everything=everything),
        )
