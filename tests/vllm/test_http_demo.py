"""`slidingserve demo vllm` as a user runs it, with few requests: a real vLLM, real sidecars, real streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from evaluation.engines.stage import OWN_POLICY
from tests.cli.runner import command, environment
from tests.service.support import wait_until

pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")
pytestmark = [pytest.mark.vllm, pytest.mark.long]

REQUESTS = 12
POLICIES = ("slidingserve", "vllm:max_tokens=256")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """One run: its JSON, its table, and what it said on the way."""
    file = tmp_path_factory.mktemp("demo") / "results.json"
    policies = [part for policy in POLICIES for part in ("--policy", policy)]
    ended = subprocess.run(
        command("demo", "vllm", *policies, "--requests", str(REQUESTS), "--json", str(file)),
        capture_output=True,
        text=True,
        timeout=900,
        env=environment(),
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(file.read_text()), ended.stdout, ended.stderr


def test_every_policy_serves_every_request(shown: tuple[dict[str, Any], str, str]) -> None:
    document, _, _ = shown
    assert [run["policy"] for run in document["runs"]] == [OWN_POLICY, *POLICIES]
    assert document["requests"] == REQUESTS
    for run in document["runs"]:
        assert run["failed_requests"] == 0
        assert 0.0 <= run["met"]["deadline"] <= 1.0
        for name in ("ttft_seconds", "tbt_seconds"):
            assert 0.0 < run[name]["p50"] <= run[name]["p90"] <= run[name]["p99"]


def test_vllm_decides_alone_until_a_sidecar_is_there(shown: tuple[dict[str, Any], str, str]) -> None:
    document, _, _ = shown
    own, *ours = document["runs"]
    assert own["planned_share"] in (None, 0.0)
    assert all(run["planned_share"] > 0.0 for run in ours)


def test_latency_model_is_of_this_machine(shown: tuple[dict[str, Any], str, str]) -> None:
    document, _, _ = shown
    assert document["measured_iterations"] >= 50
    slos = document["slos"]
    assert 0.0 < slos["chat"]["tbt_seconds"] < slos["chat"]["ttft_seconds"] < slos["document"]["ttft_seconds"]


def test_table_and_progress(shown: tuple[dict[str, Any], str, str]) -> None:
    _, table, said = shown
    for policy in (OWN_POLICY, *POLICIES):
        assert any(line.startswith(policy) for line in table.splitlines())
        assert f"] {policy}: requests arrive for " in said
    assert "starting vLLM" in said
    assert "warming up" in said


def test_ended_early_it_leaves_no_engine_behind(tmp_path: Path) -> None:
    """SIGTERM while the server starts: workers that went on would hold the memory of a GPU."""
    said = tmp_path / "said"
    with said.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sidecar", "demo", "vllm"], stderr=stream, stdout=stream, env=environment()
        )
    ours = psutil.Process(process.pid)

    def children() -> list[psutil.Process]:
        return [child for child in ours.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]

    def has_engine() -> bool:
        assert process.poll() is None, said.read_text()
        # The server and, below it, the engine core and its workers.
        return len(children()) >= 4

    wait_until(has_engine, "the engine is being started", 120.0)
    started = children()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    wait_until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started),
        "everything that was started has ended",
    )
