"""Sessions over real streams: the same answers as in process, and none notices another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from engine_adapter.client import BreakerSettings, FallbackReason
from engine_adapter.simulated.outcome import Outcome
from evaluation.sidecar_process import SidecarProcess
from slidingserve.contract.values import (
    BatchAllocation,
    EngineInfo,
    ErrorReason,
    OpenSession,
    ResyncRequired,
    SessionError,
    SessionOpened,
)
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.service.support import (
    OPEN,
    RawStream,
    assert_same_run,
    channel_to,
    client_of,
    engine_for,
    free_address,
    outcome_in_process,
    run_until,
    wait_until,
)
from tests.strategies import LIMITS, Feed, columns, feed, ints, random_feed, step

FEED = random_feed(seed=3, count=60, prompt=60, output=12, gap_seconds=0.05)


@pytest.mark.parametrize("transport", ["unix socket", "tcp"])
def test_a_stream_gives_the_answers_of_the_session_in_process(transport: str, sidecar: SidecarProcess) -> None:
    expected = outcome_in_process(FEED)
    assert expected.preemptions > 0, "the feed is meant to be tight"
    if transport == "unix socket":
        outcome = run(sidecar)
    else:
        with SidecarProcess(address=free_address()) as tcp:
            outcome = run(tcp)
    assert outcome.allocation_digest == expected.allocation_digest
    assert outcome.fallbacks == expected.fallbacks == 0
    assert_same_run(outcome, expected)


def run(sidecar: SidecarProcess, requests: Feed = FEED) -> Outcome:
    with client_of(sidecar) as client:
        outcome = engine_for(requests, client).run()
        assert client.counters.resyncs == 0
        return outcome


def test_good_sessions_notice_nothing_of_bad_ones(sidecar: SidecarProcess, channel: grpc.Channel) -> None:
    with ThreadPoolExecutor(4) as pool:
        feeds = [random_feed(seed, 40, prompt=60, output=12, gap_seconds=0.05) for seed in range(4)]
        runs = [pool.submit(run, sidecar, requests) for requests in feeds]
        rounds = 0
        while not all(run.done() for run in runs) or not rounds:
            misbehave(channel)
            rounds += 1
        for requests, good in zip(feeds, runs, strict=True):
            expected = outcome_in_process(requests)
            assert good.result().allocation_digest == expected.allocation_digest
            assert good.result().fallbacks == 0


def misbehave(channel: grpc.Channel) -> None:
    """One of each kind: bytes that are no message, no payload, out of turn, wrong contents, sudden end."""
    with RawStream(channel) as stream:
        stream.send(b"\xff\xff\xff\xff\xff")
        assert stream.ends_with() == "UNKNOWN"
    with RawStream(channel) as stream:
        answers = [stream.ask(pb.ScheduleRequest()), stream.ask(step(0))]
        assert [answer.reason for answer in answers] == [ErrorReason.INVALID_FIELD, ErrorReason.OUT_OF_TURN]  # type: ignore[union-attr]
        assert isinstance(stream.ask(OPEN), SessionOpened)
        again = stream.ask(OPEN)
        assert isinstance(again, SessionError)
        assert again.reason is ErrorReason.OUT_OF_TURN
        unknown = stream.ask(step(0, finished_handles=ints(77)))
        assert isinstance(unknown, SessionError)
        assert (unknown.reason, unknown.field) == (ErrorReason.UNKNOWN_HANDLE, "step.finished_handles[0]")
        assert isinstance(stream.ask(step(1)), ResyncRequired)
        stream.send(b"\x01")
        assert stream.ends_with() == "UNKNOWN"
    with RawStream(channel) as stream:
        stream.ask(OPEN)
        stream.send(step(0, arrived=columns([1], [9])))


def test_a_session_that_was_refused_can_open_on_the_same_stream(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        for opening, reason in (
            (OpenSession(LIMITS, protocol_version=2), ErrorReason.UNSUPPORTED_PROTOCOL),
            (OpenSession(LIMITS, policy="nope"), ErrorReason.UNKNOWN_POLICY),
            (OpenSession(LIMITS, policy_parameters={"nope": "1"}), ErrorReason.INVALID_POLICY_PARAMETER),
        ):
            answer = stream.ask(opening)
            assert isinstance(answer, SessionError)
            assert answer.reason is reason
            assert answer.remedy
        assert isinstance(stream.ask(OPEN), SessionOpened)


def test_log_lines_name_the_engine(sidecar: SidecarProcess, channel: grpc.Channel) -> None:
    engine = EngineInfo("vllm", instance="pod-7", model="m" * 10_000)
    with RawStream(channel) as stream:
        stream.ask(OpenSession(LIMITS, engine=engine))
        stream.ask(step(7))
        wait_until(lambda: "instance=pod-7" in sidecar.log, "the log names the engine")
    lines = [line for line in sidecar.log.splitlines() if "instance=pod-7" in line]
    assert all("engine=vllm" in line and len(line) < 1000 for line in lines)


def test_answers_tell_where_the_time_went(channel: grpc.Channel) -> None:
    with RawStream(channel) as stream:
        stream.ask(OPEN)
        allocation = stream.ask(step(0, arrived=columns([1, 2], [9, 30])))
        assert isinstance(allocation, BatchAllocation)
        timings = allocation.phase_timings
        assert timings is not None
        assert min(timings) > 0
        assert sum(timings) < 10


def test_one_session_too_many_is_refused_and_has_room_later(small_sidecar: SidecarProcess) -> None:
    with channel_to(small_sidecar.address) as channel:

        def has_room() -> bool:
            with RawStream(channel) as stream:
                return isinstance(stream.ask(OPEN), SessionOpened)

        wait_until(has_room, "the streams of the test before have gone")
        with RawStream(channel) as first, RawStream(channel) as second:
            with RawStream(channel) as third:
                for stream in (first, second, third):
                    assert isinstance(stream.ask(OPEN), SessionOpened)
                with RawStream(channel) as fourth:
                    refusal = fourth.ask(OPEN)
                    assert isinstance(refusal, SessionError)
                    assert refusal.reason is ErrorReason.UNAVAILABLE
                    assert "3 sessions" in refusal.message
                    assert "max_sessions" in refusal.remedy
                    assert fourth.ends_with() == "OK"
                for stream in (first, second, third):
                    assert isinstance(stream.ask(step(0)), BatchAllocation)
            wait_until(has_room, "the seat of the session that left is free")
            assert isinstance(second.ask(step(1)), BatchAllocation)


def test_oversized_message_ends_its_stream_alone_and_the_engine_comes_back(small_sidecar: SidecarProcess) -> None:
    """A burst makes a message that is too large, and so are the snapshots until enough of it is worked off."""
    burst = [(0.0, 3, 2)] * 400
    trickle = [(50.0 + 0.05 * number, 3, 2) for number in range(3000)]
    with channel_to(small_sidecar.address) as channel, RawStream(channel) as other:
        wait_until(lambda: isinstance(other.ask(OPEN), SessionOpened), "there is room")
        with RawStream(channel) as stream:
            stream.ask(OPEN)
            stream.send(step(0, arrived=columns(range(2000), [9] * 2000)))
            assert stream.ends_with() == "RESOURCE_EXHAUSTED"
        quick = BreakerSettings(first_backoff_seconds=0.02, longest_backoff_seconds=0.05)
        with client_of(small_sidecar, breaker=quick) as client:
            engine = engine_for(feed(burst + trickle), client)
            run_until(engine, lambda: client.counters.decisions >= 200, "decisions come back after the burst")
            counters = client.counters
            assert counters.fallbacks[FallbackReason.RPC_ERROR] >= 1
            assert counters.reconnects >= 1
            assert counters.resyncs >= 1
            assert counters.fallbacks[FallbackReason.SESSION_ERROR] == 0
            client.close()
        outcome = engine.run()
        assert_same_run(outcome, outcome_in_process(feed(burst + trickle)))
        assert isinstance(other.ask(step(0)), BatchAllocation)
