"""The policy as sessions know it: parameters and model in, plans out, measured iterations back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from predictor.counters import ErrorCounters
from predictor.features import PREFILL_TOKENS, ROW, TOKENS, add_chunk, add_decode
from predictor.files import ModelError, load_model
from predictor.forecast import predicted_seconds
from predictor.model import LatencyModel
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.registry import PolicyParameterError, UnknownProfileError, register
from sidecar.policies.slidingserve.decision import (
    CHUNKER,
    INFEASIBLE,
    PATHS,
    chunk_long_window,
    chunk_most_tokens,
    decide_batch,
)
from sidecar.policies.slidingserve.parameters import MOST_TOKENS, PROTECTIONS, SlidingServeParameters
from sidecar.policies.slidingserve.throughput import Memory, Planned, Throughput
from sidecar.policies.slidingserve.workspace import FACTS, RULES, make_workspace
from sidecar.queues import Queues, Table
from slidingserve.contract.values import Floats, IterationState

NAME = "slidingserve"
VERSION = "slidingserve/1"

# The iteration that a cap is measured by.
_DECODES, _DECODE_CONTEXT = 16, 1024
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
        initial = self.max_tokens / max(reference_seconds(self._model, self.max_tokens), 1e-9)
        self._memory = Memory(Throughput(resolved["throughput_window"], initial, bool(resolved["prefill_throughput"])))

    @property
    def prediction_errors(self) -> ErrorCounters:
        """How far predictions were off so far."""
        return self._memory.errors

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan. O(n log n) for n live requests, plus the constructor's knapsacks."""
        self._take_measurement(iteration, plan)
        if len(queues.requests) != self._capacity:
            self._capacity = len(queues.requests)
            self._constants = (make_workspace(self._capacity, self._rules[0]), *self._constants[1:])
        constants = self._constants
        plan.count, plan.victim_count, plan.demoted_count, path, kept, plan.predicted_seconds = decide_batch(
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
        plan.path = PATHS[path]
        batch = constants[0].batch
        self._memory.plan(
            Planned(iteration.step, batch.item(TOKENS), batch.item(PREFILL_TOKENS), plan.predicted_seconds)
        )

    def _take_measurement(self, iteration: IterationState, plan: Plan) -> None:
        """Hands the duration of the last finished iteration to what learns from it."""
        self._memory.follow(iteration.step, plan.executed)
        if iteration.last_iteration_seconds > 0.0 and not iteration.last_iteration_censored:
            finished = iteration.step - 1 - iteration.pipeline_depth
            self._memory.measure(finished, iteration.last_iteration_seconds)


def make_rules(resolved: dict[str, Any], context: PolicyContext, max_tokens: int) -> Table:
    """Returns the row of RULES for resolved parameters."""
    rules: Table = np.zeros(1, RULES)
    special = {
        "budget": max_tokens,
        "limit": context.limits.max_tokens_per_iteration,
        "block_tokens": context.limits.kv_block_tokens,
        "max_sequences": context.limits.max_sequences,
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


def reference_seconds(model: Floats, prompt_tokens: int) -> float:
    """Returns the predicted time of 16 decodes of 1024 tokens of context, and a fresh prompt of so many tokens."""
    features = np.zeros(ROW)
    for _ in range(_DECODES):
        add_decode(features, 1.0, float(_DECODE_CONTEXT))
    if prompt_tokens > 0:
        add_chunk(features, float(prompt_tokens), 0.0)
    return predicted_seconds(features, model)


def cap_tokens(model: Floats, stretch: float, limit: int) -> int:
    """Returns the most tokens that take about ``stretch`` times as long as decodes alone, at most ``limit``.

    Rounded up to a multiple of 128 tokens, where the tiles of the linear layers end: what is between costs no less.
    """
    longest = stretch * reference_seconds(model, 0)
    tokens = _CAP_STEP_TOKENS
    while tokens < limit and reference_seconds(model, tokens - _DECODES) < longest:
        tokens += _CAP_STEP_TOKENS
    return min(tokens, limit)


def build(parameters: SlidingServeParameters, context: PolicyContext) -> SlidingServePolicy:
    """Builds the policy for a session.

    Raises:
        PolicyParameterError: the model that was named cannot be used.
        UnknownProfileError: no model was named and the profile has none.
    """
    if parameters.model:
        try:
            model = load_model(parameters.model)
        except ModelError as error:
            raise PolicyParameterError(NAME, "model", parameters.model, str(error)) from error
        if context.profile and model.profile != context.profile:
            remedy = (
                f"it was fitted for profile {model.profile!r}, the session has {context.profile!r}; "
                "give the model of that profile, or none"
            )
            raise PolicyParameterError(NAME, "model", parameters.model, remedy)
        return SlidingServePolicy(parameters, context, model)
    if not context.profile:
        raise UnknownProfileError(
            "policy 'slidingserve' predicts how long batches take and needs to know the hardware; open the session "
            "with a profile, start the sidecar with --profile, or set the parameter model"
        )
    try:
        return SlidingServePolicy(parameters, context, load_model(context.profile))
    except ModelError as error:
        raise UnknownProfileError(str(error)) from error


register(
    NAME,
    SlidingServeParameters,
    build,
    "SlidingServe (arXiv 2606.05933): predicts, looks ahead, picks by dynamic programming",
)
