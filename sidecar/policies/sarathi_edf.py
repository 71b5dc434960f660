"""Policy ``sarathi-edf``: Sarathi-Serve, prompts by earliest deadline; the baseline of QoServe and of SlidingServe.

Source: ``edf`` in the artifact of QoServe (microsoft/sarathi-serve, commit 72339db5). Decodes first, then prompts,
started or not, by

- ``arrival + TTFT`` (of one that had output before it was preempted: its next token's deadline), or
- ``arrival + TTLT - n_out * 0.4 s`` of a request that has only a TTLT SLO (n_out known or 15),

each with ``min(remaining, max_tokens - used)``; the fixed budget counts decodes. QoServe uses 256 tokens, SlidingServe
does not say.

Earliest deadline first breaks down once deadlines have passed: those requests come first for ever, and nobody is in
time. So prompts whose deadline has passed go last, the least remaining work first; ``expired_last=false`` is the
original.
"""

from __future__ import annotations

from sidecar.policies.base import PolicyContext
from sidecar.policies.common.chunked_prefill import BY_DEADLINE, DeadlineParameters, deadline_policy
from sidecar.policies.common.fixed_budget import FixedBudgetPolicy
from sidecar.policies.registry import register

NAME = "sarathi-edf"


def build(parameters: DeadlineParameters, context: PolicyContext) -> FixedBudgetPolicy:
    """Builds the policy for a session."""
    return deadline_policy("sarathi-edf/1", "edf", BY_DEADLINE, parameters, context)


register(NAME, DeadlineParameters, build, "Sarathi-Serve with prompts by earliest deadline, expired ones last")
