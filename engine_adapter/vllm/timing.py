"""How long iterations take, measured from outside: from where vLLM launches one to where its result is taken in.

Without async scheduling that is the time from the return of ``schedule`` to the entry of ``update_from_output``. With
it, iteration N+1 is launched while N runs and begins when N ends, so its time counts from there. Where the result had
been waiting when the engine's loop came for it, the measured time is only an upper bound: the sample is censored.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

LONGEST_DISPATCH_SECONDS = 1e-3
"""What handing a batch to the workers takes at most; waits beyond are real ones."""
_DISPATCH_MARGIN_SECONDS = 1e-4
_DISPATCH_STRETCH = 1.5
_SMOOTHING = 0.1


class Sample(NamedTuple):
    """One measured iteration.

    Attributes:
        step: number of the message that asked for it; -1: nobody was asked.
        seconds: how long it took.
        censored: it took no longer than that.
    """

    step: int
    seconds: float
    censored: bool


class _Launched(NamedTuple):
    output: Any
    step: int
    seconds: float
    predicted_seconds: float
    tokens: int


class IterationTimes:
    """Measures iterations of one engine core; all times are seconds on the caller's clock.

    Args:
        warmup_iterations: first iterations that are not reported: kernels are compiled in them.
    """

    def __init__(self, warmup_iterations: int) -> None:
        self._left_to_warm = warmup_iterations
        self._in_flight: deque[_Launched] = deque()
        self._ended_seconds = 0.0
        self._launched_seconds = 0.0
        self._shortest_wait_seconds = LONGEST_DISPATCH_SECONDS
        self._typical_seconds = 0.0
        self._sample: Sample | None = None

    @property
    def in_flight(self) -> int:
        """Iterations that are launched and not taken in."""
        return len(self._in_flight)

    @property
    def typical_seconds(self) -> float:
        """What iterations took lately; 0: unknown."""
        return self._typical_seconds

    def launched(self, output: Any, tokens: int, step: int, predicted_seconds: float, now_seconds: float) -> None:
        """Says that a batch was handed to vLLM as ``output``, which names it when its result comes."""
        self._launched_seconds = now_seconds
        self._in_flight.append(_Launched(output, step, now_seconds, predicted_seconds, tokens))

    def finished(self, output: Any, now_seconds: float) -> None:
        """Says that the result of a batch is there. Results come in the order in which batches were launched."""
        overlapped = len(self._in_flight) > 1
        batch = None
        while self._in_flight and (batch is None or batch.output is not output):
            batch = self._in_flight.popleft()
        if batch is None or batch.output is not output:
            return
        seconds = now_seconds - max(batch.seconds, self._ended_seconds)
        self._ended_seconds = now_seconds
        if batch.tokens == 0 or seconds <= 0.0:
            return
        censored = overlapped and self._was_waiting(now_seconds - self._launched_seconds)
        if self._left_to_warm > 0:
            self._left_to_warm -= 1
            return
        self._sample = Sample(batch.step, seconds, censored)
        if not censored:
            weight = _SMOOTHING if self._typical_seconds else 1.0
            self._typical_seconds += weight * (seconds - self._typical_seconds)

    def take(self) -> Sample | None:
        """Returns the last finished iteration, once."""
        sample, self._sample = self._sample, None
        return sample

    def expected_end_seconds(self, now_seconds: float) -> float:
        """Returns when all that is launched will have ended, at the earliest now. Linear in the iterations in flight.

        By the predictions that came with the plans, else by what iterations took lately.
        """
        end = self._ended_seconds
        for batch in self._in_flight:
            if batch.tokens:
                end = max(end, batch.seconds) + (batch.predicted_seconds or self._typical_seconds)
        return max(end, now_seconds)

    def _was_waiting(self, wait_seconds: float) -> bool:
        """Says whether a result that was taken in so soon after the last launch had been there before.

        The least such wait is what handing a batch over takes by itself; it is learned.
        """
        self._shortest_wait_seconds = min(self._shortest_wait_seconds, wait_seconds)
        bound = _DISPATCH_STRETCH * self._shortest_wait_seconds + _DISPATCH_MARGIN_SECONDS
        return wait_seconds <= min(bound, LONGEST_DISPATCH_SECONDS)
