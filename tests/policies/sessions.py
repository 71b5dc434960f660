"""Sessions whose policy is what a function makes of their limits."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.policies.base import Policy
from sidecar.session.machine import Session
from slidingserve.contract.values import BatchAllocation, EngineLimits, OpenSession, SessionOpened
from tests.slidingserve.scenes import State
from tests.strategies import decide


def session_of(policy: Callable[[EngineLimits], Policy], state: State) -> Session:
    """An open session for the limits of a state."""
    session = Session("rival", build_policy=lambda name, texts, context: policy(context.limits))
    assert isinstance(session.handle(OpenSession(state.limits)), SessionOpened)
    return session


def decided(session: Session, state: State) -> BatchAllocation:
    """What it decides over a state."""
    return decide(session, state.full)
