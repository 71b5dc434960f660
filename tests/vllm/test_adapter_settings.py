"""Settings of the adapter inside vLLM."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.vllm.settings import (
    AdapterSettings,
    RequestClass,
    SettingsError,
    describe,
    load_settings,
    stray_variables,
)
from sidecar.policies.registry import PolicySpecError, parse_spec

KEYS = [row.key for row in describe()]
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "vllm_reference.md"


def section(**values: Any) -> dict[str, Any]:
    return {"slidingserve": values}


def variables(**values: str) -> dict[str, str]:
    return {f"SLIDINGSERVE_VLLM_{key.upper()}": text for key, text in values.items()}


def test_nothing_given_is_the_defaults_and_a_name_of_its_own() -> None:
    settings = load_settings(None, {})
    assert settings.instance.endswith(f"-{os.getpid()}")
    assert len(settings.instance) <= 64
    assert settings == AdapterSettings(instance=settings.instance)


def test_every_field_can_be_set_and_each_listed_default_is_the_default() -> None:
    listed = {row.variable: row.default for row in describe() if row.default}
    assert load_settings(None, {**listed, **variables(instance="a")}) == AdapterSettings(instance="a")
    settings = load_settings(
        section(
            target="10.0.0.7:50051",
            mode="shadow",
            policy="slidingserve:window=4,solver=dp",
            profile="h200",
            ttft_slo_ms=500,
            tbt_slo_ms=50.5,
            ttlt_slo_ms="30000",
            classes={"chat": {"ttft_slo_ms": 300, "tbt_slo_ms": 40, "weight": 2, "priority": -1}, "batch": {}},
            default_class="batch",
            instance="pod-3",
            deadline_ms=3,
            prefetch=False,
            cap_fallback=False,
            starvation_seconds=2,
            waiting_starvation_seconds=60,
            warmup_iterations=0,
            report_seconds=0,
        ),
        {},
    )
    assert settings == AdapterSettings(
        target="10.0.0.7:50051",
        mode="shadow",
        policy="slidingserve",
        policy_parameters={"window": "4", "solver": "dp"},
        profile="h200",
        ttft_slo_seconds=0.5,
        tbt_slo_seconds=0.0505,
        ttlt_slo_seconds=30.0,
        classes={"chat": RequestClass("chat", 0.3, 0.04, weight=2.0, priority=-1), "batch": RequestClass("batch")},
        default_class="batch",
        instance="pod-3",
        deadline_seconds=0.003,
        prefetch=False,
        cap_fallback=False,
        starvation_seconds=2.0,
        waiting_starvation_seconds=60.0,
        warmup_iterations=0,
        report_seconds=0.0,
    )
    unset = [
        entry.name
        for entry in fields(settings)
        if getattr(settings, entry.name) == getattr(AdapterSettings(), entry.name)
    ]
    assert unset == []


def test_the_same_values_as_text_in_the_environment() -> None:
    settings = load_settings(
        {"other": 1},
        variables(
            mode="OFF",
            policy="vllm",
            ttft_slo_ms="250",
            classes='{"chat": {"tbt_slo_ms": 40}}',
            prefetch="true",
            cap_fallback="0",
            warmup_iterations="3",
            report_seconds="",
        ),
    )
    assert (settings.mode, settings.policy, settings.ttft_slo_seconds) == ("off", "vllm", 0.25)
    assert settings.classes == {"chat": RequestClass("chat", tbt_slo_seconds=0.04)}
    assert (settings.prefetch, settings.cap_fallback, settings.warmup_iterations) == (True, False, 3)
    assert settings.report_seconds == 60.0


def test_the_section_wins_over_the_environment_key_by_key() -> None:
    environment = variables(mode="off", profile="a100", policy="vllm")
    settings = load_settings(section(mode="shadow", profile=None, policy=""), environment)
    assert (settings.mode, settings.profile) == ("shadow", "a100")
    assert settings.policy == ""


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("target", "nowhere", "host:port"),
        ("target", "host:99999", "host:port"),
        ("target", "unix:" + "/x" * 60, "107 bytes"),
        ("target", 5, "give a text"),
        ("mode", "on", "off, shadow or active"),
        ("mode", True, "off, shadow or active"),
        ("policy", "vllm:chunk", "key=value"),
        ("policy", ":a=1", "the name is missing"),
        ("ttft_slo_ms", -1, "milliseconds from 1 to 86400000, or 0"),
        ("tbt_slo_ms", 0.05, "milliseconds"),
        ("ttlt_slo_ms", float("nan"), "milliseconds"),
        ("ttft_slo_ms", True, "milliseconds"),
        ("ttft_slo_ms", 10**400, "milliseconds"),
        ("deadline_ms", "soon", "milliseconds from 0.1 to 10000, or 0"),
        ("prefetch", "maybe", "auto, true or false"),
        ("cap_fallback", 2, "true or false"),
        ("starvation_seconds", 0, "seconds from 0.01"),
        ("waiting_starvation_seconds", float("inf"), "seconds from 0.01"),
        ("warmup_iterations", 1.5, "a whole number from 0 to 1000000"),
        ("report_seconds", -1, "or 0"),
        ("instance", "x" * 65, "at most 64 printable characters"),
        ("instance", "a\nb", "printable"),
        ("default_class", "chat", "define it in classes"),
        ("classes", [1], "give an object"),
        ("classes", "{", "this is not JSON"),
        ("classes", "[" * 100_000, "this is not JSON"),
        ("classes", {"": {}}, "1 to 64 printable characters"),
        ("classes", {"chat": 5}, "give an object"),
        ("classes", {"chat": {"ttft_slo_ms": -5}}, "milliseconds"),
        ("classes", {"chat": {"ttft": 5}}, "did you mean ttft_slo_ms?"),
        ("classes", {"chat": {"weight": 0}}, "a weight"),
        ("classes", {"chat": {"priority": 2**31}}, "a whole number"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name_with_value_source_and_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(section(**{key: value}), {})
    assert caught.value.key.startswith(key)
    assert remedy in caught.value.remedy
    assert caught.value.source == "--additional-config, section 'slidingserve'"
    assert str(caught.value).startswith(f"{caught.value.key} = ")
    assert len(str(caught.value)) < 500
    if isinstance(value, str):
        with pytest.raises(SettingsError, match=f"environment variable SLIDINGSERVE_VLLM_{key.upper()}"):
            load_settings(None, variables(**{key: value}))


def test_errors_in_classes_name_class_and_key() -> None:
    with pytest.raises(SettingsError, match=r"^classes\.chat\.tbt_slo_ms = 'x' "):
        load_settings(section(classes={"chat": {"tbt_slo_ms": "x"}}), {})


@pytest.mark.parametrize(
    ("wrong", "meant"), [("ttft_slo", "did you mean ttft_slo_ms"), ("zzz", "there are: target, mode")]
)
def test_keys_that_are_none_are_refused(wrong: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{wrong} = 5 .*{meant}"):
        load_settings(section(**{wrong: 5}), {})


def test_a_section_that_is_no_object_is_refused_and_other_configs_hold_nothing() -> None:
    with pytest.raises(SettingsError, match="give an object"):
        load_settings({"slidingserve": "mode=off"}, {})
    platform: Any = object()
    assert load_settings(platform, {}) == load_settings(None, {})


def test_variables_of_kubernetes_services_do_no_harm_and_misspelt_ones_can_be_found() -> None:
    environment = {
        "SLIDINGSERVE_VLLM_SERVICE_HOST": "10.0.0.1",
        "SLIDINGSERVE_VLLM_SERVICE_PORT_HTTP": "8000",
        "SLIDINGSERVE_VLLM_PORT": "tcp://10.0.0.1:8000",
        "SLIDINGSERVE_VLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SLIDINGSERVE_VLLM_TTFT_SLO": "500",
        "SLIDINGSERVE_VLLM_Q": "",
        "PATH": "",
    }
    assert load_settings(None, environment) == load_settings(None, {})
    assert stray_variables(environment) == {
        "SLIDINGSERVE_VLLM_TTFT_SLO": "SLIDINGSERVE_VLLM_TTFT_SLO_MS",
        "SLIDINGSERVE_VLLM_Q": "",
    }
    assert stray_variables({row.variable: "" for row in describe()}) == {}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text("ab:=, ", max_size=12))
def test_policies_are_split_as_the_sidecar_splits_them(text: str) -> None:
    text = text.strip()
    try:
        name, parameters = parse_spec(text)
    except PolicySpecError:
        name, parameters = "", {}
    try:
        settings = load_settings(section(policy=text), {})
    except SettingsError:
        assert not name.strip() or "" in parameters
    else:
        assert (settings.policy, settings.policy_parameters) == (name.strip(), parameters)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from([*KEYS, "other"]), JSON, max_size=4),
    st.dictionaries(st.sampled_from(KEYS), st.text()),
)
def test_whatever_is_given_settings_or_one_kind_of_error(values: dict[str, Any], texts: dict[str, str]) -> None:
    refused: SettingsError | None = None
    try:
        settings = load_settings({"slidingserve": values}, variables(**texts))
    except SettingsError as error:
        refused = error
    if refused is not None:
        assert refused.key.split(".")[0] in (*KEYS, "other")
        assert refused.remedy in str(refused)
        return
    assert settings.instance
    assert settings.mode in ("off", "shadow", "active")
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        assert not isinstance(value, float) or 0.0 <= value <= 86_400.0


def test_the_reference_lists_every_setting_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(key, default.strip("`"), text) for key, default, text in rows if key in KEYS]
    assert listed[: len(KEYS)] == [(row.key, row.default, row.explanation) for row in describe()]


def test_the_example_of_the_reference_loads() -> None:
    example = re.findall(r"--additional-config '(\{.*?\})'", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    for text in example:
        assert load_settings(json.loads(text), {}).classes
