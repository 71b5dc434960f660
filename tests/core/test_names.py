"""Names of classes and tenants: sent once, bounded in number."""

from __future__ import annotations

from sidecar.session import checks
from slidingserve.contract.values import BatchAllocation, ErrorReason, SessionError
from tests.strategies import columns, opened, step


def test_a_session_that_sends_names_without_end_is_told_to_stop() -> None:
    session = opened()
    many = tuple(f"class-{number}" for number in range(checks.MOST_NAMES - 1))
    assert isinstance(session.handle(step(0, arrived=columns([1], [9], class_names=many))), BatchAllocation)
    known = len(session.mirror.class_names)
    answer = session.handle(step(1, arrived=columns([2], [9], class_names=("one more",))))
    assert isinstance(answer, SessionError)
    assert (answer.reason, answer.field) == (ErrorReason.INVALID_FIELD, "step.arrived.class_names")
    assert "send each name once" in answer.remedy
    assert len(session.mirror.class_names) == known
