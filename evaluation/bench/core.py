"""The decision core alone, in this process, phase by phase, on fixed states (see `states`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.bench.states import (
    BenchFailed,
    Rewinder,
    Scene,
    decoding_scene,
    engine_limits,
    prompts_scene,
    risky_scene,
)
from evaluation.results import Tail, tail
from slidingserve.contract.values import OpenSession

State = Literal["decodes", "prompts", "turnover", "risk"]
STATES: dict[State, str] = {
    "decodes": "all decode",
    "prompts": "half prompts",
    "turnover": "half, 1 new, 1 gone",
    "risk": "half, 8 at risk",
}
"""What there is to decide on, for the reader."""
WARM_UP = 20
_DECODE_SLACK = 0.04  # seconds; leaves the chunker something to choose


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """One state decided again and again; seconds.

    Attributes:
        label: the policy, or what is different from the one asked for.
        state: a key of `STATES`.
        path: how the policy says that it decided.
        requests: live ones.
        decisions: how many were timed.
        batch: requests that got tokens.
        mirror: taking the engine's message in.
        policy: deciding.
        guard: checking the plan against the limits.
        core: all three.
    """

    label: str
    state: State
    path: str
    requests: int
    decisions: int
    batch: int
    mirror: Tail
    policy: Tail
    guard: Tail
    core: Tail


def measure_core(
    policy: str,
    parameters: Mapping[str, str],
    profile: str,
    sizes: tuple[int, ...],
    decisions: int,
    progress: Callable[[str], None],
) -> Iterator[DecisionCost]:
    """Yields the cost of each state and size; for SlidingServe also in mode `paper`, with a tenth of the decisions.

    Raises:
        BenchFailed: the policy cannot be had, or fails.
    """
    first = dict(parameters)
    variants = [(policy, first, decisions)]
    if policy == "slidingserve" and "mode" not in parameters:
        variants.append(("mode=paper", {**parameters, "mode": "paper"}, max(decisions // 10, 10)))
    for label, own, count in variants:
        for requests in sizes:
            opening = OpenSession(engine_limits(requests), policy=policy, policy_parameters=own, profile=profile)
            for state, scene in scenes(opening, requests):
                if state == "turnover" and own is not first:
                    continue  # what arrives and finishes is the mirror's work, whatever the mode
                progress(f"decision core: {label}, {requests} requests, {STATES[state]}")
                yield measure_scene(label, state, scene, opening, requests, count)


def measure_scene(
    label: str, state: State, scene: Scene, opening: OpenSession, requests: int, decisions: int
) -> DecisionCost:
    """Times the decision of one scene; its path must be the same each time."""
    rewinder = Rewinder(opening)
    seconds = np.zeros((decisions, 3))
    paths = set()
    batch = 0
    for number in range(-WARM_UP, decisions):
        rewinder.rewind(scene)
        answer = rewinder.decide(scene)
        timings = answer.phase_timings
        if number >= 0 and timings is not None:
            seconds[number] = timings.mirror_seconds, timings.policy_seconds, timings.guard_seconds
            paths.add(answer.decision_path)
            batch = len(answer.handles)
    if len(paths) != 1:
        raise BenchFailed(f"policy {label!r} decided the same state by different paths: {', '.join(sorted(paths))}")
    mirror, policy, guard = (tail(column) for column in seconds.T)
    core = tail(seconds.sum(axis=1))
    return DecisionCost(label, state, paths.pop(), requests, decisions, batch, mirror, policy, guard, core)


def scenes(opening: OpenSession, requests: int) -> Iterator[tuple[State, Scene]]:
    """Yields every state at one size."""
    yield "decodes", decoding_scene(requests)
    yield "prompts", prompts_scene(requests, _DECODE_SLACK)
    yield "turnover", prompts_scene(requests, _DECODE_SLACK, turnover=True)
    yield "risk", risky_scene(requests, Rewinder(opening))
