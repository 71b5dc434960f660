"""Policy ``sarathi``: Sarathi-Serve (OSDI 2024), chunked prefill under one token budget, first come, first served.

Source: microsoft/sarathi-serve, ``sarathi_scheduler.py``. Each iteration has a budget of ``chunk_size`` tokens (the
default of 512 is the code's), which counts all tokens, and spends it on

1. every running request whose prefill is done, one token each; if a KV block lacks, the last running request is
   preempted (`common.intake.make_room`);
2. running partial prefills in the order in which they run, ``min(remaining, chunk_size - used)``;
3. waiting requests in the order of arrival, ``min(prompt, chunk_size - used)``, each with KV blocks for its whole
   prompt; the first that finds no seat or no blocks ends the admission.

What is not in it: the stages in which the published code may shrink the chunk as a prompt proceeds (off by default).
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.policies.base import PolicyContext
from sidecar.policies.common.checking import CAP, check_ranges
from sidecar.policies.common.chunked_prefill import IN_TURN, decide_in_order
from sidecar.policies.common.fixed_budget import FixedBudgetPolicy
from sidecar.policies.registry import register

NAME = "sarathi"


@dataclass(frozen=True, slots=True)
class SarathiParameters:
    """Settings of the policy.

    Attributes:
        max_tokens: token budget of an iteration, decodes included (Sarathi: chunk_size); 0: the engine's limit.
    """

    max_tokens: int = 512

    def __post_init__(self) -> None:
        check_ranges(self, {"max_tokens": CAP})


def build(parameters: SarathiParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return FixedBudgetPolicy(
        "sarathi/1", NAME, decide_in_order, context, parameters.max_tokens, IN_TURN, False, 0.0, 0.0
    )


register(NAME, SarathiParameters, build, "Sarathi-Serve (OSDI 2024): chunked prefill, first come, first served")
