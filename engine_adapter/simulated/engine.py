"""The simulated engine: discrete events in virtual time, one iteration at a time.

Who decides is handed in as a `DecisionSource`; without an answer the engine goes on by its own policy, as a real engine
does. Time passes only by iterations (their duration comes from an `IterationTimer`) and by waiting for arrivals, so a
decision costs no virtual time and both transports give the same run. As in vLLM, a request that arrives during an
iteration waits for the next.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from engine_adapter.simulated.digest import AllocationDigest
from engine_adapter.simulated.feed import RequestFeed
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.own_policy import schedule_own
from engine_adapter.simulated.state import (
    COUNTS,
    DONE,
    FREE_BLOCKS,
    GAP_COUNT,
    PREEMPTIONS,
    REQUEST,
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    WAITING_START,
    WAITING_STOP,
    Table,
    finish_batch,
    load_batch,
    queue_arrivals,
    run_batch,
)
from engine_adapter.simulated.timing import IterationTimer, ProfileTimer
from engine_adapter.source import DecisionSource
from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    EngineLimits,
    Floats,
    Ints,
    IterationState,
    Mode,
    ProgressColumns,
    RequestColumns,
    Snapshot,
    Step,
)

_ACTIVE = Mode.ACTIVE  # a look-up of an enum's member costs 0.2 us


class SimulatedEngine:
    """One engine core with its queues, KV blocks and clock.

    Args:
        feed: the requests.
        limits: token budget, sequences, KV blocks.
        timer: how long a batch takes.
        source: who decides; None: the engine's own policy. It must be open.
        cpu_seconds_per_iteration: added to every iteration.
        reserve_full_prompt: the engine's own policy admits only prompts that fit whole.
    """

    def __init__(
        self,
        feed: RequestFeed,
        limits: EngineLimits,
        timer: IterationTimer,
        source: DecisionSource | None = None,
        *,
        cpu_seconds_per_iteration: float = 0.0,
        reserve_full_prompt: bool = True,
    ) -> None:
        count = len(feed.arrival_seconds)
        self._feed, self._limits, self._timer, self._source = feed, limits, timer, source
        self._cpu_seconds = cpu_seconds_per_iteration
        self._reserve_full_prompt = reserve_full_prompt
        self._has_ttlt = bool(feed.ttlt_slo_seconds.any())
        self._requests: Table = np.zeros(count, REQUEST)
        for name, column in (
            ("prompt", feed.prompt_tokens),
            ("wanted", feed.output_tokens),
            ("arrival", feed.arrival_seconds),
            ("ttft", feed.ttft_slo_seconds),
            ("tbt", feed.tbt_slo_seconds),
            ("first", np.nan),
            ("last", np.nan),
            ("batch", -1),
        ):
            self._requests[name] = column
        self._handles: Ints = np.arange(count)
        self._arrivals: list[float] = [*feed.arrival_seconds.tolist(), math.inf]
        self._running: Ints = np.zeros(count, np.int64)
        self._waiting: Ints = np.zeros(3 * count + 1, np.int64)
        self._counts: Ints = np.zeros(COUNTS, np.int64)
        self._counts[[WAITING_START, WAITING_STOP, FREE_BLOCKS]] = (count, count, limits.kv_blocks)
        self._gaps: Floats = np.zeros(max(0, int(feed.output_tokens.sum()) - count), np.float64)
        self._rows, self._chunk, self._context = (np.zeros(limits.max_sequences, np.int64) for _ in range(3))
        self._finished: Ints = np.zeros(limits.max_sequences, np.int64)
        self._no_victims: Ints = np.zeros(0, np.int64)
        # Handed to the kernels as they are: to look up fifteen attributes costs as much as the kernel.
        self._queues = (self._requests, self._running, self._waiting, self._counts)
        self._bounds = (limits.max_tokens_per_iteration, limits.max_sequences, limits.kv_block_tokens)
        self._batch = (self._rows, self._chunk, self._context)
        self._loaded = (self._requests, self._running, self._counts, self._rows, self._chunk)
        self._model = timer.model if isinstance(timer, ProfileTimer) else None
        self._longest = limits.kv_blocks * limits.kv_block_tokens
        if limits.max_model_tokens:
            self._longest = min(self._longest, limits.max_model_tokens)
        self._next_arrival = 0
        self._told = 0  # requests that the source has been told of
        self._live = 0
        self._rejected = 0
        self._fallbacks = 0
        self._scheduled = 0
        self._loads = 0
        self._digest = AllocationDigest()
        self._newly_finished = NO_INTS
        self._applied: AppliedBatch | None = None
        self._applied_exactly = True
        self._last_seconds = 0.0
        self._ended_seconds = 0.0  # end of the last iteration; the clock may be further
        self._batch_rows = 0  # of the last iteration
        self.iterations = 0
        self.now_seconds = 0.0

    @property
    def live(self) -> int:
        """Requests that have arrived and are not finished."""
        return self._live

    @property
    def finished(self) -> int:
        """Requests that are finished or rejected."""
        return self._next_arrival - self._live

    def missed_deadlines(self) -> int:
        """Returns how many requests have missed a TTFT or TBT deadline by now, or wait past theirs. O(n)."""
        arrived = self._requests[: self._next_arrival]
        due = arrived["arrival"] + arrived["ttft"]
        overdue = np.isnan(arrived["first"]) & (arrived["ttft"] > 0) & (due < self.now_seconds)
        return int(np.count_nonzero(arrived["late"] | overdue))

    def last_batch_tokens(self) -> tuple[int, int]:
        """Returns the (prefill, decode) tokens of the last iteration; (0, 0) before the first. O(batch).

        A single token behind the prompt is a decode; what is computed anew after a preemption is prefill.
        """
        rows, chunk, context = (column[: self._batch_rows] for column in self._batch)
        decodes = int(np.count_nonzero((chunk == 1) & (context >= self._requests["prompt"][rows])))
        return int(chunk.sum()) - decodes, decodes

    def run(self) -> Outcome:
        """Runs until every request has finished."""
        while self.step():
            pass
        return self.outcome()

    def step(self) -> bool:
        """Runs one iteration; returns False when there is nothing left to do.

        Time: that of the decision, plus linear in the batch and in what arrives.
        """
        if self._arrivals[self._next_arrival] <= self.now_seconds:
            self._take_arrivals()
        if not self._live:
            return self._wait_for_arrival()
        allocation = self._answer()
        if allocation is None:
            count, preempted, as_planned = self._load_own()
        else:
            self._applied_exactly = True
            count, preempted, as_planned = self._load(
                allocation.handles, allocation.tokens, allocation.preempted_handles
            )
            self._digest.take(len(allocation.handles))
            if not count:  # nothing in the plan was possible, but its victims have lost their blocks
                count, further, as_planned = self._load_own()
                preempted = np.append(preempted, further)
        if not (as_planned and self._applied_exactly):
            self._applied_exactly = False
            self._applied = AppliedBatch(self._rows[:count].copy(), self._chunk[:count].copy(), preempted.copy())
        done = self._run(count)
        self._batch_rows = count
        if done:
            self._newly_finished = self._finished[:done].copy()
            self._live -= done
        self._scheduled += count
        self.iterations += 1
        return True

    def _run(self, count: int) -> int:
        """Lets the loaded batch take its time; returns how many requests it finished (`_finished` names them)."""
        if self._model is not None:
            seconds, done = run_batch(
                *self._loaded,
                self._context,
                count,
                self.now_seconds,
                self._cpu_seconds,
                self._model,
                self._gaps,
                self._finished,
            )
        else:
            seconds = self._timer.seconds(self._chunk, self._context, count) + self._cpu_seconds
            done = finish_batch(*self._loaded, count, self.now_seconds + seconds, self._gaps, self._finished)
        self._last_seconds = seconds
        self._ended_seconds = self.now_seconds = self.now_seconds + seconds
        return done

    def abort(self, handle: int) -> None:
        """Ends a request that has arrived, as a client that hangs up does; unknown or finished ones are ignored."""
        if not 0 <= handle < self._next_arrival or self._requests["state"][handle] not in (WAITING, RUNNING):
            return
        request = self._requests[handle]
        self._counts[FREE_BLOCKS] += request["blocks"]
        request["blocks"], request["state"] = 0, DONE
        running = self._running[: self._counts[RUNNING_COUNT]]
        kept = running[running != handle]
        self._running[: len(kept)] = kept
        self._counts[RUNNING_COUNT] = len(kept)
        start, stop = self._counts[[WAITING_START, WAITING_STOP]].tolist()
        waiting = self._waiting[start:stop]
        waiting = waiting[waiting != handle]
        self._waiting[start : start + len(waiting)] = waiting
        self._counts[WAITING_STOP] = start + len(waiting)
        if handle < self._told:
            self._newly_finished = np.append(self._newly_finished, handle)
        self._live -= 1

    def snapshot(self) -> Snapshot:
        """Returns everything that the engine holds, as it is told to a source that is out of step."""
        running = self._running[: self._counts[RUNNING_COUNT]]
        waiting = self._waiting[self._counts[WAITING_START] : self._counts[WAITING_STOP]]
        rows = np.concatenate([running, waiting])
        progress = ProgressColumns(
            NO_INTS, self._requests["computed"][rows], self._requests["generated"][rows].astype(np.int64)
        )
        return Snapshot(self._iteration(), self._columns(rows, self._feed.class_names), len(running), progress)

    def outcome(self) -> Outcome:
        """Returns what happened so far."""
        arrived = self._requests
        return Outcome(
            arrival_seconds=self._feed.arrival_seconds,
            first_token_seconds=arrived["first"].copy(),
            last_token_seconds=arrived["last"].copy(),
            output_tokens=arrived["generated"].copy(),
            deadline_missed=arrived["late"].copy(),
            gap_missed=arrived["gap_missed"].copy(),
            finished=(arrived["state"] == DONE) & (arrived["generated"] >= arrived["wanted"]),
            token_gaps=self._gaps[: self._counts[GAP_COUNT]].copy(),
            makespan_seconds=self._ended_seconds,
            iterations=self.iterations,
            scheduled_requests=self._scheduled,
            preemptions=int(self._counts[PREEMPTIONS]),
            rejected=self._rejected,
            fallbacks=self._fallbacks,
            allocation_digest=self._digest.hexdigest(),
        )

    def _wait_for_arrival(self) -> bool:
        """Lets time pass until somebody arrives; returns False if nobody will."""
        if self._next_arrival == len(self._requests):
            return False
        self.now_seconds = max(self.now_seconds, self._arrivals[self._next_arrival])
        return True

    def _take_arrivals(self) -> None:
        """Queues every request that has arrived by now; those that never fit are rejected."""
        first = self._next_arrival
        stop = self._next_arrival = bisect_right(self._arrivals, self.now_seconds, first)
        rejected = queue_arrivals(self._requests, self._waiting, self._counts, first, stop, self._longest)
        self._rejected += rejected
        self._live += stop - first - rejected

    def _answer(self) -> BatchAllocation | None:
        """Returns the source's allocation; None if there is none, or none to be obeyed."""
        if self._source is None:
            return None
        allocation = self._source.decide(self._message(), self.snapshot)
        if allocation is None or (allocation.mode is _ACTIVE and len(allocation.handles)):
            return allocation
        self._digest.add(allocation)
        return None

    def _load_own(self) -> tuple[int, Ints, bool]:
        """Puts the own policy's plan into the engine."""
        self._fallbacks += 1
        self._applied_exactly = False
        batch, preempt = schedule_own(*self._queues, *self._bounds, reserve_full_prompt=self._reserve_full_prompt)
        plan = np.array(batch, np.int64).reshape(-1, 2)
        return self._load(plan[:, 0].copy(), plan[:, 1].copy(), np.array(preempt, np.int64))

    def _load(self, handles: Ints, tokens: Ints, victims: Ints) -> tuple[int, Ints, bool]:
        """Puts a plan into the engine; returns the batch's size, who was preempted, and whether all was as planned."""
        victims = victims.copy() if len(victims) else self._no_victims
        if len(victims) and len(victims) > self._counts[WAITING_START]:
            self._recenter_waiting()
        self._digest.make_room(len(handles))
        self._loads += 1
        count, preempted, as_planned = load_batch(
            *self._queues,
            handles,
            tokens,
            victims,
            self._loads,
            *self._bounds,
            *self._batch,
            self._digest.words,
            self._digest.used,
            self.iterations,
        )
        return count, victims[:preempted] if preempted else victims[:0], as_planned

    def _message(self) -> Step:
        """Returns what changed since the last message."""
        arrived = self._new_arrivals() if self._told != self._next_arrival else None
        finished, applied = self._newly_finished, self._applied
        self._newly_finished, self._applied = NO_INTS, None
        return Step(self._iteration(), self._applied_exactly, applied, None, finished, arrived)

    def _new_arrivals(self) -> RequestColumns:
        first, stop = self._told, self._next_arrival
        self._told = stop
        names = self._feed.class_names if first == 0 else ()
        if self._rejected:
            rows = np.arange(first, stop)
            return self._columns(rows[self._requests["state"][rows] != DONE], names)
        return self._columns(slice(first, stop), names)

    def _columns(self, rows: Ints | slice, class_names: tuple[str, ...]) -> RequestColumns:
        feed = self._feed
        return RequestColumns(
            self._handles[rows],
            feed.arrival_seconds[rows],
            feed.prompt_tokens[rows],
            NO_INTS,
            feed.ttft_slo_seconds[rows],
            feed.tbt_slo_seconds[rows],
            feed.ttlt_slo_seconds[rows] if self._has_ttlt else NO_FLOATS,
            NO_INTS,
            feed.class_index[rows] if feed.class_names else NO_INTS,
            class_names=class_names,
        )

    def _iteration(self) -> IterationState:
        return IterationState(0, self.iterations, self.now_seconds, self._counts.item(FREE_BLOCKS), self._last_seconds)

    def _recenter_waiting(self) -> None:
        """Moves the waiting queue back to the middle of its array, so that there is room before it."""
        start, stop = int(self._counts[WAITING_START]), int(self._counts[WAITING_STOP])
        middle = len(self._requests)
        self._waiting[middle : middle + stop - start] = self._waiting[start:stop].copy()
        self._counts[[WAITING_START, WAITING_STOP]] = (middle, middle + stop - start)
