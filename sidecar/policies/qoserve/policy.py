"""The policy as sessions know it: parameters and model in, plans out, measured iterations back."""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.counters import ErrorCounters
from predictor.features import PREFILL_TOKENS, TOKENS
from predictor.model import LatencyModel
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.common.history import make_history
from sidecar.policies.common.models import reference_seconds, reference_throughput, session_model
from sidecar.policies.common.relegation import RELEGATIONS
from sidecar.policies.common.throughput import Estimate, Memory, MovingThroughput, Planned, Throughput
from sidecar.policies.qoserve.artifact import DECAY, INITIAL_TOKENS_PER_SECOND, MODEL_VERSION
from sidecar.policies.qoserve.decision import PATHS, RULES, decide_batch, make_work
from sidecar.policies.qoserve.parameters import QoServeParameters
from sidecar.policies.registry import register
from sidecar.queues import Queues, Table
from slidingserve.contract.values import IterationState

NAME = "qoserve"


class QoServePolicy:
    """See the package. One for each session; ``model`` may be None with the artifact's constants."""

    def __init__(self, parameters: QoServeParameters, context: PolicyContext, model: LatencyModel | None) -> None:
        resolved = parameters.resolved()
        limit = context.limits.max_tokens_per_iteration
        self.max_tokens: int = min(resolved["max_tokens"] or limit, limit)
        self.version = f"qoserve/1-{parameters.constants}"
        self._rules = make_rules(resolved, context, self.max_tokens)
        self._history = make_history()
        self._work = make_work(0, self._history)
        self._epoch = 0
        if model is None:
            self.model_version = MODEL_VERSION
            self._model = np.zeros(0)
            throughput: Estimate = MovingThroughput(DECAY, INITIAL_TOKENS_PER_SECOND)
        else:
            self.model_version = model.version
            self._model = model.pack()
            self._rules["pace_seconds"] = reference_seconds(self._model, 0)
            initial = reference_throughput(self._model, self.max_tokens)
            throughput = Throughput(parameters.throughput_window, initial, prefill_only=True)
        self._memory = Memory(throughput)

    @property
    def prediction_errors(self) -> ErrorCounters:
        """How far predictions were off so far."""
        return self._memory.errors

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan. O(n log n) for n live requests."""
        self._memory.take(iteration, plan.executed)
        self._fit_work(len(queues.requests), iteration.epoch)
        work = self._work
        plan.count, plan.victim_count, plan.demoted_count, path, plan.predicted_seconds = decide_batch(
            *queues.arrays,
            plan.entries,
            plan.victims,
            plan.demoted,
            iteration.may_admit,
            iteration.now_seconds,
            iteration.free_kv_blocks,
            self._memory.throughput.tokens_per_second,
            work,
            self._rules,
            self._model,
        )
        plan.path = PATHS[path]
        tokens, prompt_tokens = work.batch.item(TOKENS), work.batch.item(PREFILL_TOKENS)
        self._memory.plan(Planned(iteration.step, tokens, prompt_tokens, plan.predicted_seconds))

    def _fit_work(self, capacity: int, epoch: int) -> None:
        """Makes the buffers as large as the mirror; after a snapshot slots are others', so what they knew is gone."""
        if epoch == self._epoch and capacity == len(self._work.pool):
            return
        old, self._work = self._work, make_work(capacity, self._history)
        if epoch == self._epoch:
            self._work.known[: len(old.known)] = old.known
            self._work.seen[: len(old.seen)] = old.seen
        self._epoch = epoch


def make_rules(resolved: dict[str, Any], context: PolicyContext, max_tokens: int) -> Table:
    """Returns the row of RULES for resolved parameters."""
    rules: Table = np.zeros(1, RULES)
    special = {
        "artifact": resolved["constants"] == "artifact",
        "budget": max_tokens,
        "limit": context.limits.max_tokens_per_iteration,
        "block_tokens": context.limits.kv_block_tokens,
        "max_sequences": context.limits.max_sequences,
        "relegation": RELEGATIONS.index(resolved["relegation"]),
        "pace_seconds": 0.0,
    }
    for name in RULES.names or ():
        rules[name] = special[name] if name in special else resolved[name]
    return rules


def build(parameters: QoServeParameters, context: PolicyContext) -> QoServePolicy:
    """Builds the policy for a session; errors: see `session_model`."""
    if parameters.constants == "artifact":
        return QoServePolicy(parameters, context, None)
    return QoServePolicy(parameters, context, session_model(NAME, parameters.model, context))


register(
    NAME,
    QoServeParameters,
    build,
    "QoServe (ASPLOS 2026): hybrid priority, chunks as the decodes' slack allows, relegation",
)
