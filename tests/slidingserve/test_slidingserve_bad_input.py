"""Bad parameters, models and profiles are refused by name, value and remedy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from predictor import files
from predictor.files import model_names, write_model
from predictor.model import Expert, LatencyModel
from sidecar.policies import registry
from sidecar.policies.base import PolicyContext
from sidecar.policies.registry import PolicyParameterError, UnknownProfileError
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.parameters import MODES, SlidingServeParameters
from sidecar.session.machine import Session
from slidingserve.contract.values import (
    BatchAllocation,
    ErrorReason,
    OpenSession,
    SessionError,
    SessionOpened,
)
from tests.slidingserve.scenes import LIMITS, Scene, decoding, linear, prompt
from tests.strategies import (
    columns,
    decide,
    step,
)

PROFILE = "rtx3090-tp2"
CONTEXT = PolicyContext(LIMITS, PROFILE)

# Both ends of every number, as documented; the ends themselves are allowed.
RANGES: dict[str, tuple[str, str, str, str]] = {
    "max_tokens": ("-1", "0", "1000000", "1000001"),
    "max_stretch": ("0.99", "1.0", "1000", "1000.5"),
    "alpha": ("-0.001", "0", "1e6", "1000000.5"),
    "eps_seconds": ("0.0000009", "1e-6", "60", "60.001"),
    "throughput_window": ("0", "1", "10000", "10001"),
    "safety": ("0.49", "0.5", "10", "10.01"),
    "tolerance_tokens": ("1", "2", "100000", "100001"),
    "window": ("0", "1", "4", "5"),
    "step_tokens": ("0", "1", "4096", "4097"),
    "knapsack_step_tokens": ("0", "1", "4096", "4097"),
    "max_anchors": ("-1", "0", "100000", "100001"),
    "max_candidates": ("-1", "0", "100000", "100001"),
}
KINDS = {entry.name: str(entry.type) for entry in fields(SlidingServeParameters) if "ClassVar" not in str(entry.type)}
SWITCHES = [name for name, kind in KINDS.items() if kind.startswith("bool")]


def built(**parameters: str) -> SlidingServePolicy:
    policy = registry.build("slidingserve", parameters, CONTEXT)
    assert isinstance(policy, SlidingServePolicy)
    return policy


def refused(**parameters: str) -> PolicyParameterError:
    """The refusal; it names parameter, value and remedy, in words."""
    with pytest.raises(PolicyParameterError) as caught:
        registry.build("slidingserve", parameters, CONTEXT)
    error = caught.value
    assert parameters[error.name] == error.value
    for part in ("policy 'slidingserve'", repr(error.name), repr(error.value), error.remedy):
        assert part in str(error)
    assert len(re.findall(r"[A-Za-z]{2,}", error.remedy)) >= 2, error.remedy
    assert not re.search(r"Traceback|object at|<class", str(error))
    return error


def test_every_number_has_a_range() -> None:
    assert set(RANGES) == {name for name, kind in KINDS.items() if kind.startswith(("int", "float"))}


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_range(name: str) -> None:
    below, lowest, highest, above = RANGES[name]
    for text in (below, above):
        error = refused(**{name: text})
        assert error.name == name
        assert f"{float(lowest):g} to {float(highest):g}" in error.remedy
    for text in (lowest, highest):
        built(**{name: text})


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("mode", MODES)
def test_policies_at_the_ends_of_a_range_decide(name: str, mode: str) -> None:
    scene = Scene([prompt(500), prompt(900, 0.02), prompt(80, -1.0), *[decoding(0.05)] * 3])
    for text in RANGES[name][1:3]:
        value = float(text) if KINDS[name].startswith("float") else int(text)
        decision = scene.decide(linear(0.005, 20e-6), mode=mode, **{name: value})
        assert [decision.tokens[place] for place in (3, 4, 5)] == [1, 1, 1]
        assert math.isfinite(decision.predicted_seconds)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("text", ["", "many", "nan", "inf", "-inf", "0x10", "1,5", "9" * 400])
def test_numbers_that_are_none(name: str, text: str) -> None:
    error = refused(**{name: text})
    assert error.name == name
    assert re.search(r"give a (whole )?number", error.remedy)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.startswith("int")])
def test_whole_numbers(name: str) -> None:
    assert "give a whole number" in refused(**{name: "2.5"}).remedy


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str) -> None:
    for text in ("", "1", "yes", "on", "none"):
        assert refused(**{name: text}).remedy == "give true or false"
    for text in ("true", "FALSE"):
        built(**{name: text})


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mode", ["robust", "paper"]),
        ("objective", ["min_time", "max_tokens"]),
        ("protect", ["none", "priority", "running"]),
    ],
)
def test_choices(name: str, known: list[str]) -> None:
    for text in ("", "best", known[0].upper()):
        assert refused(**{name: text}).remedy == f"give one of {', '.join(known)}"
    for text in known:
        built(**{name: text})


def test_unknown_parameters_are_told_which_there_are() -> None:
    error = refused(colour="red")
    assert (error.name, error.value) == ("colour", "red")
    for name in KINDS:
        assert name in error.remedy
    assert "presets" not in error.remedy


@pytest.mark.parametrize("window", ["1", "3", "4"])
def test_the_objective_that_looks_two_iterations_ahead(window: str) -> None:
    error = refused(objective="max_tokens", window=window)
    assert error.name == "objective"
    assert "leave window at 2" in error.remedy
    built(objective="max_tokens", window="2")


def opening(profile: str = PROFILE, **parameters: str) -> OpenSession:
    return OpenSession(LIMITS, policy="slidingserve", policy_parameters=parameters, profile=profile)


def not_opened(message: OpenSession, reason: ErrorReason, field: str, value: str) -> str:
    """What the session says; the refusal is about that field, and the session can be opened rightly afterwards."""
    session = Session("refused")
    answer = session.handle(message)
    assert isinstance(answer, SessionError), answer
    assert (answer.reason, answer.field, answer.value) == (reason, field, value)
    assert answer.remedy
    assert answer.remedy in answer.message
    assert "Traceback" not in answer.message
    for usable in (session, Session("another")):
        assert isinstance(usable.handle(opening()), SessionOpened)
        assert isinstance(usable.handle(step(0, arrived=columns([1], [5]))), BatchAllocation)
    return answer.remedy


def test_parameter_in_a_session() -> None:
    remedy = not_opened(
        opening(window="9"),
        ErrorReason.INVALID_POLICY_PARAMETER,
        "open_session.policy_parameters['window']",
        "9",
    )
    assert remedy == "give a number from 1 to 4"


def test_neither_profile_nor_model() -> None:
    with pytest.raises(UnknownProfileError, match="with a profile"):
        registry.build("slidingserve", {}, PolicyContext(LIMITS))
    remedy = not_opened(opening(profile=""), ErrorReason.UNKNOWN_PROFILE, "open_session.profile", "")
    for way_out in ("open the session with a profile", "--profile", "parameter model"):
        assert way_out in remedy


def test_profile_without_a_model() -> None:
    remedy = not_opened(opening(profile="h900-tp9"), ErrorReason.UNKNOWN_PROFILE, "open_session.profile", "h900-tp9")
    assert "h900-tp9" in remedy
    for name in model_names():
        assert name in remedy
    assert "slidingserve predictor fit" in remedy


def test_model_without_a_profile_is_enough() -> None:
    session = Session("model")
    answer = session.handle(opening(profile="", model=PROFILE))
    assert isinstance(answer, SessionOpened)
    assert answer.model_version.startswith(f"{PROFILE}/")
    assert answer.policy_version == "slidingserve/1-robust"


def test_the_sessions_profile_chooses_the_model() -> None:
    for name in model_names():
        answer = Session("profile").handle(opening(profile=name, mode="paper"))
        assert isinstance(answer, SessionOpened)
        assert answer.model_version.startswith(f"{name}/")
        assert answer.policy_version == "slidingserve/1-paper"


GOOD = LatencyModel("paper7/1", PROFILE, {"global": Expert(0.01, (0.0, 0.0, 0.0, 2e-5, 0.0, 2e-5, 0.0), 100)})


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    write_model(GOOD, path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool) -> None:
    document = json.loads(path.read_text())
    change(document)
    if sealed:
        document["digest"] = files._digest(document)
    path.write_text(json.dumps(document))


def test_model_file(model_file: Path) -> None:
    session = Session("file")
    answer = session.handle(opening(model=str(model_file)))
    assert isinstance(answer, SessionOpened)
    assert re.fullmatch(rf"{PROFILE}/paper7/1@[0-9a-f]{{8}}", answer.model_version)
    allocation = decide(session, step(0, arrived=columns([1], [100])))
    assert allocation.predicted_seconds == pytest.approx(0.01 + 100 * 2e-5)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda path: path.unlink(), "cannot be read", "check the path"),
    "a folder": (replace_by_folder, "cannot be read", "check the path"),
    "cut off": (lambda path: path.write_text(path.read_text()[:100]), "not JSON", "slidingserve predictor fit"),
    "empty": (lambda path: path.write_text(""), "not JSON", "slidingserve predictor fit"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "cannot be read as UTF-8", "check the path"),
    "foreign": (lambda path: path.write_text('{"name": "x"}'), "another kind of file", "slidingserve predictor fit"),
    "a list": (lambda path: path.write_text("[1, 2]"), "another kind of file", "slidingserve predictor fit"),
    "newer": (
        lambda path: rewritten(path, lambda document: document.update(schema=2), sealed=True),
        "schema 2 is newer",
        "upgrade slidingserve",
    ),
    "altered": (
        lambda path: rewritten(
            path, lambda document: document["experts"]["global"].update(intercept_seconds=0.5), sealed=False
        ),
        "digest",
        "undo the change",
    ),
    "not a number": (
        lambda path: rewritten(
            path, lambda document: document["experts"]["global"].update(intercept_seconds=math.nan), sealed=True
        ),
        "intercept_seconds is nan",
        "slidingserve predictor fit",
    ),
    "no global expert": (
        lambda path: rewritten(path, lambda document: document["experts"].clear(), sealed=True),
        "expected global",
        "slidingserve predictor fit",
    ),
}


@pytest.mark.parametrize(("spoil", "complaint", "way_out"), BROKEN.values(), ids=BROKEN.keys())
def test_model_file_that_cannot_be_trusted(
    spoil: Callable[[Path], object], complaint: str, way_out: str, model_file: Path
) -> None:
    spoil(model_file)
    remedy = not_opened(
        opening(model=str(model_file)),
        ErrorReason.INVALID_POLICY_PARAMETER,
        "open_session.policy_parameters['model']",
        str(model_file),
    )
    for words in (str(model_file), complaint, way_out):
        assert words in remedy


@pytest.mark.parametrize("name", ["h100-tp9", "no/such/model", "model.txt"])
def test_model_that_is_not_built_in(name: str) -> None:
    remedy = not_opened(
        opening(model=name),
        ErrorReason.INVALID_POLICY_PARAMETER,
        "open_session.policy_parameters['model']",
        name,
    )
    assert PROFILE in remedy
    assert "slidingserve predictor fit" in remedy


@pytest.mark.parametrize("built_in", [True, False])
def test_model_for_another_profile(built_in: bool, model_file: Path) -> None:
    name = PROFILE if built_in else str(model_file)
    remedy = not_opened(
        opening(profile="h100-tp1", model=name),
        ErrorReason.INVALID_POLICY_PARAMETER,
        "open_session.policy_parameters['model']",
        name,
    )
    for words in (repr(PROFILE), "'h100-tp1'", "give the model of that profile"):
        assert words in remedy
