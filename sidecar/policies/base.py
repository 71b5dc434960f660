"""What a policy is: given the queues and the facts of this iteration, it fills a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sidecar.queues import ENTRY, Queues, Table
from slidingserve.contract.values import EngineLimits, Ints, IterationState


class Plan:
    """What a policy decided, in buffers that are used again in the next iteration.

    Attributes:
        entries: rows of ENTRY (slot, tokens), the first ``count`` are the batch, each slot at most once.
        victims: slots of running requests to preempt, the first ``victim_count``, in order.
        demoted: slots that the policy put last, the first ``demoted_count``.
        predicted_seconds: predicted duration of the batch; 0: none.
        path: which way through the policy decided.
        executed: whether the engine executed the plan of the step before to the letter. Unlike the rest it comes filled
            in, for policies that learn from measured durations.
    """

    def __init__(self, capacity: int) -> None:
        self.entries: Table = np.zeros(capacity, ENTRY)
        self.victims: Ints = np.zeros(capacity, np.int64)
        self.demoted: Ints = np.zeros(capacity, np.int64)
        self.executed = False
        self.clear()

    def clear(self) -> None:
        """Empties the plan, all but ``executed``."""
        self.count = 0
        self.victim_count = 0
        self.demoted_count = 0
        self.predicted_seconds = 0.0
        self.path = ""


COMMON_LIMITS = EngineLimits(max_tokens_per_iteration=2048, max_sequences=256, kv_blocks=10_000, kv_block_tokens=16)
"""A common engine, to try a policy on before there is one."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is built for: the engine's limits and the hardware profile of its session (may be empty)."""

    limits: EngineLimits
    profile: str = ""


class Policy(Protocol):
    """Decides one iteration at a time for one session.

    A policy may keep state of its own (throughput estimates, say) but must be deterministic: the same sequence of
    queues and iterations gives the same sequence of plans. It reads neither clocks nor files after it is built.
    """

    @property
    def version(self) -> str:
        """Changes whenever decisions may."""

    @property
    def model_version(self) -> str:
        """Version of the latency model it decides by; empty: none."""

    # A policy that predicts may have an attribute ``prediction_errors``, a `predictor.counters.ErrorCounters`.

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills ``plan`` (which comes empty, but for ``executed``); may not change ``queues``.

        ``iteration`` is what the engine said: its clock, free KV blocks, duration of the last iteration, and so on.
        Waiting requests may be given tokens only if ``iteration.may_admit``.
        """


class PolicyFactory(Protocol):
    """Builds the policy for one session."""

    def __call__(self, parameters: Any, context: PolicyContext) -> Policy:
        """``parameters`` is an instance of the registered parameters class."""
