"""`mode` and `sessions`: an operator at the command line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.sidecar_process import SidecarProcess
from slidingserve.contract.values import BatchAllocation, EngineInfo, Mode, OpenSession, SessionOpened
from tests.cli.runner import complaint, run, run_here
from tests.service.support import RawStream, channel_to, free_address, wait_ready
from tests.strategies import LIMITS, columns, step

HEADINGS = ["session", "engine", "mode", "policy", "model", "open", "steps", "live", "run", "wait", "cut", "paths"]
ENGINE = EngineInfo("toy", "1.2", "pod-[red]a", "tiny", 2, 1, 3)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with SidecarProcess() as process:
        wait_ready(process)
        yield process


@pytest.fixture
def stream(sidecar: SidecarProcess) -> Iterator[RawStream]:
    """An engine with a session, and two requests after one step."""
    with channel_to(sidecar.address) as channel, RawStream(channel) as stream:
        answer = stream.ask(OpenSession(LIMITS, engine=ENGINE, mode=Mode.ACTIVE))
        assert isinstance(answer, SessionOpened)
        stream.session = answer.session  # type: ignore[attr-defined]
        stream.ask(step(0, arrived=columns([1, 2], [9, 30])))
        yield stream


def mode_of(answer: object) -> Mode:
    assert isinstance(answer, BatchAllocation)
    return answer.mode


def test_mode_of_one_session(sidecar: SidecarProcess, stream: RawStream) -> None:
    name: str = stream.session  # type: ignore[attr-defined]
    here = ("--address", sidecar.address, "--session", name)
    assert run_here("mode", "shadow", *here).stdout == f"session {name}: active -> shadow\n"
    assert mode_of(stream.ask(step(1, free=30))) is Mode.SHADOW
    assert run_here("mode", "shadow", *here).stdout == f"session {name}: is shadow already\n"
    ended = run_here("mode", "off", "--session", name, SLIDINGSERVE_LISTEN=sidecar.address)
    assert (ended.status, ended.stdout, ended.stderr) == (0, f"session {name}: shadow -> off\n", "")
    assert mode_of(stream.ask(step(2, free=30))) is Mode.OFF


def test_mode_of_all_tells_of_those_to_come(sidecar: SidecarProcess, stream: RawStream) -> None:
    name: str = stream.session  # type: ignore[attr-defined]
    lines = run_here("mode", "off", "--address", sidecar.address).stdout.splitlines()
    assert f"session {name}: active -> off" in lines
    assert lines[-1] == "sessions that open from now on: off"
    assert mode_of(stream.ask(step(1, free=30))) is Mode.OFF
    assert run_here("mode", "active", "--address", sidecar.address).status == 0
    assert mode_of(stream.ask(step(2, free=30))) is Mode.ACTIVE


def test_sessions_as_a_table_and_as_json(sidecar: SidecarProcess, stream: RawStream) -> None:
    name: str = stream.session  # type: ignore[attr-defined]
    ended = run("sessions", "--address", sidecar.address)
    assert (ended.status, ended.stderr) == (0, "")
    heading, *rows = ended.stdout.splitlines()
    assert heading.split() == HEADINGS
    (row,) = [row for row in rows if row.startswith(f"{name} ")]
    assert "toy 1.2 pod-[red]a tiny" in row, "whatever an engine calls itself is shown as it is"
    assert row.split()[5:7] == ["active", "vllm/1"]
    assert row.split()[-6:] == ["1", "2", "0", "2", "0", "fcfs:1"]
    document = json.loads(run_here("sessions", "--address", sidecar.address, "--json").stdout)
    (entry,) = [entry for entry in document["sessions"] if entry["session"] == name]
    assert entry.pop("open_seconds") >= 0
    assert entry == {
        "session": name,
        "engine": {
            "name": "toy",
            "version": "1.2",
            "instance": "pod-[red]a",
            "model": "tiny",
            "tensor_parallel": 2,
            "pipeline_parallel": 1,
            "data_parallel_rank": 3,
        },
        "policy": "vllm",
        "policy_version": "vllm/1",
        "model_version": "",
        "mode": "active",
        "answered_steps": 1,
        "last_step": 0,
        "live_requests": 2,
        "running_requests": 0,
        "waiting_requests": 2,
        "guarded_rows": 0,
        "decision_paths": {"fcfs": 1},
    }


def test_unknown_session_and_wrong_mode_are_named(sidecar: SidecarProcess) -> None:
    message = complaint(run_here("mode", "off", "--address", sidecar.address, "--session", "nope"))
    assert message.startswith("session = nope: no ")
    assert complaint(run_here("mode", "on")) == "mode 'on': give one of off, shadow, active"
    assert complaint(run_here("mode", "off", "--session", "")).startswith("--session '': give the name")


def test_nobody_listens(tmp_path: Path) -> None:
    left_over = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left_over))
    for address in (f"unix:{tmp_path}/none.sock", f"unix:{left_over}", free_address()):
        for arguments in (("mode", "off"), ("sessions",), ("sessions", "--json")):
            message = complaint(run_here(*arguments, "--address", address))
            assert message.startswith(f"no sidecar listens at {address}; start `slidingserve serve`")


def test_address_that_is_none_is_named_with_its_source() -> None:
    assert complaint(run_here("sessions", "--address", "")).startswith("--address '': give unix:")
    assert complaint(run_here("sessions", "--address", "host")).startswith("--address 'host': give unix:")
    message = complaint(run_here("sessions", SLIDINGSERVE_LISTEN="host:99999"))
    assert message.startswith("SLIDINGSERVE_LISTEN 'host:99999': give unix:")


def test_address_for_health_checks_has_no_control() -> None:
    probes = free_address()
    with SidecarProcess(("--health-listen", probes)) as process:
        wait_ready(process, probes)
        message = complaint(run_here("mode", "off", "--address", probes))
    assert message.startswith(f"{probes} has no control service; ")


def test_no_session_is_told() -> None:
    with SidecarProcess() as process:
        wait_ready(process)
        assert run_here("sessions", "--address", process.address).stdout == f"no session is open at {process.address}\n"
        document = json.loads(run_here("sessions", "--address", process.address, "--json").stdout)
        assert document == {"schema": 1, "sessions": []}
        said = run_here("mode", "shadow", "--address", process.address).stdout
        assert said == "no session is open; sessions that open from now on: shadow\n"
