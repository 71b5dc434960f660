"""What a session answers leaves as a message, whatever is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.answering import answer_request
from sidecar.queues import Queues
from sidecar.session.machine import Session, SessionDefaults
from sidecar.warming import PolicyCannotDecide, warm_up
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import (
    BatchAllocation,
    ErrorReason,
    OpenSession,
    Request,
    Response,
    ResyncRequired,
    SessionError,
)
from tests.core.toy_policies import install, toys
from tests.strategies import LIMITS, snapshot, step


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toys():
        yield


def ask(session: Session, message: Request) -> Response:
    answer, wire = answer_request(session, encode_request(message))
    assert type(decode_response(wire)) is type(answer)
    return answer


def nameless(queues: Queues, iteration: Any, plan: Any) -> None:
    plan.path = None


def broken(queues: Queues, iteration: Any, plan: Any) -> None:
    raise KeyError("slack")


def test_an_answer_that_cannot_leave_becomes_an_error_of_this_session() -> None:
    install("nameless", nameless)
    session = Session("nameless")
    ask(session, OpenSession(LIMITS, policy="nameless"))
    for message in (step(0), snapshot([(1, 9, 0, 0)], running=0, free=40)):
        answer = ask(session, message)
        assert isinstance(answer, SessionError)
        assert answer.reason is ErrorReason.INTERNAL
        assert session.failure is not None
        assert isinstance(ask(session, step(1)), ResyncRequired)


@pytest.mark.parametrize(("epoch", "number", "field"), [(1, 2**63, "step"), (2**63, 0, "epoch")])
def test_a_number_whose_successor_does_not_fit_the_wire_is_refused(epoch: int, number: int, field: str) -> None:
    session = Session("far")
    ask(session, OpenSession(LIMITS))
    answer = ask(session, snapshot([(1, 9, 0, 0)], running=0, free=40, epoch=epoch, number=number))
    assert isinstance(answer, SessionError)
    assert (answer.reason, answer.field) == (ErrorReason.INVALID_FIELD, f"snapshot.iteration.{field}")
    assert not isinstance(ask(session, step(5, epoch=1)), BatchAllocation)


def test_a_long_value_is_told_in_short() -> None:
    answer = ask(Session("long"), OpenSession(LIMITS, policy="x" * 100_000))
    assert isinstance(answer, SessionError)
    assert answer.reason is ErrorReason.UNKNOWN_POLICY
    assert max(map(len, (answer.field, answer.value, answer.remedy))) < 600
    assert len(answer.message) < 1500


def test_a_default_policy_that_cannot_decide_is_found_before_the_sidecar_is_ready() -> None:
    install("broken", broken)
    with pytest.raises(PolicyCannotDecide, match=r"policy 'broken' cannot decide: .*slack"):
        warm_up(SessionDefaults("broken"))
    warm_up(SessionDefaults("shortest"))
