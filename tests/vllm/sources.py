"""Who decides in these tests, in place of a sidecar: a function, or the sidecar's own session without its gRPC.

Both keep to the client's rules: a snapshot is asked for where the step does not follow, and after every answer that did
not reach the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from engine_adapter.source import DecisionSource
from engine_adapter.vllm import build_scheduler
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import (
    NO_INTS,
    BatchAllocation,
    IterationState,
    OpenSession,
    RequestColumns,
    SessionOpened,
    Snapshot,
    Step,
)
from tests.vllm.scheduler_objects import EngineLoop, Setup, make_scheduler

WantedPlan: TypeAlias = Sequence[tuple[str, int]] | None
"""Request ids with their tokens, in order; None: no answer."""


class Clock:
    """The adapter's clock, in seconds; stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def tick(self, seconds: float = 0.01) -> None:
        """Lets time pass."""
        self.seconds += seconds


class Source:
    """A `DecisionSource` that learns from its messages who is there.

    Attributes:
        handles: handle of each live request that it was told of, by request id.
        messages: all that it was told, in order: steps, and snapshots where the step did not do.
        gaps: how many of the snapshots were due to the engine, and not to a missing answer.
        closed: how often it was closed.
        look: called when an answer is about to reach the engine; with True if it was asked for ahead, so that the
            engine has gone on since.
    """

    def __init__(self) -> None:
        self.opening: OpenSession | None = None
        self.handles: dict[str, int] = {}
        self.messages: list[Step | Snapshot] = []
        self.gaps = 0
        self.closed = 0
        self.look: Callable[[bool], None] = lambda ahead: None
        self._next_step: int | None = 0
        self._epoch = 0

    def open(self, message: OpenSession) -> SessionOpened:
        self.opening = message
        answer = Session("test").handle(message)
        assert isinstance(answer, SessionOpened)
        return answer

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        answer = self.ask(step, snapshot)
        self.look(False)
        return answer

    def ask(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """Decides, now or ahead."""
        message = self._take_in(step, snapshot)
        answer = self.answer(message)
        self._next_step = None if answer is None else message.iteration.step + 1
        return answer

    def close(self) -> None:
        self.closed += 1

    def answer(self, message: Step | Snapshot) -> BatchAllocation | None:
        """Returns the answer to one message, which `handles` already holds; None: there is none."""
        raise NotImplementedError

    def _take_in(self, step: Step, snapshot: Callable[[], Snapshot]) -> Step | Snapshot:
        message: Step | Snapshot
        if step.iteration.step == self._next_step:
            message = step._replace(iteration=step.iteration._replace(epoch=self._epoch))
            by_handle = {handle: name for name, handle in self.handles.items()}
            for handle in step.finished_handles.tolist():
                del self.handles[by_handle[handle]]
            if step.arrived is not None:
                self._learn(step.arrived)
        else:
            self.gaps += self._next_step is not None
            self._epoch += 1
            full = snapshot()
            assert full.iteration.step == step.iteration.step
            message = full._replace(iteration=full.iteration._replace(epoch=self._epoch))
            self.handles.clear()
            self._learn(full.requests)
        self.messages.append(message)
        return message

    def _learn(self, requests: RequestColumns) -> None:
        self.handles.update(zip(requests.request_ids, requests.handles.tolist(), strict=True))


class FunctionSource(Source):
    """Decides by a function of itself and the iteration's state; ids that it was not told of get handles of nobody."""

    def __init__(
        self,
        function: Callable[[FunctionSource, IterationState], WantedPlan],
        *,
        victims: Callable[[FunctionSource], Sequence[str]] = lambda source: (),
        predicted_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self._function = function
        self._victims = victims
        self._predicted_seconds = predicted_seconds
        self.asked = 0

    def answer(self, message: Step | Snapshot) -> BatchAllocation | None:
        self.asked += 1
        plan = self._function(self, message.iteration)
        if plan is None:
            return None
        return BatchAllocation(
            message.iteration.epoch,
            message.iteration.step,
            self._handles_of([name for name, _ in plan]),
            np.array([tokens for _, tokens in plan], np.int64),
            self._handles_of(self._victims(self)),
            predicted_seconds=self._predicted_seconds,
        )

    def _handles_of(self, names: Sequence[str]) -> Any:
        if not names:
            return NO_INTS
        return np.array([self.handles.get(name, 900_000_000 + place) for place, name in enumerate(names)], np.int64)


class SessionSource(Source):
    """The sidecar's own session; some of its answers may be withheld.

    Args:
        policy: name of its policy.
        parameters: settings of the policy, as text.
        build_policy: makes the policy instead of the registry.
        withhold: says of each answer whether it gets lost on its way.

    Attributes:
        session: the session.
        allocations: all answers, whether they reached the engine or not.
    """

    def __init__(
        self,
        policy: str = "vllm",
        parameters: dict[str, str] | None = None,
        *,
        build_policy: Any = None,
        withhold: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        defaults = SessionDefaults(policy, parameters or {})
        self.session = Session("test", defaults, **({"build_policy": build_policy} if build_policy else {}))
        self.allocations: list[BatchAllocation] = []
        self._withhold = withhold

    def open(self, message: OpenSession) -> SessionOpened:
        self.opening = message
        answer = self.session.handle(message)
        assert isinstance(answer, SessionOpened), answer
        return answer

    def answer(self, message: Step | Snapshot) -> BatchAllocation | None:
        answer = self.session.handle(message)
        assert isinstance(answer, BatchAllocation), f"the session refuses: {answer}"
        self.allocations.append(answer)
        return None if self._withhold() else answer


class Prefetching:
    """Lets a source be asked for the next iteration while this one runs, as the client can be."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._answer: BatchAllocation | None = None

    def open(self, message: OpenSession) -> SessionOpened:
        return self._source.open(message)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        return self._source.decide(step, snapshot)

    def close(self) -> None:
        self._source.close()

    def send(self, step: Step, snapshot: Callable[[], Snapshot]) -> bool:
        self._answer = self._source.ask(step, snapshot)
        return True

    def take(self, wait_seconds: float) -> BatchAllocation | None:
        self._source.look(True)
        return self._answer


def advised_loop(
    setup: Setup,
    source: Source,
    *,
    prefetch: bool = False,
    clock: Clock | None = None,
    step_seconds: float = 0.01,
    **settings: Any,
) -> EngineLoop:
    """Returns an engine's loop around vLLM's scheduler with our adapter, which asks ``source``.

    Args:
        setup: vLLM's part.
        source: who decides.
        prefetch: whether the adapter may ask ahead.
        clock: the adapter's.
        step_seconds: how long each turn of the loop takes on that clock.
        settings: the adapter's settings, as in ``--additional-config``.
    """
    clock = clock or Clock()
    chosen: DecisionSource = Prefetching(source) if prefetch else source

    def connect(settings: Any, opening: OpenSession) -> DecisionSource:
        chosen.open(opening)
        return chosen

    config = {"slidingserve": {"warmup_iterations": 0, **settings}}
    setup = Setup(**{**{name: getattr(setup, name) for name in setup.__slots__}, "additional_config": config})
    scheduler = make_scheduler(setup, partial(build_scheduler, connect=connect, clock=clock))
    assert type(scheduler).__name__.startswith("Advised"), "the adapter has left vLLM alone; its log says why"
    return EngineLoop(scheduler, asynchronous=setup.asynchronous, before_step=partial(clock.tick, step_seconds))


def is_advised(source: Source) -> bool:
    """Returns whether the adapter is still at work: after any error of its own it closes the source for good."""
    return not source.closed
