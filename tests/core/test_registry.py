"""Policies by name and their parameters from text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Optional

import pytest

from sidecar.policies import registry
from sidecar.policies.base import PolicyContext
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import ErrorReason, OpenSession, SessionError, SessionOpened
from tests.core.toy_policies import ToyPolicy, toys
from tests.strategies import LIMITS, batch, columns, decide, opened, step


@dataclass(frozen=True, slots=True)
class Settings:
    """One of each kind."""

    count: int = 3
    share: float = 0.5
    eager: bool = False
    label: str = "x"
    most: int | None = None
    least: Optional[int] = None  # noqa: UP045 - policies elsewhere may write it so

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError("share", "give a number above 0, at most 1")
        if self.label == "bad":
            raise ValueError("labels are good")


@pytest.fixture(autouse=True)
def built() -> Iterator[list[Any]]:
    """The parameters that the policy `kinds` was built with."""
    seen: list[Any] = []

    def build(parameters: Any, context: PolicyContext) -> ToyPolicy:
        seen.append(parameters)
        if parameters.label == "h900":
            raise registry.UnknownProfileError("there is no profile 'h900'; use one of: h100")
        return ToyPolicy("kinds/1", lambda queues, iteration, plan: None)

    with toys():
        registry.register("kinds", Settings, build, "one of each")
        yield seen


def test_text_becomes_parameters(built: list[Any]) -> None:
    text = {"count": "7", "share": "0.25", "eager": "TRUE", "label": "a b", "most": "4", "least": "2"}
    opened(policy="kinds", policy_parameters=text)
    opened(policy="kinds")
    assert built == [Settings(7, 0.25, True, "a b", 4, 2), Settings()]


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("count", "7.5", "a whole number"),
        ("count", "", "a whole number"),
        ("most", "none", "a whole number"),
        ("share", "half", "a number"),
        ("share", "nan", "a number"),
        ("share", "inf", "a number"),
        ("share", "0", "above 0"),
        ("eager", "1", "true or false"),
        ("colour", "red", "count, eager, label, least, most, share"),
    ],
)
def test_wrong_parameter_names_name_value_and_remedy(name: str, text: str, remedy: str) -> None:
    answer = Session("wrong").handle(OpenSession(LIMITS, policy="kinds", policy_parameters={name: text}))
    assert isinstance(answer, SessionError)
    assert answer.reason is ErrorReason.INVALID_POLICY_PARAMETER
    assert (answer.field, answer.value) == (f"open_session.policy_parameters['{name}']", text)
    assert remedy in answer.remedy


def test_parameters_that_do_not_go_together_are_refused() -> None:
    answer = Session("wrong").handle(OpenSession(LIMITS, policy="kinds", policy_parameters={"label": "bad"}))
    assert isinstance(answer, SessionError)
    assert answer.reason is ErrorReason.INVALID_POLICY_PARAMETER
    assert answer.remedy == "labels are good"


def test_unknown_profile() -> None:
    opening = OpenSession(LIMITS, policy="kinds", policy_parameters={"label": "h900"}, profile="h900")
    answer = Session("wrong").handle(opening)
    assert isinstance(answer, SessionError)
    assert (answer.reason, answer.field, answer.value) == (
        ErrorReason.UNKNOWN_PROFILE,
        "open_session.profile",
        "h900",
    )
    assert "h100" in answer.remedy


def test_sidecars_parameters_hold_only_for_the_sidecars_policy(built: list[Any]) -> None:
    defaults = SessionDefaults("kinds", {"count": "9", "share": "0.1"})
    for opening in (
        OpenSession(LIMITS),
        OpenSession(LIMITS, policy_parameters={"count": "2"}),
        OpenSession(LIMITS, policy="kinds", policy_parameters={"count": "2"}),
    ):
        answer = Session("defaults", defaults).handle(opening)
        assert isinstance(answer, SessionOpened)
        assert answer.policy == "kinds"
    assert built == [Settings(9, 0.1), Settings(2, 0.1), Settings(2)]


def test_policies_are_listed_by_name() -> None:
    names = [entry.name for entry in registry.registrations()]
    assert names == sorted(names)
    assert {"kinds", "shortest", "vllm"} <= set(names)
    with pytest.raises(registry.UnknownPolicyError, match=r"'nope'.*explore, kinds, .*shortest, slidingserve, .*vllm"):
        registry.find("nope")


def test_same_factory_may_register_again() -> None:
    entry = registry.find("vllm")
    registry.register("vllm", entry.parameters, entry.factory, entry.summary)
    assert batch(decide(opened(policy="vllm"), step(0, arrived=columns([1], [3])))) == [(1, 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm", ("vllm", {})),
        ("vllm:", ("vllm", {})),
        ("vllm:max_tokens=5", ("vllm", {"max_tokens": "5"})),
        ("vllm:max_tokens=5, max_sequences=2,", ("vllm", {"max_tokens": "5", "max_sequences": "2"})),
        ("a:url=http://b:1", ("a", {"url": "http://b:1"})),
        ("a:equation=x=y", ("a", {"equation": "x=y"})),
    ],
)
def test_spec(text: str, expected: tuple[str, dict[str, str]]) -> None:
    assert registry.parse_spec(text) == expected


@pytest.mark.parametrize("text", ["", ":a=1", "vllm:max_tokens", "vllm:=5", "vllm:a=1,b"])
def test_wrong_spec(text: str) -> None:
    with pytest.raises(ValueError, match="write name:key=value"):
        registry.parse_spec(text)


def test_a_package_that_cannot_be_imported_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("theirs", "no.such.module", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    assert "vllm" in [entry.name for entry in registry.registrations()]
    assert list(registry.broken_packages()) == ["theirs"]
    with pytest.raises(registry.UnknownPolicyError, match=r"policy 'theirs': no\.such\.module cannot be imported"):
        registry.find("theirs")
    with pytest.raises(registry.UnknownPolicyError, match=r"unknown policy 'other'; use one of: .*vllm"):
        registry.find("other")
