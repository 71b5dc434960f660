"""The recent throughput, and what else a policy remembers of iterations that it has planned."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from predictor.counters import ErrorCounters
from predictor.features import Scenario
from slidingserve.contract.values import IterationState

_DECODE, _PREFILL, _MIXED = Scenario  # a look-up of an enum's member costs 0.2 us


class Planned(NamedTuple):
    """One iteration as it was planned: tokens of all, tokens of prompts (chunks of more than one), predicted time."""

    step: int
    tokens: float
    prompt_tokens: float
    predicted_seconds: float

    @property
    def scenario(self) -> Scenario:
        """What it holds."""
        if self.prompt_tokens <= 0.0:
            return _DECODE
        return _PREFILL if self.prompt_tokens >= self.tokens else _MIXED


class Estimate(Protocol):
    """An estimate of the tokens per second that are computed."""

    tokens_per_second: float

    def add(self, planned: Planned, seconds: float) -> None:
        """Counts an iteration that took ``seconds``."""


class Throughput:
    """Tokens per second over the last ``window`` measured iterations; O(1) for each.

    Args:
        window: iterations.
        initial: tokens per second until something has been measured.
        prefill_only: counts prompt tokens, and only iterations that had any.
    """

    def __init__(self, window: int, initial: float, prefill_only: bool) -> None:
        self.tokens_per_second = initial
        self._window = window
        self._prefill_only = prefill_only
        self._measured: deque[tuple[float, float]] = deque()
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, planned: Planned, seconds: float) -> None:
        """Counts an iteration that took ``seconds``."""
        tokens = planned.prompt_tokens if self._prefill_only else planned.tokens
        if tokens <= 0.0 or not seconds > 0.0:
            return
        self._measured.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        if len(self._measured) > self._window:
            old_tokens, old_seconds = self._measured.popleft()
            self._tokens -= old_tokens
            self._seconds = max(self._seconds - old_seconds, 1e-9)
        self.tokens_per_second = self._tokens / self._seconds


class MovingThroughput:
    """Prompt tokens per second, averaged exponentially over the iterations that had any.

    Args:
        decay: what an iteration leaves of the average before it.
        initial: tokens per second until something has been measured.
    """

    def __init__(self, decay: float, initial: float) -> None:
        self.tokens_per_second = initial
        self._decay = decay

    def add(self, planned: Planned, seconds: float) -> None:
        """Counts an iteration that took ``seconds``."""
        if planned.prompt_tokens > 0.0 and seconds > 0.0:
            measured = planned.prompt_tokens / seconds
            self.tokens_per_second = self._decay * self.tokens_per_second + (1.0 - self._decay) * measured


class Memory:
    """Matches measured durations with the iterations that were planned.

    A duration belongs to the last finished iteration: the one before this, or one earlier for each that is still in
    flight. It counts only if the engine executed that plan to the letter.

    Attributes:
        errors: how far predictions were off.
        throughput: see `Estimate`.
    """

    _KEPT = 8

    def __init__(self, throughput: Estimate) -> None:
        self.errors = ErrorCounters()
        self.throughput = throughput
        self._planned: deque[Planned] = deque(maxlen=self._KEPT)

    def plan(self, planned: Planned) -> None:
        """Remembers a plan."""
        self._planned.append(planned)

    def take(self, iteration: IterationState, executed: bool) -> None:
        """Takes what an iteration's state says of those before it; ``executed``: see `Plan`."""
        self.follow(iteration.step, executed)
        if iteration.last_iteration_seconds > 0.0 and not iteration.last_iteration_censored:
            self.measure(iteration.step - 1 - iteration.pipeline_depth, iteration.last_iteration_seconds)

    def follow(self, step: int, executed: bool) -> None:
        """Says that ``step`` is next, and whether the engine executed the plan of the step before to the letter.

        Where the policy was not asked in between, nobody knows what became of its last plan, and after a snapshot steps
        may be numbered anew: everything is forgotten.
        """
        if self._planned and self._planned[-1].step != step - 1:
            self._planned.clear()
        elif self._planned and not executed:
            self._planned.pop()

    def measure(self, step: int, seconds: float) -> None:
        """Takes the duration of an iteration, once; ignored if its plan is not known (any more)."""
        for place, planned in enumerate(self._planned):
            if planned.step == step:
                del self._planned[place]
                self.throughput.add(planned, seconds)
                self.errors.add(planned.scenario, planned.predicted_seconds, seconds)
                return
