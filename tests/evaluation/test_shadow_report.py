"""The shadow report: near to what happened, and to what really happens once the engine obeys."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import SHORTEST_SECONDS, ModelTimer, ProfileTimer
from evaluation.scores import score
from evaluation.shadow import ShadowReport, shadow_report
from evaluation.shadow_reading import ShadowError
from evaluation.shadow_screen import render, to_json
from evaluation.simulate import SimulationRequest, engine_limits, make_workload
from evaluation.workloads import Workload
from predictor.features import ROW, batch_features
from predictor.files import ModelError, load_model, write_model
from predictor.model import linear_model
from sidecar.policies.registry import UnknownPolicyError
from slidingserve.contract.values import EngineInfo, Mode, OpenSession
from tests.cli.runner import complaint, run_here
from tests.evaluation.recorded_runs import record
from tests.strategies import LIMITS, LinearTimer, ints, random_feed

PROFILE = load_profile("rtx3090-tp2")
POINTS = 5.0


def workload(requests: int = 200, seed: int = 0) -> Workload:
    return make_workload(SimulationRequest(rate=2.5, requests=requests, seed=seed), PROFILE)


def opening(mode: Mode, **more: object) -> OpenSession:
    session = OpenSession(
        engine_limits(PROFILE),
        engine=EngineInfo("simulated", "1", "pod-0"),
        policy="slidingserve",
        profile=PROFILE.name,
        mode=mode,
    )
    return replace(session, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[Mode, Path]:
    """The same requests, with an engine that goes its own way and one that obeys."""
    folder = tmp_path_factory.mktemp("journals")
    paths = {mode: folder / f"{mode.name.lower()}.journal" for mode in (Mode.SHADOW, Mode.ACTIVE)}
    for mode, path in paths.items():
        record(path, workload(), ProfileTimer(PROFILE), opening(mode))
    return paths


@pytest.fixture(scope="module")
def reports(journals: dict[Mode, Path]) -> dict[Mode, ShadowReport]:
    return {mode: shadow_report([path]) for mode, path in journals.items()}


def met(report: ShadowReport) -> list[float]:
    return [100 * column.met for column in report.columns]


def test_forecast_is_near_to_the_run_in_which_the_engine_obeys(reports: dict[Mode, ShadowReport]) -> None:
    shadow, active = reports[Mode.SHADOW], reports[Mode.ACTIVE]
    assert [column.role for column in shadow.columns] == ["actual", "calibration", "forecast"]
    assert [column.policy for column in shadow.columns] == ["", "vllm", "slidingserve"]
    assert [column.policy for column in active.columns] == ["", "slidingserve", "vllm"]
    went, simulated, forecast = met(shadow)
    assert simulated == pytest.approx(went, abs=POINTS)
    assert forecast == pytest.approx(met(active)[0], abs=POINTS)
    assert met(active)[1] == pytest.approx(met(active)[0], abs=POINTS)
    assert met(active)[2] == pytest.approx(went, abs=POINTS)
    assert forecast - went > 3 * POINTS, "there was something to gain"
    for report in reports.values():
        assert report.is_trusted
        assert report.calibration_points == pytest.approx(met(report)[1] - met(report)[0])
        assert report.warnings == ()
        assert (report.requests, report.unfinished, report.unfollowed) == (199, 1, 0), "nobody reports the last one"
    actual, calibration, _ = shadow.columns
    for name in ("p50", "p90", "p99"):
        for times in ("ttft_seconds", "tbt_seconds"):
            happened, by_model = (getattr(getattr(c.scores, times), name) for c in (actual, calibration))
            assert by_model == pytest.approx(happened, rel=0.15), (times, name)


def test_actual_scores_are_those_of_the_run_itself(journals: dict[Mode, Path], tmp_path: Path) -> None:
    """Read from the journal alone, the scores equal those that the engine itself gives."""
    path = tmp_path / "session.journal"
    requests = workload()
    outcome = record(path, requests, ProfileTimer(PROFILE), opening(Mode.SHADOW))
    last = int(np.argmax(outcome.last_token_seconds))
    kept = np.arange(len(requests)) != last
    columns = {name: getattr(outcome, name)[kept] for name in ("arrival_seconds", "first_token_seconds")}
    scores = score(requests, outcome)
    actual = shadow_report([path]).columns[0].scores
    missed = scores.violations.deadline * len(requests)
    assert actual.violations.deadline * kept.sum() == pytest.approx(missed, abs=1.0)
    waits = columns["first_token_seconds"] - columns["arrival_seconds"]
    assert actual.ttft_seconds.p50 == pytest.approx(float(np.median(waits)))


def test_decisions_are_counted_from_the_journal_alone(reports: dict[Mode, ShadowReport]) -> None:
    (shadow,), (active,) = (reports[mode].sessions for mode in (Mode.SHADOW, Mode.ACTIVE))
    assert shadow.decisions.compared == shadow.decisions.modes[Mode.SHADOW] - 1, "nobody tells what became of the last"
    assert 0.5 < shadow.decisions.equal / shadow.decisions.compared < 1.0
    assert set(shadow.decisions.paths) > {"decode", "chunker"}
    assert shadow.decisions.paths.total() == shadow.decisions.modes.total()
    assert active.decisions.obeyed == active.decisions.active == active.decisions.modes[Mode.ACTIVE] - 1


def test_classes_are_told_apart(reports: dict[Mode, ShadowReport]) -> None:
    report = reports[Mode.SHADOW]
    (session,) = report.sessions
    for column in report.columns:
        assert set(column.met_by_class) == {"sharegpt", "arxiv-v1"}
    names = np.array(session.class_names)[session.requests["class_index"][session.scored]]
    shares = report.columns[0].met_by_class
    weights = {name: int(np.count_nonzero(names == name)) for name in shares}
    assert sum(weights[name] * shares[name] for name in shares) / report.requests == pytest.approx(met(report)[0] / 100)


@pytest.mark.long
def test_further_policies_and_several_journals(journals: dict[Mode, Path], tmp_path: Path) -> None:
    """Engines of different modes: the calibration takes for each what it really ran."""
    other = tmp_path / "other.journal"
    record(other, workload(60, seed=9), ProfileTimer(PROFILE), opening(Mode.OFF))
    paths = [journals[Mode.ACTIVE], other]
    report = shadow_report(paths, ["vllm:max_tokens=512", "vllm"])
    assert [(column.role, column.policy) for column in report.columns] == [
        ("actual", ""),
        ("calibration", ""),
        ("forecast", "vllm"),
        ("forecast", "slidingserve"),
        ("forecast", "vllm:max_tokens=512"),
    ]
    assert report.requests == 199 + 59
    assert report.is_trusted
    one = shadow_report([other])
    assert met(report)[0] * report.requests == pytest.approx(
        met(one)[0] * one.requests + met(shadow_report([journals[Mode.ACTIVE]]))[0] * 199
    )


def test_wrong_model_is_not_to_be_trusted(journals: dict[Mode, Path], tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    write_model(linear_model("elsewhere", 0.1, prefill_tokens=1e-3), path)
    report = shadow_report([journals[Mode.SHADOW]], model=str(path))
    assert not report.is_trusted
    assert report.calibration_points < -5
    assert report.models[0].startswith("elsewhere/")
    assert any("do not trust the forecast" in text for text in report.warnings)
    assert "WARNING: the simulation is off by -" in render(report)
    assert to_json(report)["calibration"]["trusted"] is False


@pytest.mark.long
def test_mixed_modes_and_few_requests_are_told(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    switches = {400: Mode.ACTIVE, 900: Mode.SHADOW}
    record(path, workload(60), ProfileTimer(PROFILE), opening(Mode.SHADOW), switches=switches)
    warnings = shadow_report([path]).warnings
    assert any("its engine obeyed in" in text for text in warnings)
    assert any(text.startswith("only 59 requests: each is worth 1.7 points") for text in warnings)


@pytest.mark.long
def test_model_is_named_where_the_session_names_none(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    record(path, random_feed(1, 30, 60, 12, 0.05), LinearTimer(), OpenSession(LIMITS, mode=Mode.SHADOW))
    with pytest.raises(ShadowError, match=r"session\.journal: its session names no hardware profile.*give --model"):
        shadow_report([path])
    with pytest.raises(ModelError, match="no built-in latency model for profile 'nope'"):
        shadow_report([path], model="nope")
    file = tmp_path / "mine.json"
    write_model(linear_model("mine", 0.01, decodes=1e-3, prefill_tokens=1e-3), file)
    for model in (str(file), "a100-tp1"):
        report = shadow_report([path], ["slidingserve"], model)
        assert [column.policy for column in report.columns] == ["", "vllm", "slidingserve"]
    report = shadow_report([path], model=str(file))
    assert met(report)[1] == pytest.approx(met(report)[0], abs=POINTS), "the timer is the model but for the context"


def test_policies_that_cannot_be_forecast_are_named(journals: dict[Mode, Path], tmp_path: Path) -> None:
    path = journals[Mode.SHADOW]
    with pytest.raises(UnknownPolicyError):
        shadow_report([path], ["nope"])
    plain = tmp_path / "plain.journal"
    session = OpenSession(LIMITS, profile="my-card", mode=Mode.SHADOW)
    record(plain, random_feed(1, 30, 60, 12, 0.05), LinearTimer(), session)
    with pytest.raises(ShadowError, match=r"no built-in latency model for profile 'my-card'.*with --model"):
        shadow_report([plain])
    nothing = tmp_path / "nothing.journal"
    record(nothing, random_feed(1, 1, 60, 12, 0.05), LinearTimer(), opening(Mode.SHADOW, limits=LIMITS))
    with pytest.raises(ShadowError, match="no request was followed from its arrival to its end"):
        shadow_report([nothing])


def test_screen_and_json_say_the_same(reports: dict[Mode, ShadowReport]) -> None:
    report = reports[Mode.SHADOW]
    screen, document = render(report), json.loads(json.dumps(to_json(report), allow_nan=False))
    assert max(map(len, screen.splitlines())) <= 105
    assert screen.isascii()
    assert screen.startswith("199 requests, followed from arrival to end; left out: 1 not finished, 0 not seen")
    (row,) = [line for line in screen.splitlines() if line.startswith("met, deadlines")]
    shares = [column["met"]["deadline"] for column in document["columns"]]
    assert row.split()[3:] == [f"{math.floor(1e3 * share + 1e-6) / 10:.1f}" for share in shares]
    assert "actually   (calibration)      would have" in screen
    assert "shadow decisions: " in screen
    assert "decided by: decode " in screen
    assert [column["role"] for column in document["columns"]] == ["actual", "calibration", "forecast"]
    assert document["sessions"][0]["decisions"]["paths"] == dict(report.sessions[0].decisions.paths)
    assert document["left_out"] == {"unfinished": 1, "unfollowed": 0}


def test_command_prints_the_report_and_names_what_is_wrong(journals: dict[Mode, Path], tmp_path: Path) -> None:
    path = str(journals[Mode.SHADOW])
    ended = run_here("shadow", path, "--json", "-")
    assert (ended.status, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["requests"] == 199
    assert "shadow.journal: simulated 1 pod-0, slidingserve/1-robust, 100 % shadow" in run_here("shadow", path).stdout
    assert complaint(run_here("shadow", str(tmp_path / "none"))).startswith(f"{tmp_path}/none: cannot be read")
    assert complaint(run_here("shadow", path, "--policy", "nope")).startswith("unknown policy 'nope'")
    assert complaint(run_here("shadow", path, "--policy", "vllm:x=1")).startswith("policy 'vllm': parameter 'x'")
    assert complaint(run_here("shadow", path, "--model", "nope")).startswith("no built-in latency model")
    assert complaint(run_here("shadow", path, "--json", str(tmp_path))).startswith(f"--json {tmp_path}: ")


def test_model_timer_is_the_model(tmp_path: Path) -> None:
    model = load_model("a100-tp1")
    timer = ModelTimer(model)
    chunk, context, features = ints(1, 300, 0, 1), ints(40, 20, 5, 900), np.zeros(ROW)
    batch_features(chunk, context, 4, features)
    assert timer.seconds(chunk, context, 4) == model.predict(features[None])[0] > 0.001
    assert timer.seconds(chunk, context, 1) < timer.seconds(chunk, context, 4)
    assert timer.seconds(chunk, context, 0) == 0.0
    assert ModelTimer(linear_model("p", -1.0)).seconds(chunk, context, 4) == SHORTEST_SECONDS
