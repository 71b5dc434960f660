"""The doctor, with real sockets and a real sidecar; of vLLM here only that it is missing."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.engines.doctor import Finding, examine
from evaluation.engines.vllm_process import PYTHON_VARIABLE
from evaluation.sidecar_process import SidecarProcess
from tests.cli.runner import run


@pytest.fixture(autouse=True)
def no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that has no vLLM, whatever this one has."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))


def findings(**settings: object) -> dict[str, Finding]:
    found = examine(json.dumps({"slidingserve": settings}), {})
    return {finding.what: finding for finding in found}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with SidecarProcess(("--policy", "vllm")) as process:
        yield process


def wait_until_serving(sidecar: SidecarProcess) -> None:
    import time

    end = time.monotonic() + 60
    while "serving" not in sidecar.log:
        sidecar.check()
        assert time.monotonic() < end, sidecar.log
        time.sleep(0.02)


def test_vllm_that_is_not_there_fails_and_says_how_to_install_it() -> None:
    found = findings(target="unix:/tmp/nobody-is-here.sock")
    assert found["vLLM"].state == "fails"
    assert "pip install vllm" in found["vLLM"].found


def test_a_sidecar_that_serves_is_asked_for_policy_and_model(sidecar: SidecarProcess) -> None:
    wait_until_serving(sidecar)
    found = findings(target=sidecar.address)
    assert [found[what].state for what in ("settings", "socket", "sidecar", "policy", "latency model")] == ["ok"] * 5
    assert "uses none" in found["latency model"].found
    found = findings(target=sidecar.address, policy="slidingserve", profile="h100-tp1")
    assert found["policy"].found.startswith("slidingserve")
    assert found["latency model"].state == "ok"


def test_a_policy_that_cannot_be_had_is_the_sidecars_own_words(sidecar: SidecarProcess) -> None:
    wait_until_serving(sidecar)
    found = findings(target=sidecar.address, policy="slidingserve")
    assert found["sidecar"].state == "fails"
    assert "--profile" in found["sidecar"].found


def test_nobody_listens(tmp_path: Path) -> None:
    missing = findings(target=f"unix:{tmp_path}/s.sock")["socket"]
    assert (missing.state, missing.remedy.startswith("start one there: slidingserve serve --listen")) == ("fails", True)
    (tmp_path / "file").touch()
    assert "is no socket" in findings(target=f"unix:{tmp_path}/file")["socket"].found
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(f"{tmp_path}/old.sock")
    assert "nobody listens" in findings(target=f"unix:{tmp_path}/old.sock")["socket"].found
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = json.dumps({"slidingserve": {"target": f"127.0.0.1:{server.getsockname()[1]}"}})
        assert next(finding for finding in examine(config, {}) if finding.what == "socket").state == "ok"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "give"),
        ('{"slidingserve": {"mod": "off"}}', "mod"),
        ('{"slidingserve": {"mode": 3}}', "3"),
    ],
)
def test_settings_that_cannot_be_used_are_named(text: str, named: str) -> None:
    found = {finding.what: finding for finding in examine(text, {})}
    assert found["settings"].state == "fails"
    assert named in found["settings"].found
    assert "socket" not in found


def test_misspelt_variables_are_noticed() -> None:
    found = {finding.what: finding for finding in examine(None, {"SLIDINGSERVE_VLLM_MODUS": "off"})}
    assert "SLIDINGSERVE_VLLM_MODUS" in found["environment"].found


def test_the_command_ends_with_1_and_says_what_follows(tmp_path: Path) -> None:
    config = json.dumps({"slidingserve": {"target": f"unix:{tmp_path}/s.sock"}})
    done = run("doctor", "--vllm", "--additional-config", config)
    assert done.status == 1
    assert "  fails  socket: " in done.stdout
    assert "vLLM serves with its own policy" in done.stdout
    assert run("doctor").status != 0
