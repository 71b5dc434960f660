"""Policies from outside: one that behaves, and one that says whatever comes to its mind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import sidecar.policies.vllm  # noqa: F401 - registers itself before the registry is set aside
from sidecar.policies import registry
from sidecar.policies.base import Plan, PolicyContext
from sidecar.queues import Queues
from slidingserve.contract.values import IterationState


@dataclass(frozen=True, slots=True)
class NoParameters:
    """Has none."""


@dataclass(frozen=True, slots=True)
class WildParameters:
    """Seed of the nonsense, and after how many decisions it ends."""

    seed: int = 0
    decisions: int = 40


class ToyPolicy:
    """Decides by a function."""

    model_version = ""

    def __init__(self, version: str, function: Callable[[Queues, IterationState, Plan], None]) -> None:
        self.version = version
        self._function = function

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        self._function(queues, iteration, plan)


def shortest_first(queues: Queues, iteration: IterationState, plan: Plan) -> None:
    """Running requests in order, then the waiting ones by prompt length; asks for all that each misses."""
    plan.path = "shortest"
    order = queues.waiting_slots
    waiting = order[np.argsort(queues.requests["prompt"][order], kind="stable")]
    if not iteration.may_admit:
        waiting = waiting[:0]
    for slot in [*queues.running_slots.tolist(), *waiting.tolist()]:
        missing = int(queues.requests["target"][slot] - queues.requests["computed"][slot])
        plan.entries[plan.count] = (slot, missing)
        plan.count += 1
    if len(queues.running_slots) and iteration.free_kv_blocks == 0:
        plan.victims[0] = queues.running_slots[-1]
        plan.victim_count = 1


class WildPolicy:
    """Nonsense for some decisions, then first come, first served without a thought for any limit."""

    version, model_version = "wild/1", ""

    def __init__(self, parameters: WildParameters, context: PolicyContext) -> None:
        self._rng = np.random.default_rng(parameters.seed)
        self._left = parameters.decisions

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        self._left -= 1
        if self._left < 0:
            shortest_first(queues, iteration, plan)
            return
        rng = self._rng
        everyone = np.concatenate([queues.running_slots, queues.waiting_slots])
        nowhere = [-1, -(2**62), queues.capacity, 2**62, int(rng.integers(queues.capacity))]
        slots = rng.choice(np.concatenate([everyone, everyone, nowhere]), size=int(rng.integers(0, 12)))
        for slot in slots.tolist():
            tokens = int(rng.choice([-(2**63), -1, 0, 1, 2, 7, 1000, 2**63 - 1]))
            plan.entries[plan.count] = (slot, tokens)
            plan.count += 1
        mood = rng.integers(4)
        chosen = queues.running_slots if mood == 0 else rng.choice(np.append(everyone, nowhere), size=3)
        if mood < 2:
            plan.victim_count = len(chosen)
            plan.victims[: len(chosen)] = chosen
        if rng.integers(2):
            plan.demoted_count = 3
            plan.demoted[:3] = rng.choice(np.append(everyone, nowhere), size=3)
        if rng.integers(8) == 0:
            plan.count = int(rng.choice([-1, 10**9]))
        if rng.integers(8) == 0:
            plan.victim_count = int(rng.choice([-1, 10**9]))


def install(name: str, function: Callable[[Queues, IterationState, Plan], None]) -> None:
    """Registers a policy that decides by a function."""

    def build(parameters: Any, context: PolicyContext) -> ToyPolicy:
        return ToyPolicy(f"{name}/1", function)

    registry.register(name, NoParameters, build, "a toy")


@contextmanager
def toys() -> Iterator[None]:
    """The toys `shortest` and `wild` are registered; whatever is registered inside is forgotten outside."""
    registry.registrations()  # else a built-in policy that is first used inside would be forgotten for good
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
        install("shortest", shortest_first)
        registry.register("wild", WildParameters, WildPolicy, "a toy")
        yield
