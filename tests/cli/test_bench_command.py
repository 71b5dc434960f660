"""`slidingserve bench`: that it measures what it says, its output, and what it says of bad input. No time is judged."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bench import report
from evaluation.bench.core import STATES, measure_core, scenes
from evaluation.bench.kernels import STEP_TOKENS, realistic_fill, repeat_time_to_budget
from evaluation.bench.loads import make_load, open_source
from evaluation.bench.run import QUICK, BenchRequest, BenchResult, Effort, run_bench
from evaluation.bench.states import ANCHORS, MOST_TOKENS, NOW_SECONDS, BenchFailed, Rewinder, Scene, engine_limits
from evaluation.bench.transport import run_iterations
from predictor.features import TOKENS
from predictor.files import load_model
from predictor.forecast import fill_seconds, time_to_budget
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.constructor import gather
from sidecar.policies.slidingserve.decision import PATHS as PATHS_OF_POLICY
from sidecar.policies.slidingserve.decision import decide_batch
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.policy import make_rules
from sidecar.policies.slidingserve.workspace import FACTS, make_workspace
from slidingserve.contract.values import BatchAllocation, OpenSession
from tests.cli.runner import complaint, run, run_here, run_on_a_terminal

PROFILE = "h100-tp1"
TINY = Effort(
    round_trip_sizes=(32,),
    round_trips=20,
    core_sizes=(32,),
    decisions=20,
    kernel_blocks=2,
    codec_sizes=(32,),
    codec_repeats=5,
    engine_requests=8,
    engine_iterations=40,
    engine_rounds=2,
)
PATHS = {"decodes": "decode", "prompts": "chunker", "turnover": "chunker", "risk": "constructor"}
"""What `slidingserve` has to decide by in each state."""


@pytest.fixture(scope="module")
def tiny() -> BenchResult:
    return run_bench(BenchRequest(profile=PROFILE, effort=TINY))


def assert_complete(results: dict[str, Any], core_sizes: tuple[int, ...], round_trip_sizes: tuple[int, ...]) -> None:
    """Every section is there, every figure positive, every path the one that the state is made for."""
    runs = [(run["load"], run["transport"], run["requests"]) for run in results["round_trips"]]
    assert sorted(runs) == sorted(
        (load, transport, size)
        for load in ("decoding", "turnover")
        for transport in ("unix", "tcp")
        for size in round_trip_sizes
    )
    for one in results["round_trips"]:
        assert sum(one["decisions_by_path"].values()) == one["round_trips"]
        assert one["round_trip_p50_ms"] > one["core_p50_us"] / 1e3, "the core is a part of the round trip"
        if one["load"] == "decoding":
            assert one["decisions_by_path"] == {"decode": one["round_trips"]}
            assert one["mean_live_requests"] == one["mean_batch_requests"] == one["requests"]
    decided = {(run["policy"], run["state"], run["requests"]): run["path"] for run in results["decisions"]}
    assert decided == {
        (policy, state, size): path
        for policy in ("slidingserve", "mode=paper")
        for state, path in PATHS.items()
        for size in core_sizes
        if (policy, state) != ("mode=paper", "turnover")
    }
    assert {(run["policy"], run["load"]) for run in results["engine"]} == {
        (policy, load) for policy in ("slidingserve", "vllm") for load in ("decoding", "turnover")
    }
    measured = [*results["round_trips"], *results["decisions"], results["predictor"], *results["codec"]]
    for figures in (*measured, *results["engine"]):
        times = {name: value for name, value in figures.items() if name.endswith(("_us", "_ms", "_bytes"))}
        rates = {name: value for name, value in figures.items() if "_per_second" in name}
        assert times or rates
        assert all(value > 0 for value in (*times.values(), *rates.values())), figures
        for name in times:
            if "_p50_" in name:
                assert times[name] <= times[name.replace("_p50_", "_p99_")]


def test_every_section_is_measured(tiny: BenchResult) -> None:
    results = json.loads(json.dumps(report.to_json(tiny)))
    assert_complete(results, TINY.core_sizes, TINY.round_trip_sizes)
    assert results["schema"] == 1
    assert results["machine"]["cpus"] >= 1
    assert results["machine"]["packages"].keys() >= {"slidingserve", "numba", "numpy", "grpcio", "protobuf"}
    assert results["model_version"] == load_model(PROFILE).version
    assert results["profile"] == PROFILE


def test_screen_is_plain_and_fits(tiny: BenchResult) -> None:
    many = replace(tiny, decisions=tuple(replace(cost, requests=16_384, batch=16_384) for cost in tiny.decisions))
    for result in (tiny, many):
        lines = report.render(result).splitlines()
        assert all(len(line) <= report.WIDTH and line.isascii() and line == line.rstrip() for line in lines)
    text = report.render(tiny)
    for words in ("Round trip", "Decision core", "Predictor", "Codec", "Iterations per second", "vary", "constructor"):
        assert words in text
    assert all(words in text for words in STATES.values())


@pytest.mark.parametrize("requests", [32, 256, 1000])
@pytest.mark.parametrize("mode", ["robust", "paper"])
def test_constructor_has_eight_anchors_and_real_knapsacks(mode: str, requests: int) -> None:
    """Decides the state once more by the policy's kernel, whose buffers tell what happened."""
    limits, model = engine_limits(requests), load_model(PROFILE)
    opening = OpenSession(limits, policy="slidingserve", policy_parameters={"mode": mode}, profile=PROFILE)
    scene = dict(scenes(opening, requests))["risk"]
    rewinder = Rewinder(opening)
    rewinder.rewind(scene)
    assert rewinder.decide(scene).decision_path == "constructor"
    queues = rewinder.session.mirror.queues  # as the decision found them
    assert (len(queues.running_slots), len(queues.waiting_slots)) == (requests // 2, requests // 2)

    parameters, context = SlidingServeParameters(mode=mode), PolicyContext(limits, PROFILE)
    policy = SlidingServePolicy(parameters, context, model)
    rule_rows, fact_rows = make_rules(parameters.resolved(), context, policy.max_tokens), np.zeros(1, FACTS)
    work, packed, plan = make_workspace(queues.capacity, rule_rows[0]), model.pack(), Plan(queues.capacity)
    free_blocks = scene.snapshot.iteration.free_kv_blocks
    count, _, _, path, kept, _ = decide_batch(
        *queues.arrays,
        plan.entries,
        plan.victims,
        plan.demoted,
        True,
        NOW_SECONDS,
        free_blocks,
        1e4,
        work,
        rule_rows,
        fact_rows,
        packed,
    )
    assert PATHS_OF_POLICY[path] == "constructor"
    assert count > requests // 2
    rules, facts = rule_rows[0], fact_rows[0]
    rows = int(facts["rows"])
    full_budget = min(max(rules["budget"], requests // 2 + rules["step_tokens"]), work.fill[rows, TOKENS])
    full_seconds = fill_seconds(work.fill, rows, full_budget, work.scratch, packed)
    order = work.pool[work.lines["row"][:kept]]
    assert len(order) == requests // 2
    assert np.sum((order["slack"] > 0) & (order["slack"] < full_seconds)) == ANCHORS
    anchors = work.lines["risk"][:ANCHORS].tolist()
    assert sorted(anchors) == np.flatnonzero(order["slack"] < full_seconds).tolist()
    knapsacks = 0
    for anchor in anchors:
        candidates, capacity, _, _ = gather(work, kept, rows, anchor, rule_rows[0], fact_rows[0], packed)
        assert capacity >= 0, "each of them can be saved"
        cells = capacity // int(rules["knapsack_step_tokens"])
        knapsacks += 0 < cells < int(work.lines["weight"][:candidates].sum())
    assert knapsacks == ANCHORS, "what competes does not all fit"


def test_core_of_another_policy_has_the_same_states() -> None:
    costs = list(measure_core("vllm", {}, PROFILE, (32,), 3, lambda what: None))
    assert [cost.state for cost in costs] == list(STATES)
    assert {(cost.label, cost.path) for cost in costs} == {("vllm", "fcfs")}
    assert all(cost.core.p50 > 0 for cost in costs)


def test_state_that_is_decided_by_two_paths_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, calls = Rewinder.decide, iter(range(1_000_000))

    def changing(self: Rewinder, scene: Scene) -> BatchAllocation:
        return decide(self, scene)._replace(decision_path=f"path {next(calls) % 2}")

    monkeypatch.setattr(Rewinder, "decide", changing)
    with pytest.raises(BenchFailed, match="different paths: path 0, path 1"):
        list(measure_core("vllm", {}, PROFILE, (32,), 3, lambda what: None))


def test_requests_come_and_go_at_the_number_asked_for() -> None:
    opening = OpenSession(engine_limits(48), policy="slidingserve", profile=PROFILE)
    timer = ProfileTimer(load_profile(PROFILE))
    engine = SimulatedEngine(
        make_load("turnover", 48, 2000, opening, timer), opening.limits, timer, open_source(opening)
    )
    run_iterations(engine, 1000)
    finished = engine.finished
    assert 36 < run_iterations(engine, 1000) < 60
    assert engine.finished - finished > 200


def test_time_to_budget_is_measured_where_it_looks_at_every_budget() -> None:
    fill, rows = realistic_fill()
    scratch, model = np.zeros(fill.shape[1]), load_model(PROFILE).pack()
    highest = float(MOST_TOKENS)
    assert fill[rows, TOKENS] > MOST_TOKENS
    assert time_to_budget(0.0, highest, STEP_TOKENS, fill, rows, scratch, model) == fill[0, TOKENS]
    once = time_to_budget(0.03, highest, STEP_TOKENS, fill, rows, scratch, model)
    assert repeat_time_to_budget(7, 0.03, MOST_TOKENS, fill, rows, scratch, model) == 7 * once


def test_one_section_alone(tmp_path: Path) -> None:
    ended = run_here("bench", "--quick", "--only", "codec", "--json", str(tmp_path / "bench.json"))
    assert ended.status == 0, ended
    assert ended.stderr == "", "no progress without a terminal"
    assert "Codec" in ended.stdout
    assert "Round trip" not in ended.stdout
    results = json.loads((tmp_path / "bench.json").read_text())
    assert [row["requests"] for row in results["codec"]] == [32, 256, 1024]
    assert (results["round_trips"], results["decisions"], results["predictor"], results["engine"]) == ([], [], None, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; use one of"),
        (("--policy", "slidingserve:nope=1"), "'nope'"),
        (("--policy", "slidingserve:window=9"), "give a number from 1 to 4"),
        (("--policy", "slidingserve:window"), "name:key=value"),
        (("--profile", "nope"), "nope"),
        (("--only", "nope"), "--only nope: give one of roundtrip, core, codec, engine"),
        (("--json", "/nowhere/bench.json"), "there is no folder /nowhere"),
    ],
)
def test_bad_option_is_named_with_its_value_and_remedy(arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(run_here("bench", *arguments))


def test_sidecar_that_does_not_come_up_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such thing as a module' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    message = complaint(run_here("bench", "--quick", "--only", "roundtrip", "--policy", "vllm"))
    assert message == "the sidecar ended with status 3; it said: no such thing as a module"


def test_folder_that_holds_no_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    message = complaint(run_here("bench", "--quick", "--only", "roundtrip", "--policy", "vllm"))
    assert "/nowhere" in message
    assert "TMPDIR" in message


def test_progress_is_shown_on_a_terminal_alone() -> None:
    status, results, shown = run_on_a_terminal("bench", "--quick", "--only", "codec", "--json", "-")
    assert status == 0
    assert b"starting" in shown
    json.loads(results)


@pytest.mark.long
def test_quick_run_says_everything_as_json() -> None:
    ended = run("bench", "--quick", "--json", "-")
    assert ended.status == 0, ended.stderr
    assert ended.stderr == "", "no progress without a terminal, no words of gRPC"
    assert_complete(json.loads(ended.stdout), QUICK.core_sizes, QUICK.round_trip_sizes)
