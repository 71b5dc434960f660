"""Policy ``sarathi-srpf``: Sarathi-Serve, shortest remaining prompt first.

Source: ``srpf`` with a fixed chunk of 256 in the artifact of QoServe (microsoft/sarathi-serve, commit 72339db5).
Decodes first, then prompts, started or not, by remaining tokens, each with ``min(remaining, max_tokens - used)``; the
fixed budget counts decodes. Ties go to running prompts, then by arrival.

Prompts whose deadline has passed go last, shortest first as well (they cannot be in time any more);
``expired_last=false`` is the original, which asks for no deadline. A deadline is that of `sarathi_edf`.
"""

from __future__ import annotations

from sidecar.policies.base import PolicyContext
from sidecar.policies.common.chunked_prefill import BY_LENGTH, DeadlineParameters, deadline_policy
from sidecar.policies.common.fixed_budget import FixedBudgetPolicy
from sidecar.policies.registry import register

NAME = "sarathi-srpf"


def build(parameters: DeadlineParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return deadline_policy("sarathi-srpf/1", "srpf", BY_LENGTH, parameters, context)


register(NAME, DeadlineParameters, build, "Sarathi-Serve with the shortest remaining prompt first, expired ones last")
