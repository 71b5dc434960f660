"""What a session answers leaves as a message, whatever is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.answering import answer_request
from sidecar.queues import Queues
from sidecar.server import ServeError, warm_up
from sidecar.session.machine import Session, SessionDefaults
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


def test_a_number_beyond_the_wire_does_not_end_the_stream() -> None:
    session = Session("far")
    ask(session, OpenSession(LIMITS))
    full = snapshot([(1, 9, 0, 0)], running=0, free=40, number=2**64 - 1)
    assert isinstance(ask(session, full), BatchAllocation)
    assert not isinstance(ask(session, step(5, epoch=1)), BatchAllocation)


def test_a_default_policy_that_cannot_decide_is_found_before_the_sidecar_is_ready() -> None:
    install("broken", broken)
    with pytest.raises(ServeError, match=r"policy 'broken' cannot decide: .*slack"):
        warm_up(SessionDefaults("broken"))
    warm_up(SessionDefaults("shortest"))
