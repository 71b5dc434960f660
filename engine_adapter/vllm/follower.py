"""Makes vLLM's own scheduler follow a plan, through order and minimum alone.

Three things are done around ``super().schedule()``: the running requests are put in the plan's order, waiting requests
that are not in the plan are hidden, and each chunk is cut to its cap by a hook that vLLM calls for every request in
both of its loops. vLLM goes on to allocate, preempt and check by its own rules, so a wrong plan delays requests and
harms nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

FOREIGN_CHUNK_TOKENS = 256
"""Most prompt tokens at a time of requests that the sidecar is not told of."""
_NO_CAP = 1 << 40
_HELD = 0
_BEHIND = 1 << 30


class Orders(NamedTuple):
    """A plan as the follower takes it.

    Attributes:
        caps: most tokens by request id, in the order in which requests are to be taken; who is not named gets none.
        victims: ids of running requests to lose their KV blocks first, if blocks are short.
        admit: waiting requests of the plan, in order.
        foreign: ids of requests that vLLM decides about itself, in chunks.
        polled: waiting requests that are not in the plan and shown all the same, because vLLM has to look at them.
    """

    caps: dict[str, int]
    victims: tuple[str, ...]
    admit: list[Any]
    foreign: frozenset[str]
    polled: list[Any]


class PlanFollower:
    """Mixin before vLLM's ``Scheduler`` or ``AsyncScheduler``; no plan: vLLM's own policy, untouched."""

    running: list[Any]
    waiting: Any
    skipped_waiting: Any
    policy: Any
    max_num_scheduled_tokens: int
    need_mamba_block_aligned_split: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
        from vllm.v1.request import RequestStatus

        super().__init__(*args, **kwargs)
        self._orders: Orders | None = None
        self._new_queue: Callable[..., Any] = FCFSRequestQueue
        self._fcfs = SchedulingPolicy.FCFS
        self._status_running = RequestStatus.RUNNING
        self._has_side_queue = hasattr(self, "skipped_waiting")  # until vLLM 0.30
        self._splits_at_mamba_blocks = bool(self.need_mamba_block_aligned_split)
        # Read by vLLM in `schedule` alone, before it calls the hook below.
        self.need_mamba_block_aligned_split = True

    def schedule_own(self, *args: Any, token_limit: int = 0, **kwargs: Any) -> Any:
        """Schedules by vLLM's own policy, at most ``token_limit`` tokens (0: vLLM's limit)."""
        self._orders = None
        own_limit = self.max_num_scheduled_tokens
        if not 0 < token_limit < own_limit:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.max_num_scheduled_tokens = token_limit
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = own_limit

    def schedule_planned(self, orders: Orders, *args: Any, **kwargs: Any) -> Any:
        """Schedules by a plan. O(n log n) in the running requests, plus linear in what is admitted and hidden."""
        self._arrange_running(orders)
        queues = self._hide_waiting(orders)
        self._orders = orders
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._orders = None
            self._restore_waiting(*queues, shown=orders.admit + orders.polled)

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Takes vLLM's hook between its own limits and the encoder's; returns the tokens that the request gets."""
        orders = self._orders
        if orders is not None:
            num_new_tokens = self._capped(orders, request, num_new_tokens)
        if not self._splits_at_mamba_blocks or num_new_tokens <= 0:
            return num_new_tokens
        split: int = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)  # type: ignore[misc]
        return split

    def _capped(self, orders: Orders, request: Any, tokens: int) -> int:
        name = request.request_id
        cap = orders.caps.get(name, _HELD)
        if name in orders.foreign:
            cap = FOREIGN_CHUNK_TOKENS
        if cap <= 0:
            return 0
        if request.status == self._status_running and not request.is_prefill_chunk:
            return tokens  # a decode and its drafts go as a whole or not at all
        return min(tokens, cap)

    def _arrange_running(self, orders: Orders) -> None:
        """Foreign requests first, then the plan, the others as they stood; victims last, for vLLM preempts the last."""
        rank = {name: place for place, name in enumerate(orders.caps)}
        for name in orders.foreign:
            rank[name] = -1
        for place, name in enumerate(orders.victims):
            rank[name] = _NO_CAP - place
        if len(self.running) > 1:
            self.running.sort(key=lambda request: rank.get(request.request_id, _BEHIND))

    def _hide_waiting(self, orders: Orders) -> tuple[Any, Any, Any]:
        """Puts queues in place that hold only what vLLM may see; returns those that it had, and its policy."""
        queues = (self.waiting, self.skipped_waiting if self._has_side_queue else None, self.policy)
        self.waiting = self._new_queue(orders.admit + orders.polled)
        if self._has_side_queue:
            self.skipped_waiting = self._new_queue()
        self.policy = self._fcfs  # under the priority policy a heap would ignore the order
        return queues

    def _restore_waiting(self, waiting: Any, skipped: Any, policy: Any, *, shown: list[Any]) -> None:
        """Gives vLLM its queues back, without who was admitted and with who was preempted."""
        left = list(self.waiting)
        back = list(self.skipped_waiting) if skipped is not None else []
        self.waiting, self.policy = waiting, policy
        if skipped is not None:
            self.skipped_waiting = skipped
        if len(left) + len(back) == len(shown) and left == shown:
            return
        still = set(left) | set(back)
        known = set(shown)
        gone = known - still
        if gone:
            _remove(waiting, gone)
            if skipped is not None:
                _remove(skipped, gone)
        for request in reversed(left):
            if request not in known:
                waiting.prepend_request(request)


def _remove(queue: Any, gone: set[Any]) -> None:
    """Takes requests out of one of vLLM's queues; linear in it unless they stand at its head."""
    count = len(gone)
    while count and queue and queue.peek_request() in gone:
        queue.pop_request()
        count -= 1
    if count and any(request in gone for request in queue):
        queue.remove_requests(gone)
