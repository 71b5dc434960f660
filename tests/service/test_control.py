"""The operator's service: modes switched while sessions run, and what is told of sessions."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from evaluation.sidecar_process import SidecarProcess
from slidingserve.contract.values import BatchAllocation, EngineInfo, Mode, OpenSession, SessionOpened
from slidingserve.control.v1 import control_pb2 as pb
from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub
from slidingserve.scheduler.v1 import scheduler_pb2
from tests.service.support import LONG_SECONDS, RawStream, channel_to, client_of, engine_for, wait_ready, wait_until
from tests.strategies import LIMITS, columns, ints, random_feed, step

OFF, SHADOW, ACTIVE = scheduler_pb2.MODE_OFF, scheduler_pb2.MODE_SHADOW, scheduler_pb2.MODE_ACTIVE


def opening(instance: str, mode: Mode = Mode.UNSPECIFIED) -> OpenSession:
    return OpenSession(LIMITS, engine=EngineInfo("toy", "1.2", instance, "tiny", 2, 1, 3), mode=mode)


def opened(stream: RawStream, message: OpenSession) -> SessionOpened:
    answer = stream.ask(message)
    assert isinstance(answer, SessionOpened), answer
    return answer


def decided(stream: RawStream, number: int, **more: object) -> BatchAllocation:
    answer = stream.ask(step(number, **more))  # type: ignore[arg-type]
    assert isinstance(answer, BatchAllocation), answer
    return answer


def switch(channel: grpc.Channel, mode: int, session: str = "") -> list[tuple[str, int, int]]:
    request = pb.SetModeRequest(mode=mode, session=session)  # type: ignore[arg-type]
    answer = ControlServiceStub(channel).SetMode(request, timeout=LONG_SECONDS)
    return [(entry.session, entry.old_mode, entry.new_mode) for entry in answer.sessions]


def listed(channel: grpc.Channel) -> list[pb.SessionStatus]:
    answer = ControlServiceStub(channel).ListSessions(pb.ListSessionsRequest(), timeout=LONG_SECONDS)
    return list(answer.sessions)


def test_one_live_session_follows_each_switch_and_no_other(sidecar: SidecarProcess, channel: grpc.Channel) -> None:
    with RawStream(channel) as one, RawStream(channel) as other:
        name = opened(one, opening("pod-a")).session
        opened(other, opening("pod-b"))
        first = decided(one, 0, arrived=columns([1, 2], [9, 30]))
        assert (first.mode, first.handles.tolist()) == (Mode.ACTIVE, [1, 2])
        assert switch(channel, OFF, name) == [(name, ACTIVE, OFF)]
        off = decided(one, 1, free=37)
        assert (off.mode, len(off.handles), off.decision_path) == (Mode.OFF, 0, "")
        assert switch(channel, SHADOW, name) == [(name, OFF, SHADOW)]
        # Nothing was executed in step 1; the mirror has both requests where step 0 left them.
        shadowed = decided(one, 2, free=37, applied_exactly=False)
        assert (shadowed.mode, shadowed.handles.tolist(), shadowed.tokens.tolist()) == (Mode.SHADOW, [1, 2], [1, 1])
        assert switch(channel, ACTIVE, name) == [(name, SHADOW, ACTIVE)]
        assert switch(channel, ACTIVE, name) == [(name, ACTIVE, ACTIVE)]
        assert decided(one, 3, free=37, applied_exactly=False).mode is Mode.ACTIVE
        assert decided(other, 0).mode is Mode.ACTIVE
    lines = [line for line in sidecar.log.splitlines() if "mode switched" in line and "instance=pod-a" in line]
    assert [("old=active" in line, "new=off" in line) for line in lines] == [
        (True, True),
        (False, False),
        (False, False),
    ]
    assert all("by=" in line and f"session={name}" in line for line in lines)


def test_sessions_are_told_of_as_they_are(channel: grpc.Channel) -> None:
    with RawStream(channel) as silent, RawStream(channel) as stream:
        silent.send(b"")  # refused: not a session yet
        assert next(silent.call).HasField("session_error")
        answer = opened(stream, opening("pod-c", Mode.SHADOW))
        decided(stream, 0, arrived=columns([1, 2, 3], [9, 30, 40]))
        decided(stream, 1, free=20, finished_handles=ints(2))
        (status,) = [entry for entry in listed(channel) if entry.engine.instance == "pod-c"]
        engine = scheduler_pb2.EngineInfo(
            name="toy",
            version="1.2",
            instance="pod-c",
            model="tiny",
            tensor_parallel=2,
            pipeline_parallel=1,
            data_parallel_rank=3,
        )
        assert status.engine == engine
        assert (status.session, status.mode) == (answer.session, SHADOW)
        assert (status.policy, status.policy_version, status.model_version) == ("vllm", "vllm/1", "")
        assert (status.answered_steps, status.last_step, status.guarded_rows) == (2, 1, 0)
        assert (status.live_requests, status.running_requests, status.waiting_requests) == (2, 2, 0)
        assert dict(status.decision_paths) == {"fcfs": 2}
        assert 0.0 <= status.open_seconds < LONG_SECONDS
        assert len(listed(channel)) == len({entry.session for entry in listed(channel)}), "the silent one is none"
        assert all(entry.policy for entry in listed(channel))
    wait_until(lambda: answer.session not in {entry.session for entry in listed(channel)}, "the session is gone")


def error_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    info = error_details_pb2.ErrorInfo()
    (detail,) = rpc_status.from_call(caught.value).details
    assert detail.Unpack(info)
    assert info.domain == "slidingserve.dev"
    return caught.value.code(), info, str(caught.value.details())


@pytest.mark.parametrize("mode", [0, 4, -1, 2**31 - 1])
def test_wrong_mode_is_named(channel: grpc.Channel, mode: int) -> None:
    code, info, message = error_of(lambda: switch(channel, mode))
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert (info.metadata["field"], info.metadata["value"]) == ("mode", str(mode))
    assert message == f"mode = {mode}: give one of 1 (OFF), 2 (SHADOW), 3 (ACTIVE)"


@pytest.mark.parametrize("name", ["nope", "ü" * 5000])
def test_unknown_session_is_named_and_the_open_ones_are_told(channel: grpc.Channel, name: str) -> None:
    with RawStream(channel) as stream:
        known = opened(stream, opening("pod-d")).session
        code, info, message = error_of(lambda: switch(channel, OFF, name))
        assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SESSION")
        assert info.metadata["field"] == "session"
        assert message.startswith(f"session = {name[:4]}")
        assert known in info.metadata["remedy"].removeprefix("no such session is open; open are: ").split(", ")
        assert decided(stream, 0).mode is Mode.ACTIVE


def test_all_sessions_are_switched_and_those_to_come() -> None:
    """An engine that connects again stays off; one that had not yet opened its session too."""
    with SidecarProcess() as process:
        wait_ready(process)
        with channel_to(process.address) as channel:
            assert switch(channel, SHADOW) == []
            with RawStream(channel) as one, RawStream(channel) as connected:
                assert opened(one, opening("a", Mode.ACTIVE)).mode is Mode.SHADOW
                connected.send(b"")
                next(connected.call)
                assert switch(channel, OFF) == [("1", SHADOW, OFF)]
                assert decided(one, 0).mode is Mode.OFF
                assert opened(connected, opening("b")).mode is Mode.OFF
            with RawStream(channel) as again:
                assert opened(again, opening("a", Mode.ACTIVE)).mode is Mode.OFF
                assert switch(channel, ACTIVE, "3") == [("3", OFF, ACTIVE)]
                assert decided(again, 0).mode is Mode.ACTIVE


def test_setting_wins_over_what_engines_ask_for_and_a_switch_over_the_setting() -> None:
    with SidecarProcess(("--mode", "shadow")) as process:
        wait_ready(process)
        assert "mode=shadow" in process.log
        with channel_to(process.address) as channel, RawStream(channel) as stream:
            assert opened(stream, opening("a", Mode.ACTIVE)).mode is Mode.SHADOW
            switch(channel, ACTIVE)
            assert decided(stream, 0).mode is Mode.ACTIVE


def test_policy_is_compiled_even_where_it_is_off() -> None:
    """A switch to active finds it ready: the first decision is no slower than the others."""
    from sidecar.session.machine import SessionDefaults
    from sidecar.warming import PolicyCannotDecide, warm_up

    with pytest.raises(PolicyCannotDecide):
        warm_up(SessionDefaults("slidingserve", mode=Mode.OFF))  # no profile: it cannot be built, as it is to be
    warm_up(SessionDefaults("vllm", mode=Mode.OFF))


def test_engine_goes_on_through_every_switch(sidecar: SidecarProcess, channel: grpc.Channel) -> None:
    """A client's engine runs to its end without a snapshot, obeying and going its own way in turn."""
    with client_of(sidecar) as client:
        assert client.session is not None
        name = client.session.session
        engine = engine_for(random_feed(4, 40, prompt=40, output=8, gap_seconds=0.05), client)
        modes = [OFF, SHADOW, ACTIVE]
        while engine.step():
            if engine.iterations % 20 == 0:
                switch(channel, modes[engine.iterations // 20 % 3], name)
        (status,) = [entry for entry in listed(channel) if entry.session == name]
        outcome = engine.outcome()
        assert outcome.finished.all()
        assert 0 < outcome.fallbacks < outcome.iterations
        assert status.answered_steps == outcome.iterations == client.counters.decisions
        assert 0 < status.decision_paths["fcfs"] < outcome.iterations
