"""When the tokens of an iteration came, from what the engine's messages tell.

A message that is sent between two iterations tells it by its own time: the iteration before has just ended. If that one
left the engine without requests, the engine may have slept since; then the iteration ended at the time of the message
before plus its duration.

An engine that asks ahead (`IterationState.pipeline_depth` above 0) sends its message while the iteration runs, with the
time at which it expects it to end: by the prediction that came with the plan, or, where it does not go by plan, by what
iterations took lately. How long it really took comes with one of the next messages; the difference corrects the time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slidingserve.contract.values import BatchAllocation, Ints, IterationState, Mode

_LONGEST_WAIT = 8
"""Messages after which nobody says any more how long an iteration took."""

_SMOOTHING = 0.1
"""Weight of the latest duration in what iterations took lately, as the adapter in vLLM has it."""


class TokenBatch(NamedTuple):
    """The tokens of one iteration: request ``rows[i]`` got those after the first ``before[i]``, up to ``tokens[i]``."""

    rows: Ints
    before: Ints
    tokens: Ints


class Timed(NamedTuple):
    """A batch and the time on the engine's clock at which its tokens came."""

    batch: TokenBatch
    seconds: float


class _Running(NamedTuple):
    step: int
    batch: TokenBatch
    expected_seconds: float  # when it is expected to end
    duration_seconds: float  # how long it was expected to take


class TokenClock:
    """Dates the batches of one session, in their order."""

    def __init__(self) -> None:
        self._running: deque[_Running] = deque()
        self._durations: dict[int, float] = {}
        self._overheads = array("d")
        self._typical_seconds = 0.0
        self._now_seconds = 0.0
        self._ended_seconds = 0.0
        self._ended_step = -2

    @property
    def overhead_seconds(self) -> float:
        """Time from one iteration's end to the next one's start, the median; 0: unknown, or they overlap."""
        return max(0.0, float(np.median(self._overheads))) if self._overheads else 0.0

    def take(
        self, iteration: IterationState, batch: TokenBatch, answer: BatchAllocation | None, *, stays: bool
    ) -> Iterator[Timed]:
        """Yields the batches whose time is known with this message.

        Args:
            iteration: of the message.
            batch: of the iteration that the message tells of.
            answer: the decision for that iteration; None: there was none.
            stays: whether the engine had requests left after it.
        """
        number, now = iteration.step - 1, iteration.now_seconds
        duration, depth = iteration.last_iteration_seconds, iteration.pipeline_depth
        if duration > 0.0:
            if not iteration.last_iteration_censored:
                weight = _SMOOTHING if self._typical_seconds else 1.0
                self._typical_seconds += weight * (duration - self._typical_seconds)
            if depth and self._running and number - depth >= self._running[0].step:
                self._durations[number - depth] = duration
        expected = self._typical_seconds
        if not depth:
            yield from self.rest()
            if stays and duration > 0.0:
                self._overheads.append(now - self._now_seconds - duration)
            seconds = now if stays or duration <= 0.0 else min(now, self._now_seconds + duration)
            yield Timed(batch, self._end(number, seconds))
        elif len(batch.rows):
            if answer is not None and answer.mode is Mode.ACTIVE and len(answer.handles):
                expected = answer.predicted_seconds or expected
            self._running.append(_Running(number, batch, now, expected))
        yield from self._known(number)
        self._now_seconds = now

    def rest(self) -> Iterator[Timed]:
        """Yields what is left, as well as it can be dated."""
        while self._running:
            yield self._timed(self._running.popleft())
        self._durations.clear()

    def _known(self, number: int) -> Iterator[Timed]:
        while self._running:
            oldest = self._running[0].step
            if oldest not in self._durations and oldest > number - _LONGEST_WAIT:
                return
            yield self._timed(self._running.popleft())

    def _timed(self, running: _Running) -> Timed:
        duration = self._durations.pop(running.step, None)
        if duration is None:
            return Timed(running.batch, self._end(running.step, running.expected_seconds))
        seconds = running.expected_seconds + duration - running.duration_seconds
        if self._ended_step == running.step - 1:
            self._overheads.append(seconds - duration - self._ended_seconds)
        return Timed(running.batch, self._end(running.step, seconds))

    def _end(self, step: int, seconds: float) -> float:
        """Notes when an iteration ended; none ends before the one before it."""
        self._ended_step, self._ended_seconds = step, max(self._ended_seconds, seconds)
        return self._ended_seconds
