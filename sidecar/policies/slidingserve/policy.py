"""The policy as sessions know it: parameters and model in, plans out, measured iterations back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from predictor.counters import ErrorCounters
from predictor.features import PREFILL_TOKENS, TOKENS
from predictor.model import LatencyModel
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.common.models import REFERENCE_DECODES, reference_seconds, reference_throughput, session_model
from sidecar.policies.common.throughput import Memory, Planned, Throughput
from sidecar.policies.registry import register
from sidecar.policies.slidingserve.decision import (
    CHUNKER,
    INFEASIBLE,
    PATHS,
    chunk_long_window,
    chunk_most_tokens,
    decide_batch,
)
from sidecar.policies.slidingserve.parameters import MOST_TOKENS, PROTECTIONS, SlidingServeParameters
from sidecar.policies.slidingserve.workspace import FACTS, RULES, make_workspace
from sidecar.queues import Queues, Table
from slidingserve.contract.values import Floats, IterationState

NAME = "slidingserve"
VERSION = "slidingserve/1"

_CAP_STEP_TOKENS = 128


class SlidingServePolicy:
    """See the package. One for each session."""

    def __init__(self, parameters: SlidingServeParameters, context: PolicyContext, model: LatencyModel) -> None:
        self.version = f"{VERSION}-{parameters.mode}"
        self.model_version = model.version
        self._model = model.pack()
        resolved = parameters.resolved()
        limit = min(context.limits.max_tokens_per_iteration, MOST_TOKENS)
        self.max_tokens: int = min(
            resolved["max_tokens"] or cap_tokens(self._model, resolved["max_stretch"], limit), limit
        )
        self._rules = make_rules(resolved, context, self.max_tokens)
        self._constants = (make_workspace(0, self._rules[0]), self._rules, np.zeros(1, FACTS), self._model)
        self._capacity = 0
        self._chunk_if_infeasible = bool(resolved["chunk_if_infeasible"])
        self._chunk = chunker_of(resolved)
        initial = reference_throughput(self._model, self.max_tokens)
        self._memory = Memory(Throughput(resolved["throughput_window"], initial, bool(resolved["prefill_throughput"])))

    @property
    def prediction_errors(self) -> ErrorCounters:
        """How far predictions were off so far."""
        return self._memory.errors

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan. O(n log n) for n live requests, plus the constructor's knapsacks."""
        self._memory.take(iteration, plan.executed)
        if len(queues.requests) != self._capacity:
            self._capacity = len(queues.requests)
            self._constants = (make_workspace(self._capacity, self._rules[0]), *self._constants[1:])
        constants = self._constants
        plan.count, plan.victim_count, plan.demoted_count, path, kept, plan.predicted_seconds = self._decide_batch(
            *queues.arrays,
            plan.entries,
            plan.victims,
            plan.demoted,
            iteration.may_admit,
            iteration.now_seconds,
            iteration.free_kv_blocks,
            self._memory.throughput.tokens_per_second,
            *constants,
        )
        if self._chunk is not None and (path == CHUNKER or (path == INFEASIBLE and self._chunk_if_infeasible)):
            plan.count, plan.predicted_seconds = self._chunk(kept, plan.entries, plan.count, *constants)
        self._serve_others(plan, kept, constants)
        plan.path = PATHS[path]
        batch = constants[0].batch
        self._memory.plan(
            Planned(iteration.step, batch.item(TOKENS), batch.item(PREFILL_TOKENS), plan.predicted_seconds)
        )

    def _decide_batch(self, *state: Any) -> tuple[int, int, int, int, int, float]:
        """Calls the kernel; takes and returns what it does."""
        return decide_batch(*state)

    def _serve_others(self, plan: Plan, kept: int, constants: tuple[Any, ...]) -> None:
        """Adds to the plan whom the decision has set aside; here nobody."""


def make_rules(resolved: dict[str, Any], context: PolicyContext, max_tokens: int) -> Table:
    """Returns the row of RULES for resolved parameters."""
    rules: Table = np.zeros(1, RULES)
    special = {
        "budget": max_tokens,
        "limit": context.limits.max_tokens_per_iteration,
        "block_tokens": context.limits.kv_block_tokens,
        "max_sequences": context.limits.max_sequences,
        "by_deadline": resolved["order"] == "deadline",
        "chunk_here": chunker_of(resolved) is None,
        "protect": PROTECTIONS.index(resolved["protect"]),
    }
    for name in RULES.names or ():
        rules[name] = special[name] if name in special else resolved[name]
    return rules


def chunker_of(resolved: dict[str, Any]) -> Callable[..., tuple[int, float]] | None:
    """Returns the kernel of another chunker than Algorithm 1's; it is compiled only where it is used."""
    if resolved["objective"] == "max_tokens":
        return chunk_most_tokens
    return chunk_long_window if resolved["window"] > 2 else None


def cap_tokens(model: Floats, stretch: float, limit: int) -> int:
    """Returns the most tokens that take about ``stretch`` times as long as decodes alone, at most ``limit``.

    Rounded up to a multiple of 128 tokens, where the tiles of the linear layers end: what is between costs no less.
    """
    longest = stretch * reference_seconds(model, 0)
    tokens = _CAP_STEP_TOKENS
    while tokens < limit and reference_seconds(model, tokens - REFERENCE_DECODES) < longest:
        tokens += _CAP_STEP_TOKENS
    return min(tokens, limit)


def build(parameters: SlidingServeParameters, context: PolicyContext) -> SlidingServePolicy:
    """Builds the policy for a session.

    Raises:
        PolicyParameterError: the model that was named cannot be used.
        UnknownProfileError: no model was named and the profile has none.
    """
    return SlidingServePolicy(parameters, context, session_model(NAME, parameters.model, context))


register(
    NAME,
    SlidingServeParameters,
    build,
    "SlidingServe (arXiv 2606.05933): predicts, looks ahead, picks by dynamic programming",
)
