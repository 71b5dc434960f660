"""What the tests of the rival policies share: requests in an engine's queues, and what a policy decides over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from predictor.model import LatencyModel, linear_model
from sidecar.policies import registry
from sidecar.policies.base import Plan, Policy, PolicyContext
from sidecar.policies.qoserve.parameters import QoServeParameters
from sidecar.policies.qoserve.policy import QoServePolicy
from sidecar.policies.slidingserve_relegation import RelegationParameters, RelegationPolicy
from sidecar.queues import REQUEST, RUNNING, WAITING, Queues
from slidingserve.contract.values import EngineLimits, IterationState

LIMITS = EngineLimits(max_tokens_per_iteration=4096, max_sequences=256, kv_blocks=10_000, kv_block_tokens=16)
NOW = 1000.0


class Req(NamedTuple):
    """One request; tokens, and seconds. ``age``: how long ago it arrived. It runs if it has computed something."""

    prompt: int
    computed: int = 0
    output: int = 0
    age: float = 0.0
    ttft: float = 1.0
    tbt: float = 0.05
    ttlt: float = 0.0
    priority: int = 0
    class_index: int = 0
    max_output: int = 0
    running: bool | None = None

    @property
    def runs(self) -> bool:
        return self.computed > 0 if self.running is None else self.running


def decode(context: int = 100, slack: float = 1.0, output: int = 5, **more: Any) -> Req:
    """A decode whose next token is due in ``slack`` seconds."""
    tbt = more.pop("tbt", 0.05)
    return Req(context + 1 - output, context, output, 1.0 + output * tbt - slack, 1.0, tbt, **more)


def due(missing: int, slack: float, context: int = 0, ttft: float = 10.0, **more: Any) -> Req:
    """A prompt that misses so many tokens and whose first token is due in ``slack`` seconds."""
    return Req(missing + context, context, 0, ttft - slack, ttft, **more)


class Decision(NamedTuple):
    """Requests by their handle; tokens in the order of the plan."""

    tokens: dict[int, int]
    victims: list[int]
    demoted: set[int]
    path: str
    predicted_seconds: float


class World:
    """An engine's queues, which tests change by hand; the handle of a request is its place in the list."""

    def __init__(self, requests: Sequence[Req], limits: EngineLimits = LIMITS) -> None:
        self.limits = limits
        self.queues = Queues()
        self.step = 0
        self._next = len(requests)
        order = sorted(range(len(requests)), key=lambda i: not requests[i].runs)
        self._place(order, [requests[i] for i in order])

    def add(self, *requests: Req) -> None:
        """Requests that arrive."""
        self._place(range(self._next, self._next + len(requests)), requests)
        self._next += len(requests)

    def _place(self, handles: Sequence[int], requests: Sequence[Req]) -> None:
        rows = np.zeros(len(requests), REQUEST)
        for row, handle, request in zip(rows, handles, requests, strict=True):
            row["handle"], row["state"] = handle, RUNNING if request.runs else WAITING
            row["prompt"], row["output"], row["computed"] = request.prompt, request.output, request.computed
            row["target"] = request.prompt + request.output
            row["blocks"] = -(-request.computed // self.limits.kv_block_tokens) if request.runs else 0
            row["arrival"], row["weight"] = NOW - request.age, 1.0
            for name in ("ttft", "tbt", "ttlt", "priority", "class_index", "max_output"):
                row[name] = getattr(request, name)
        if len(rows):
            self.queues.add(rows)

    def end(self, handle: int) -> None:
        """A request is gone."""
        self.queues.remove(np.array([handle]), [self.queues.slot(handle)])

    def set(self, handle: int, **values: Any) -> None:
        """Columns of a request."""
        for name, value in values.items():
            self.queues.requests[self.queues.slot(handle)][name] = value

    def decide(self, policy: Policy, free: int | None = None, executed: bool = False, **iteration: Any) -> Decision:
        """The next decision; ``iteration`` changes fields of the iteration's state."""
        held = int(self.queues.requests["blocks"].sum())
        state = IterationState(1, self.step, NOW, self.limits.kv_blocks - held if free is None else free)
        plan = Plan(self.queues.capacity)
        plan.executed = executed
        policy.decide(self.queues, state._replace(**iteration), plan)
        self.step += 1
        handles = self.queues.requests["handle"]
        entries = plan.entries[: plan.count]
        tokens = list(zip(handles[entries["slot"]].tolist(), entries["tokens"].tolist(), strict=True))
        assert len(tokens) == len(dict(tokens)), "no request twice"
        return Decision(
            dict(tokens),
            handles[plan.victims[: plan.victim_count]].tolist(),
            set(handles[plan.demoted[: plan.demoted_count]].tolist()),
            plan.path,
            plan.predicted_seconds,
        )


def made(name: str, limits: EngineLimits = LIMITS, **parameters: Any) -> Policy:
    """A policy that needs no model."""
    texts = {key: str(value).lower() for key, value in parameters.items()}
    return registry.build(name, texts, PolicyContext(limits))


def per_token(seconds: float = 0.001, intercept: float = 0.0) -> LatencyModel:
    """T = intercept + seconds x tokens, for all kinds of iterations."""
    return linear_model("none", intercept, decodes=seconds, prefill_tokens=seconds)


def qoserve(model: LatencyModel | None = None, limits: EngineLimits = LIMITS, **parameters: Any) -> QoServePolicy:
    """QoServe by a model of its own (1 ms per token); None with the artifact's constants."""
    chosen = QoServeParameters(**parameters)
    if chosen.constants == "paper" and model is None:
        model = per_token()
    return QoServePolicy(chosen, PolicyContext(limits), model)


def with_relegation(model: LatencyModel, limits: EngineLimits = LIMITS, **parameters: Any) -> RelegationPolicy:
    """SlidingServe with relegation by a model of its own."""
    return RelegationPolicy(RelegationParameters(**parameters), PolicyContext(limits), model)


def served(policy: Policy, requests: Sequence[Req], limits: EngineLimits = LIMITS, **how: Any) -> dict[int, int]:
    """Tokens of a first decision, by place in the list."""
    return World(requests, limits).decide(policy, **how).tokens
