"""`slidingserve simulate`: results, output, and what it says of bad input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from evaluation.sidecar_process import SidecarFailed
from evaluation.simulate import SimulationRequest
from evaluation.simulate import simulate as run_simulation
from tests.cli.runner import Ended, complaint, run, run_here, run_on_a_terminal
from tests.service.support import wait_until

SMALL = ("--requests", "12", "--rate", "4", "--workload", "sharegpt")
PROMISED = [
    "policy",
    "workload",
    "profile",
    "rate",
    "seed",
    "requests",
    "violations",
    "ttft_seconds",
    "tbt_seconds",
    "decision_seconds",
    "round_trip_seconds",
    "tokens_per_second",
    "fallbacks",
    "allocation_digest",
]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,4\n2023-11-16 18:15:50.95,396,9\n"


@pytest.fixture(scope="module")
def over_grpc(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run whose sidecar must be its own: neither the user's settings, meant for another, nor the folder get in."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("sidecar.py", "grpc.py", "logging.py"):
        (folder / name).write_text("raise SystemExit('the wrong module')")
    return run(
        "simulate",
        *SMALL,
        *("--policy", "vllm", "--policy", "vllm:max_tokens=512", "--json", "-"),
        folder=folder,
        SLIDINGSERVE_POLICY="nope",
        SLIDINGSERVE_CONFIG="/nowhere.toml",
        SLIDINGSERVE_MAX_SESSIONS="0",
    )


def test_json_on_stdout_has_the_promised_keys_first_and_nothing_else_is_said(over_grpc: Ended) -> None:
    assert over_grpc.status == 0, over_grpc.stderr
    assert over_grpc.stderr == "", "no progress without a terminal, no words of gRPC"
    results = json.loads(over_grpc.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(results) == ["schema", "runs"]
    assert results["schema"] == 1
    for result in results["runs"]:
        assert list(result)[: len(PROMISED)] == PROMISED
        assert list(result["violations"]) == ["deadline", "gap", "tpot"]
        assert all(0 <= share <= 1 for share in result["violations"].values())
        for name in ("ttft_seconds", "tbt_seconds"):
            assert list(result[name]) == ["p50", "p90", "p99"]
            assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
        for name in ("decision_seconds", "round_trip_seconds"):
            assert list(result[name]) == ["p50", "p99"]
        assert 0 < result["decision_seconds"]["p50"] < result["round_trip_seconds"]["p50"]
        assert (result["policy"], result["workload"], result["profile"]) == ("vllm", "sharegpt", "rtx3090-tp2")
        assert (result["rate"], result["seed"], result["requests"], result["fallbacks"]) == (4.0, 0, 12, 0)
        assert len(bytes.fromhex(result["allocation_digest"])) == 32
    assert [result["policy_parameters"] for result in results["runs"]] == ["", "max_tokens=512"]


def test_both_transports_give_the_same_allocations(over_grpc: Ended) -> None:
    here = run_here(
        "simulate",
        *SMALL,
        "--policy",
        "vllm",
        "--policy",
        "vllm:max_tokens=512",
        "--transport",
        "inprocess",
        "--json",
        "-",
    )
    same = ("allocation_digest", "violations", "ttft_seconds", "tbt_seconds", "tokens_per_second", "iterations")
    pairs = list(zip(json.loads(over_grpc.stdout)["runs"], json.loads(here.stdout)["runs"], strict=True))
    for wire, process in pairs:
        assert {name: wire[name] for name in same} == {name: process[name] for name in same}
        assert process["round_trip_seconds"] == {"p50": None, "p99": None}
    assert pairs[0][0]["allocation_digest"] != pairs[1][0]["allocation_digest"], "the parameter counts"


def test_seed_and_slos_count() -> None:
    def digest_of(*more: str) -> dict[str, object]:
        options = ("--policy", "vllm", "--transport", "inprocess", "--json", "-")
        ended = run_here("simulate", *SMALL, *options, *more)
        (result,) = json.loads(ended.stdout)["runs"]
        return {name: result[name] for name in ("allocation_digest", "violations")}

    assert digest_of() == digest_of("--seed", "0")
    assert digest_of()["allocation_digest"] != digest_of("--seed", "1")["allocation_digest"]
    strict = digest_of("--ttft-ms", "0.001", "--tbt-ms", "0.001")
    assert strict["violations"] == {"deadline": 1.0, "gap": 1.0, "tpot": 1.0}
    assert strict["allocation_digest"] == digest_of()["allocation_digest"], "this policy does not look at SLOs"


def test_table_on_stdout_and_json_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    ended = run_here("simulate", *SMALL, "--transport", "inprocess", "--json", str(file))
    assert ended.status == 0
    for words in ("SLO attainment", "TTFT", "TBT", "fallbacks", "Decision"):
        assert words in ended.stdout
    assert json.loads(file.read_text())["schema"] == 1
    assert run_here("simulate", *SMALL, "--transport", "inprocess", "--json", str(file)).status == 0


def test_trace_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    ended = run_here("simulate", "--trace", str(trace), "--transport", "inprocess", "--json", "-")
    runs = json.loads(ended.stdout)["runs"]
    assert [(run["policy"], run["workload"], run["requests"]) for run in runs] == [
        ("vllm", "trace.csv", 2),
        ("slidingserve", "trace.csv", 2),
    ]


@pytest.mark.parametrize("place", ["no/results.json", ".", "locked/results.json"])
def test_results_that_cannot_be_written_are_told_before_the_work(place: str, tmp_path: Path) -> None:
    if place.startswith("locked"):
        if os.geteuid() == 0:
            pytest.skip("the superuser may write everywhere")
        (tmp_path / "locked").mkdir(mode=0o500)
    file = tmp_path / place
    message = complaint(run_here("simulate", "--requests", "9999999", "--transport", "inprocess", "--json", str(file)))
    assert message.startswith(f"--json {file}: cannot be written (")
    assert message.endswith("; give another file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; use one of: "),
        (("--policy", "vllm", "--policy", "vllm:max_tokens=-1"), "'max_tokens' = '-1': give 0"),
        (("--policy", "vllm:max_tokens"), "write name:key=value"),
        (("--policy", ""), "the name is missing"),
        (("--profile", "nope"), "unknown profile 'nope': choose one of a100-tp1"),
        (("--profile", "/nowhere.json"), "/nowhere.json"),
        (("--workload", "nope"), "unknown workload 'nope'; choose one of sharegpt"),
        (("--transport", "http"), "--transport http: give one of grpc, inprocess"),
        (("--rate", "-1"), "rate -1"),
        (("--rate", "0"), "rate 0"),
        (("--rate", "nan"), "rate nan"),
        (("--requests", "0"), "0 requests are out of range"),
        (("--requests", "-5"), "-5 requests are out of range"),
        (("--seed", "-1"), "seed -1 is negative"),
        (("--floor-ms", "-1"), "floor -0.001"),
        (("--floor-ms", "nan"), "floor nan"),
        (("--ttft-ms", "0"), "out of range"),
        (("--tbt-ms", "inf"), "out of range"),
        (("--trace", "/nowhere.csv"), "/nowhere.csv"),
    ],
)
def test_bad_option_is_named_with_its_value_and_remedy(arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(run_here("simulate", *arguments))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n", "GeneratedTokens"),
        (TRACE.replace("374", "-374").encode(), "'-374'"),
        (TRACE.replace("15:50.95", "15:40.95").encode(), "sort the rows"),
        (bytes(range(256)) * 10, "trace"),
    ],
    ids=["empty", "missing column", "negative", "unsorted", "binary"],
)
def test_bad_trace_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(content)
    message = complaint(run_here("simulate", "--trace", str(trace)))
    assert str(trace) in message
    assert words in message


def test_progress_is_shown_on_a_terminal_alone() -> None:
    status, results, shown = run_on_a_terminal(
        "simulate", "--requests", "60", "--transport", "inprocess", "--json", "-"
    )
    assert status == 0
    assert b"/60 requests" in shown
    json.loads(results)


def test_sidecar_that_does_not_come_up_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such thing as a module' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    message = complaint(run_here("simulate", *SMALL))
    assert message == "the sidecar ended with status 3; it said: no such thing as a module"


def test_sidecar_that_dies_in_mid_run_ends_the_run() -> None:
    """What the engine's own policy did instead must not be shown as a result."""
    others = set(psutil.Process().children())

    def kill(policy: str, done: int, total: int) -> None:
        (child,) = set(psutil.Process().children()) - others
        if child.status() != psutil.STATUS_ZOMBIE:
            child.kill()
            wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, "the sidecar is dead")

    with pytest.raises(SidecarFailed, match=r"ended with status -9; it said: .*serving"):
        run_simulation(SimulationRequest(policies=("vllm",), requests=40), kill)


BROKEN = """
from dataclasses import dataclass
from sidecar.policies.registry import register

@dataclass(frozen=True)
class Parameters:
    pass

class Broken:
    version, model_version = "broken/1", ""

    def __init__(self, parameters, context):
        pass

    def decide(self, queues, iteration, plan):
        raise KeyError("slack")

register("broken", Parameters, Broken)
"""


@pytest.mark.parametrize("transport", ["grpc", "inprocess"])
def test_policy_that_fails_has_no_results(transport: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[slidingserve.policies]\nbroken = broken\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = run("simulate", "--policy", "broken", "--requests", "5", "--transport", transport, PYTHONPATH=path)
    assert (ended.status, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("slidingserve: policy 'broken")
    assert "slack" in ended.stderr
