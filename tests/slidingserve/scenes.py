"""Scenes for the policy's tests: a few requests, a model, a decision, without session or engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from predictor.model import LatencyModel, linear_model
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.queues import REQUEST, RUNNING, WAITING, Queues
from slidingserve.contract.values import EngineLimits, IterationState

LIMITS = EngineLimits(max_tokens_per_iteration=4096, max_sequences=256, kv_blocks=100_000, kv_block_tokens=16)


class Request(NamedTuple):
    """One request; times in seconds, lengths in tokens. One that has computed something, or has output, runs."""

    prompt: int
    slack: float = 10.0
    computed: int = 0
    output: int = 0
    tbt: float = 0.05
    priority: int = 0
    running: bool | None = None
    ttlt: float = 0.0
    speculative: int = 0

    @property
    def runs(self) -> bool:
        return self.computed > 0 if self.running is None else self.running


def decoding(slack: float = 0.05, context: int = 100, tbt: float = 0.05, output: int = 3) -> Request:
    """A decode whose next token is due in ``slack`` seconds."""
    return Request(context + 1 - output, slack, context, output, tbt)


def prompt(missing: int, slack: float = 10.0, context: int = 0, **more: Any) -> Request:
    """A prompt that misses ``missing`` tokens, with ``context`` in the KV cache (then it runs)."""
    return Request(missing + context, slack, context, **more)


class Decision(NamedTuple):
    """What came out, requests by their place in the list: tokens of each that got any, in the order of the plan."""

    tokens: dict[int, int]
    victims: list[int]
    demoted: list[int]
    path: str
    predicted_seconds: float

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


@dataclass
class Scene:
    """Requests in an engine whose clock shows 100 s; running ones in their order, then waiting ones in theirs."""

    requests: Sequence[Request]
    limits: EngineLimits = LIMITS
    free_kv_blocks: int | None = None
    now_seconds: float = 100.0

    def queues(self) -> Queues:
        """The mirror; a request's handle is its place in the list."""
        queues = Queues()
        order = sorted(range(len(self.requests)), key=lambda i: not self.requests[i].runs)
        rows = np.zeros(len(order), REQUEST)
        for row, handle in zip(rows, order, strict=True):
            request = self.requests[handle]
            row["handle"] = handle
            row["state"] = RUNNING if request.runs else WAITING
            row["prompt"], row["output"] = request.prompt, request.output
            row["target"] = request.prompt + request.output
            row["computed"] = request.computed
            row["blocks"] = -(-request.computed // self.limits.kv_block_tokens) if request.runs else 0
            row["ttft"], row["tbt"], row["ttlt"], row["weight"] = 1.0, request.tbt, request.ttlt, 1.0
            row["arrival"] = self.now_seconds + request.slack - 1.0 - request.output * request.tbt
            row["priority"], row["speculative"] = request.priority, request.speculative
        if len(rows):
            queues.add(rows)
        return queues

    def decide(self, model: LatencyModel, **parameters: Any) -> Decision:
        """The first decision of a new policy."""
        return self.decide_by(make_policy(model, self.limits, **parameters))

    def decide_by(self, policy: SlidingServePolicy, **iteration: Any) -> Decision:
        """A decision of a policy; ``iteration`` changes fields of the iteration's state."""
        queues = self.queues()
        held = int(queues.requests["blocks"].sum())
        free = self.limits.kv_blocks - held if self.free_kv_blocks is None else self.free_kv_blocks
        plan = Plan(queues.capacity)
        policy.decide(queues, IterationState(1, 0, self.now_seconds, free)._replace(**iteration), plan)
        handles = queues.requests["handle"]
        entries = plan.entries[: plan.count]
        return Decision(
            dict(zip(handles[entries["slot"]].tolist(), entries["tokens"].tolist(), strict=True)),
            handles[plan.victims[: plan.victim_count]].tolist(),
            handles[plan.demoted[: plan.demoted_count]].tolist(),
            plan.path,
            plan.predicted_seconds,
        )


def make_policy(model: LatencyModel, limits: EngineLimits = LIMITS, **parameters: Any) -> SlidingServePolicy:
    """A policy with a model of its own."""
    return SlidingServePolicy(SlidingServeParameters(**parameters), PolicyContext(limits, model.profile), model)


def linear(intercept_seconds: float = 0.0, per_token: float = 0.0, **weights: float) -> LatencyModel:
    """T = intercept + per_token x all tokens + weights by feature name; one expert for everything."""
    return linear_model("none", intercept_seconds, **{"decodes": per_token, "prefill_tokens": per_token, **weights})
