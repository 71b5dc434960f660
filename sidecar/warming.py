"""Compiling a policy before it has to decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sidecar.policies.base import COMMON_LIMITS
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import (
    IterationState,
    Mode,
    OpenSession,
    Request,
    RequestColumns,
    SessionError,
    Step,
)


class PolicyCannotDecide(RuntimeError):
    """A policy that fails on the simplest of requests; holds the session's words."""


def warm_up(defaults: SessionDefaults) -> None:
    """Compiles every kernel that a policy needs (seconds when cold, milliseconds from the cache).

    Raises:
        PolicyCannotDecide: the policy is unknown, its parameters are wrong, or it fails.
    """
    session = Session("warm-up", replace(defaults, mode=Mode.ACTIVE))  # who is off now may be switched on later
    messages: tuple[Request, ...] = (
        OpenSession(COMMON_LIMITS),
        Step(
            IterationState(0, 0, 0.0, 10000),
            arrived=RequestColumns(np.arange(2), np.zeros(2), np.array([16, 32])),
        ),
        Step(IterationState(0, 1, 0.1, 9000, 0.1), finished_handles=np.array([0])),
    )
    for message in messages:
        answer = session.handle(message)
        if isinstance(answer, SessionError):
            raise PolicyCannotDecide(f"policy {defaults.policy!r} cannot decide: {answer.message}")
