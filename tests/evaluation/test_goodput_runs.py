"""Real runs: ending early is exact; sweeps that are interrupted, spread or resumed come to the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.goodput.caps import quick_effort
from evaluation.goodput.points import Point, RunKey
from evaluation.goodput.rates import rate_of
from evaluation.goodput.run import check, shard_of
from evaluation.goodput.runner import Limit, estimated_capacity, run_point
from evaluation.goodput.store import read_points
from evaluation.goodput.sweep import Sweep
from evaluation.goodput.task import Place, Search, run_search
from evaluation.workloads import InfeasibleWorkload, WorkloadError
from sidecar.policies.registry import PolicyParameterError, UnknownPolicyError
from tests.cli.runner import Ended, command, environment, run
from tests.service.support import wait_until

PROFILE, WORKLOAD, REQUESTS = "h100-tp1", "sharegpt:floor_ms=200", 150


def key(rate: float, policy: str = "vllm") -> RunKey:
    return RunKey(PROFILE, WORKLOAD, policy, rate, 0, REQUESTS)


@cache
def whole(rate: float) -> Point:
    return run_point(key(rate))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([40.0, 90.0, 250.0]), st.integers(0, REQUESTS))
def test_a_run_that_is_ended_early_would_have_missed_more_than_was_allowed(rate: float, allowed: int) -> None:
    full, early = whole(rate), run_point(key(rate), allowed)
    if full.missed <= allowed:
        assert early.complete
    if early.complete:
        assert (early.missed, early.missed_by_block) == (full.missed, full.missed_by_block)
    else:
        assert allowed < early.missed <= full.missed


def test_what_is_kept_of_a_run_adds_up() -> None:
    point = whole(250.0)
    assert 0 < point.missed < REQUESTS, "some miss and some do not, or this test shows little"
    assert sum(point.missed_by_block) == point.missed
    assert sum(point.block_sizes) == REQUESTS
    assert point.violations["deadline"] == pytest.approx(point.violation)
    assert point.class_violations == {"sharegpt": pytest.approx(point.violation)}
    assert len(point.ttft_quantiles) == 101
    assert list(point.ttft_quantiles) == sorted(point.ttft_quantiles)
    assert 0 < point.utilisation <= 1


def test_a_search_makes_no_run_twice_and_its_rates_are_those_of_the_grid(tmp_path: Path) -> None:
    search = Search(PROFILE, "arxiv-v1:ttft_ms=400,tbt_ms=15", "vllm", 60, (0,), 6, Limit(0.05))
    found = run_search(search, Place(tmp_path))
    assert found.bracket.meets is not None
    assert found.bracket.fails is not None
    assert 0 < found.bracket.fails - found.bracket.meets <= 6

    def missed(rate: float) -> int:
        return run_point(RunKey(PROFILE, search.workload, "vllm", rate, 0, 60)).missed

    assert missed(found.goodput) <= 3 < missed(rate_of(found.bracket.fails))
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert run_search(search, Place(tmp_path)) == found
    assert (tmp_path / "points.jsonl").read_text().splitlines() == lines
    assert len({p.key for p in read_points(tmp_path)}) == len(lines)


def sweep(policy: str = "vllm", workload: str = WORKLOAD, requests: int = 100) -> Sweep:
    return Sweep((PROFILE,), (workload,), (policy,), quick_effort(requests))


def test_what_cannot_be_run_is_told_before_anything_is(tmp_path: Path) -> None:
    check(sweep(), None)
    with pytest.raises(UnknownPolicyError, match=r"use one of: .*slidingserve.*vllm"):
        check(sweep("nope"), None)
    with pytest.raises(PolicyParameterError, match="unknown parameter"):
        check(sweep("vllm:nope=1"), None)
    with pytest.raises(WorkloadError, match=r"choose one of .*sharegpt"):
        check(sweep(workload="nope"), None)
    with pytest.raises(InfeasibleWorkload, match=r"TBT SLO 1 ms is below .* decodes one request"):
        check(sweep(workload="sharegpt:tbt_ms=1"), None)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},100,10\n" for i in range(50)))
    with pytest.raises(WorkloadError, match="has only 50 requests; ask for at most so many"):
        check(sweep(workload=f"trace={trace}"), None)
    check(sweep(workload=f"trace={trace}", requests=50), None)


def test_the_estimated_capacity_is_about_what_the_hardware_does() -> None:
    assert 20 < estimated_capacity(PROFILE, WORKLOAD, 200) < 200


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_a_shard_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(ValueError, match=f"shard '{text}'"):
        shard_of(text)


SWEEP = (
    *("goodput", "--profile", PROFILE, "--workload", "sharegpt:floor_ms=200", "--workload", "mixed-v1:floor_ms=200"),
    *("--policy", "vllm", "--policy", "sarathi-edf", "--requests", "120", "--seeds", "2", "--cap", "256"),
    *("--cap", "512", "--cap", "1024"),
)


def swept(folder: Path, *more: str) -> Ended:
    ended = run(*SWEEP, "--out", str(folder), *more)
    assert ended.status == 0, ended.stderr
    return ended


def numbers(folder: Path) -> dict[str, Any]:
    """What a sweep came to, without what depends on the time that this machine took."""
    document: dict[str, Any] = json.loads((folder / "goodput.json").read_text())
    for cell in document["cells"]:
        del cell["decision_share"]
    return document


@pytest.fixture(scope="module")
def at_one_go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    swept(folder, "--jobs", "1")
    return folder


@pytest.mark.long
def test_an_interrupted_sweep_goes_on_to_the_same_numbers(at_one_go: Path, tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"

    def lines() -> int:
        return file.read_text().count("\n") if file.exists() else 0

    with subprocess.Popen(
        command(*SWEEP, "--out", str(tmp_path), "--jobs", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        wait_until(lambda: lines() >= 5 or process.poll() is not None, "five runs are kept", 100)
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert f"interrupted; every finished run is in {tmp_path}" in stderr
    assert not (tmp_path / "goodput.json").exists()
    kept = file.read_text()
    assert kept.count("\n") >= 5
    swept(tmp_path, "--jobs", "2")
    assert file.read_text().startswith(kept), "what was finished is still there, and nothing is rewritten"
    assert numbers(tmp_path) == numbers(at_one_go)
    assert {p.key for p in read_points(tmp_path)} == {p.key for p in read_points(at_one_go)}


@pytest.mark.long
def test_shards_together_come_to_the_numbers_of_one_sweep(at_one_go: Path, tmp_path: Path) -> None:
    for shard in ("1/2", "2/2"):
        assert f"shard {shard} is done" in swept(tmp_path, "--shard", shard, "--jobs", "2").stdout
    assert sorted(file.name for file in tmp_path.glob("points*.jsonl")) == ["points-1of2.jsonl", "points-2of2.jsonl"]
    swept(tmp_path)
    assert numbers(tmp_path) == numbers(at_one_go)


@pytest.mark.long
def test_a_sweep_that_is_done_makes_no_further_run(at_one_go: Path) -> None:
    before = (at_one_go / "points.jsonl").read_bytes()
    again = swept(at_one_go)
    assert (at_one_go / "points.jsonl").read_bytes() == before
    assert "goodput" in again.stdout
