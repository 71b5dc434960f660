"""The protocol's state machine: every state with every input, epochs, step numbers, what a refusal leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sidecar.session.machine import Session, State, one_decision
from sidecar.session.refusal import Refusal
from slidingserve.contract.values import (
    BatchAllocation,
    ErrorReason,
    Mode,
    OpenSession,
    Request,
    ResyncReason,
    ResyncRequired,
    SessionError,
    SessionOpened,
)
from tests.core.toy_policies import install, toys
from tests.strategies import LIMITS, batch, columns, decide, ints, mirror_rows, opened, snapshot, step

ROWS = [(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)]
EPOCH, NEXT = 5, 12  # where `synced` stands


def new() -> Session:
    return Session("new")


def synced() -> Session:
    """In step at epoch 5, expecting step 12, with two running requests and one that waits."""
    session = opened()
    decide(session, snapshot(ROWS, running=2, free=37, epoch=EPOCH, number=NEXT - 1, now_seconds=4.0))
    return session


def lost() -> Session:
    session = synced()
    session.handle(step(NEXT + 1, epoch=EPOCH))
    assert session.state is State.LOST
    return session


STATES: dict[State, Callable[[], Session]] = {State.NEW: new, State.SYNCED: synced, State.LOST: lost}

GOOD_STEP = step(NEXT, now=4.1, free=36, epoch=EPOCH)
INPUTS: dict[str, Request | None] = {
    "open": OpenSession(LIMITS),
    "bad open": OpenSession(LIMITS, protocol_version=2),
    "step": GOOD_STEP,
    "old step": step(NEXT - 1, now=4.1, free=36, epoch=EPOCH),
    "later step": step(NEXT + 1, now=4.1, free=36, epoch=EPOCH),
    "old epoch": step(NEXT, now=4.1, free=36, epoch=EPOCH - 1),
    "later epoch": step(NEXT, now=4.1, free=36, epoch=EPOCH + 1),
    "bad step": GOOD_STEP._replace(finished_handles=ints(99)),
    "snapshot": snapshot(ROWS, running=2, free=37, epoch=EPOCH + 3, number=40),
    "old snapshot": snapshot(ROWS, running=2, free=37, epoch=EPOCH, number=40),
    "bad snapshot": snapshot(ROWS, running=9, free=37, epoch=EPOCH + 3, number=40),
    "nothing": None,
}


@dataclass(frozen=True)
class Expected:
    """Type of the answer, its reason, and the state that follows."""

    answer: type
    state: State
    reason: ErrorReason | ResyncReason | None = None


OUT_OF_TURN, INVALID = ErrorReason.OUT_OF_TURN, ErrorReason.INVALID_FIELD
AFTER_ERROR = ResyncReason.AFTER_ERROR
STEPS = ("step", "old step", "later step", "old epoch", "later epoch", "bad step")
SNAPSHOTS = ("snapshot", "old snapshot", "bad snapshot")

TABLE: dict[tuple[State, str], Expected] = {
    (State.NEW, "open"): Expected(SessionOpened, State.SYNCED),
    (State.NEW, "bad open"): Expected(SessionError, State.NEW, ErrorReason.UNSUPPORTED_PROTOCOL),
    **{(State.NEW, name): Expected(SessionError, State.NEW, OUT_OF_TURN) for name in STEPS + SNAPSHOTS},
    (State.NEW, "nothing"): Expected(SessionError, State.NEW, INVALID),
    (State.SYNCED, "open"): Expected(SessionError, State.SYNCED, OUT_OF_TURN),
    (State.SYNCED, "bad open"): Expected(SessionError, State.SYNCED, OUT_OF_TURN),
    (State.SYNCED, "step"): Expected(BatchAllocation, State.SYNCED),
    (State.SYNCED, "old step"): Expected(ResyncRequired, State.LOST, ResyncReason.STEP_MISMATCH),
    (State.SYNCED, "later step"): Expected(ResyncRequired, State.LOST, ResyncReason.STEP_MISMATCH),
    (State.SYNCED, "old epoch"): Expected(ResyncRequired, State.LOST, ResyncReason.EPOCH_MISMATCH),
    (State.SYNCED, "later epoch"): Expected(ResyncRequired, State.LOST, ResyncReason.EPOCH_MISMATCH),
    (State.SYNCED, "bad step"): Expected(SessionError, State.LOST, ErrorReason.UNKNOWN_HANDLE),
    (State.SYNCED, "snapshot"): Expected(BatchAllocation, State.SYNCED),
    (State.SYNCED, "old snapshot"): Expected(SessionError, State.LOST, INVALID),
    (State.SYNCED, "bad snapshot"): Expected(SessionError, State.LOST, INVALID),
    (State.SYNCED, "nothing"): Expected(SessionError, State.SYNCED, INVALID),
    (State.LOST, "open"): Expected(SessionError, State.LOST, OUT_OF_TURN),
    (State.LOST, "bad open"): Expected(SessionError, State.LOST, OUT_OF_TURN),
    **{(State.LOST, name): Expected(ResyncRequired, State.LOST, AFTER_ERROR) for name in STEPS},
    (State.LOST, "snapshot"): Expected(BatchAllocation, State.SYNCED),
    (State.LOST, "old snapshot"): Expected(SessionError, State.LOST, INVALID),
    (State.LOST, "bad snapshot"): Expected(SessionError, State.LOST, INVALID),
    (State.LOST, "nothing"): Expected(SessionError, State.LOST, INVALID),
}


def test_table_is_complete() -> None:
    assert set(TABLE) == {(state, name) for state in State for name in INPUTS}


@pytest.mark.parametrize(("state", "name"), list(TABLE), ids=lambda value: getattr(value, "name", value))
def test_answer_and_following_state(state: State, name: str) -> None:
    session, message, expected = STATES[state](), INPUTS[name], TABLE[state, name]
    before = mirror_rows(session) if state is not State.NEW else []
    answer = session.handle(message)
    assert type(answer) is expected.answer
    assert session.state is expected.state
    if isinstance(answer, SessionError | ResyncRequired):
        assert answer.reason is expected.reason
        assert len(answer.message.split()) > 4
        if state is not State.NEW:
            assert mirror_rows(session) == before, "a message that is not accepted changes nothing"
    if isinstance(answer, BatchAllocation | SessionError | ResyncRequired) and message is not None:
        numbers = getattr(message, "iteration", None)
        assert (answer.epoch, answer.step) == ((numbers.epoch, numbers.step) if numbers else (0, 0))


@pytest.mark.parametrize("name", ["old step", "later step", "old epoch", "later epoch"])
def test_resync_tells_what_was_expected(name: str) -> None:
    answer = synced().handle(INPUTS[name])
    assert isinstance(answer, ResyncRequired)
    assert (answer.expected_epoch, answer.expected_step) == (EPOCH, NEXT)
    for number in (answer.step, answer.epoch, EPOCH, NEXT):
        assert str(number) in answer.message
    assert "Snapshot" in answer.message


@pytest.mark.parametrize("name", ["bad step", "old snapshot", "bad snapshot"])
def test_after_an_error_only_a_snapshot_leads_back(name: str) -> None:
    session = synced()
    assert isinstance(session.handle(INPUTS[name]), SessionError)
    for other in STEPS:
        answer = session.handle(INPUTS[other])
        assert isinstance(answer, ResyncRequired)
        assert answer.reason is ResyncReason.AFTER_ERROR
        assert (answer.expected_epoch, answer.expected_step) == (EPOCH, NEXT)
    allocation = session.handle(INPUTS["snapshot"])
    assert isinstance(allocation, BatchAllocation)
    assert batch(allocation) == batch(decide(opened(), snapshot(ROWS, running=2, free=37, epoch=EPOCH + 3, number=40)))
    decide(session, step(41, free=30, epoch=EPOCH + 3))


def test_new_session_expects_epoch_0_step_0() -> None:
    decide(opened(), step(0))
    for message in (step(1), step(0, epoch=1)):
        answer = opened().handle(message)
        assert isinstance(answer, ResyncRequired)
        assert (answer.expected_epoch, answer.expected_step) == (0, 0)


def test_first_snapshot_needs_an_epoch_above_0() -> None:
    answer = opened().handle(snapshot(ROWS, running=2, free=37, epoch=0))
    assert isinstance(answer, SessionError)
    assert answer.field == "snapshot.iteration.epoch"
    assert "above 0" in answer.remedy
    decide(opened(), snapshot(ROWS, running=2, free=37, epoch=1))


def test_refused_snapshot_does_not_use_up_its_epoch() -> None:
    session = synced()
    session.handle(INPUTS["bad snapshot"])
    decide(session, snapshot(ROWS, running=2, free=37, epoch=EPOCH + 1))


def test_snapshot_may_set_the_clock_back_and_steps_go_on_from_it() -> None:
    session = synced()
    decide(session, snapshot(ROWS, running=2, free=37, epoch=EPOCH + 1, number=0, now_seconds=1.0))
    decide(session, step(1, now=1.5, free=30, epoch=EPOCH + 1))


def test_failed_open_can_be_repeated() -> None:
    session = new()
    for bad in (
        OpenSession(LIMITS, protocol_version=9),
        OpenSession(LIMITS, policy="nope"),
        OpenSession(LIMITS, policy="vllm", policy_parameters={"nope": "1"}),
    ):
        assert isinstance(session.handle(bad), SessionError)
    assert isinstance(session.handle(OpenSession(LIMITS, mode=Mode.SHADOW)), SessionOpened)
    assert decide(session, step(0)).mode is Mode.SHADOW


def test_a_lost_session_is_told_so_by_its_owner() -> None:
    session = synced()
    session.lose()
    answer = session.handle(GOOD_STEP)
    assert isinstance(answer, ResyncRequired)
    unopened = new()
    unopened.lose()
    assert unopened.state is State.NEW


def test_policy_that_raises_is_an_internal_error_of_its_session_alone() -> None:
    def raises_once(queues: Any, iteration: Any, plan: Any) -> None:
        if iteration.now_seconds == 1.0:
            plan.count = 3
            raise ZeroDivisionError("tokens per nothing")
        plan.entries[0], plan.count = (0, 5), 1

    with toys():
        install("raises", raises_once)
        session, other = opened(policy="raises"), opened(policy="raises")
        arrived = columns([1], [9])
        decide(session, step(0, arrived=arrived))
        decide(other, step(0, arrived=arrived))
        answer = session.handle(step(1, now=1.0, free=38))
        assert isinstance(answer, SessionError)
        assert answer.reason is ErrorReason.INTERNAL
        assert "raises/1" in answer.remedy
        assert "tokens per nothing" in answer.remedy
        assert isinstance(session.failure, ZeroDivisionError)
        assert isinstance(session.handle(step(2, now=2.0, free=38)), ResyncRequired)
        assert batch(decide(other, step(1, now=0.5, free=38))) == [(1, 4)]
        rows = [(1, 9, 5, 0)]
        failed = session.handle(snapshot(rows, running=1, free=38, epoch=1, number=2, now_seconds=1.0))
        assert isinstance(failed, SessionError)
        assert session.state is State.LOST
        allocation = decide(session, snapshot(rows, running=1, free=38, epoch=2, number=2, now_seconds=2.0))
        assert batch(allocation) == [(1, 4)]
        assert batch(decide(session, step(3, now=2.1, free=37, epoch=2))) == [(1, 1)]


def test_one_decision_equals_that_of_a_session() -> None:
    message = snapshot(ROWS, running=2, free=37, epoch=EPOCH, number=3)
    allocation = one_decision(message, OpenSession(LIMITS))
    assert batch(allocation) == batch(decide(opened(), message))
    zero = message._replace(iteration=message.iteration._replace(epoch=0, step=0))
    assert batch(one_decision(zero, OpenSession(LIMITS))) == batch(allocation)
    with pytest.raises(Refusal, match="running_count"):
        one_decision(message._replace(running_count=4), OpenSession(LIMITS))
    with pytest.raises(Refusal, match="protocol_version"):
        one_decision(message, OpenSession(LIMITS, protocol_version=0))
