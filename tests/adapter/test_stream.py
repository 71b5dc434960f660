"""A session's stream without gRPC: matching answers, and its end."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from engine_adapter.client.counters import ClientCounters
from engine_adapter.client.stream import DeadlineMissed, InvalidAnswer, SessionStream, StreamEnded
from slidingserve.contract.codec import encode_response
from slidingserve.contract.values import BatchAllocation, IterationState, Step
from tests.adapter.scripted_sidecar import OPENED, allocation


class Peer:
    """Plays the reader and counts cancellations."""

    def __init__(self) -> None:
        self.counters = ClientCounters()
        self.cancelled = 0
        self.stream = SessionStream(OPENED, SimpleQueue(), self.cancel, self.counters)

    def cancel(self) -> None:
        self.cancelled += 1

    def answers(self, *steps: int) -> None:
        for step in steps:
            self.stream.answers.put(encode_response(allocation(IterationState(0, step, 0.0, 0))))

    def ask(self, step: int) -> int:
        answer = self.stream.ask(Step(IterationState(0, step, 0.0, 0)), wait_seconds=0.001)
        assert isinstance(answer, BatchAllocation)
        return answer.step


def test_late_answers_are_dropped_until_the_awaited_one() -> None:
    peer = Peer()
    for step in range(3):
        with pytest.raises(DeadlineMissed):
            peer.ask(step)
    peer.answers(0, 1, 2, 3)
    assert peer.ask(3) == 3
    assert peer.counters.late_answers == 3
    assert not peer.stream.owes_answers()


def test_what_is_owed_is_collected_without_waiting() -> None:
    peer = Peer()
    for step in range(2):
        with pytest.raises(DeadlineMissed):
            peer.ask(step)
    peer.answers(0)
    assert peer.stream.owes_answers()
    assert peer.stream.owing_seconds() > 0
    peer.answers(1)
    assert not peer.stream.owes_answers()
    assert peer.stream.owing_seconds() == 0
    assert peer.counters.late_answers == 2


def test_a_wrong_answer_to_the_only_question_gives_the_stream_up() -> None:
    peer = Peer()
    peer.answers(8)
    with pytest.raises(InvalidAnswer, match=r"\(0, 8\) in answer to \(0, 7\)"):
        peer.ask(7)
    assert peer.cancelled == 1
    assert peer.stream.retired


def test_an_ended_stream_stays_ended() -> None:
    peer = Peer()
    with pytest.raises(DeadlineMissed):
        peer.ask(0)
    peer.stream.end()
    assert not peer.stream.owes_answers()
    for step in range(1, 4):
        with pytest.raises(StreamEnded):
            peer.ask(step)


def test_answers_before_the_end_still_count() -> None:
    peer = Peer()
    peer.answers(0)
    peer.stream.end()
    assert peer.ask(0) == 0
