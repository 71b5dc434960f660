"""Settings: which source wins, and what is said of a value that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidecar.config import DEFAULT_SOCKET, ConfigError, SidecarSettings, load_settings, unknown_variables
from slidingserve.contract.values import Mode, SloDefaults

# For each field: text in the file, text in the environment, value of the flag, and what each becomes.
LAYERS: dict[str, tuple[tuple[str, Any], tuple[str, Any], tuple[Any, Any]]] = {
    "listen": (("'unix:/f'", "unix:/f"), ("unix:/e", "unix:/e"), ("127.0.0.1:5", "127.0.0.1:5")),
    "health_listen": (("'[::]:1'", "[::]:1"), ("h:2", "h:2"), ("h:3", "h:3")),
    "policy": (("'vllm:max_tokens=1'", "vllm:max_tokens=1"), ("vllm:max_tokens=2",) * 2, ("vllm", "vllm")),
    "profile": (("'a'", "a"), ("b", "b"), ("c", "c")),
    "mode": (("'off'", "off"), ("shadow", "shadow"), ("active", "active")),
    "default_ttft_seconds": (("2", 2.0), ("3.5", 3.5), (4.0, 4.0)),
    "default_tbt_seconds": (("0.2", 0.2), ("1e-3", 0.001), (0.4, 0.4)),
    "max_sessions": (("5", 5), ("6", 6), (7, 7)),
    "max_message_bytes": (("5000", 5000), ("6000", 6000), (7000, 7000)),
    "drain_seconds": (("0", 0.0), ("2.5", 2.5), (3.0, 3.0)),
    "journal_dir": (("'/f'", Path("/f")), ("/e", Path("/e")), (Path("/g"), Path("/g"))),
    "log_format": (("'json'", "json"), ("console", "console"), ("json", "json")),
    "log_level": (("'debug'", "debug"), ("error", "error"), ("warning", "warning")),
}


def load(tmp_path: Path, text: str = "", **environment: str) -> tuple[SidecarSettings, dict[str, str]]:
    file = tmp_path / "sidecar.toml"
    file.write_text(text)
    return load_settings(None, file, environment)


def test_the_table_has_every_field() -> None:
    assert set(LAYERS) == set(SidecarSettings.model_fields)


@pytest.mark.parametrize("name", LAYERS)
def test_flags_before_environment_before_file_before_default(name: str, tmp_path: Path) -> None:
    (file_text, from_file), (variable, from_environment), (flag, from_flag) = LAYERS[name]
    file = tmp_path / "sidecar.toml"
    file.write_text(f"{name} = {file_text}\n")
    environment = {f"SLIDINGSERVE_{name.upper()}": variable}
    default = SidecarSettings.model_fields[name].default
    for flags, path, variables, expected in (
        ({name: flag}, file, environment, (from_flag, "flag")),
        ({name: None}, file, environment, (from_environment, "environment")),
        ({}, file, {}, (from_file, str(file))),
        ({}, None, {}, (default, "default")),
        ({name: flag}, None, environment, (from_flag, "flag")),
    ):
        settings, sources = load_settings(flags, path, variables)
        assert (getattr(settings, name), sources[name]) == expected
        assert {source for other, source in sources.items() if other != name} == {"default"}


def test_variable_may_name_the_file(tmp_path: Path) -> None:
    file, other = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text("max_sessions = 3")
    other.write_text("max_sessions = 4")
    assert load_settings({}, None, {"SLIDINGSERVE_CONFIG": str(file)})[0].max_sessions == 3
    assert load_settings({}, other, {"SLIDINGSERVE_CONFIG": str(file)})[0].max_sessions == 4


def test_defaults() -> None:
    settings, sources = load_settings({}, None, {})
    assert settings.listen == DEFAULT_SOCKET
    assert set(sources.values()) == {"default"}
    defaults = settings.session_defaults()
    assert (defaults.policy, defaults.policy_parameters, defaults.profile) == ("vllm", {}, "")
    assert defaults.slos == SloDefaults(1.0, 0.05, 0.0)
    assert defaults.mode is Mode.UNSPECIFIED
    assert load_settings({"mode": "shadow"}, None, {})[0].session_defaults().mode is Mode.SHADOW


def test_session_defaults_follow_the_settings(tmp_path: Path) -> None:
    settings, _ = load(tmp_path, "policy = 'vllm:max_tokens=64,reserve_full_prompt=false'\ndefault_ttft_seconds = 9")
    defaults = settings.session_defaults()
    assert defaults.policy_parameters == {"max_tokens": "64", "reserve_full_prompt": "false"}
    assert defaults.slos.ttft_slo_seconds == 9.0


def test_empty_journal_dir_is_none_and_not_the_current_folder(tmp_path: Path) -> None:
    assert load(tmp_path, "", SLIDINGSERVE_JOURNAL_DIR="")[0].journal_dir is None
    assert load(tmp_path, "journal_dir = ''")[0].journal_dir is None


@pytest.mark.parametrize(
    ("name", "text", "shown", "remedy"),
    [
        ("listen", "nonsense", "'nonsense'", "give unix:/path/of/socket or host:port"),
        ("listen", "unix:", "'unix:'", "give unix:/path"),
        ("listen", "host:99999", "'host:99999'", "host:port"),
        ("listen", "host:²", "'host:²'", "host:port"),
        ("listen", ":5000", "':5000'", "host:port"),
        ("listen", "", "''", "host:port"),
        ("health_listen", "5000", "'5000'", "host:port"),
        ("max_sessions", "0", "'0'", "greater than or equal to 1"),
        ("max_sessions", "-3", "'-3'", "greater than or equal to 1"),
        ("max_sessions", "10001", "'10001'", "less than or equal to 10000"),
        ("max_sessions", "many", "'many'", "valid integer"),
        ("max_sessions", "1.5", "'1.5'", "valid integer"),
        ("max_message_bytes", "10", "'10'", "greater than or equal to 4096"),
        ("default_ttft_seconds", "nan", "'nan'", "finite"),
        ("default_ttft_seconds", "inf", "'inf'", "finite|less than"),
        ("default_ttft_seconds", "-1", "'-1'", "greater than or equal to 0"),
        ("default_tbt_seconds", "-1", "'-1'", "greater than or equal to 0"),
        ("default_tbt_seconds", "soon", "'soon'", "valid number"),
        ("drain_seconds", "-1", "'-1'", "greater than or equal to 0"),
        ("drain_seconds", "nan", "'nan'", "finite"),
        ("log_format", "xml", "'xml'", "'console' or 'json'"),
        ("mode", "on", "'on'", "'off', 'shadow' or 'active'"),
        ("log_level", "loud", "'loud'", "'debug'"),
        ("policy", "nope", "'nope'", "use one of: .*vllm"),
        ("policy", "", "''", "name is missing"),
        ("policy", "vllm:max_tokens", "'vllm:max_tokens'", "write name:key=value"),
        ("policy", "vllm:max_tokens=-1", "'vllm:max_tokens=-1'", "positive number"),
        ("policy", "vllm:max_tokens=x", "'vllm:max_tokens=x'", "whole number"),
        ("policy", "vllm:speed=1", "'vllm:speed=1'", "unknown parameter; it has: .*max_tokens"),
        ("policy", "vllm:reserve_full_prompt=2", "reserve_full_prompt=2", "true or false"),
    ],
)
def test_bad_value_is_named_with_its_source_and_remedy(name: str, text: str, shown: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        load_settings({}, None, {f"SLIDINGSERVE_{name.upper()}": text})
    message = str(caught.value)
    assert message.startswith(f"{name} = ")
    assert shown in message
    assert "(from environment)" in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match=remedy) as caught:
        load_settings({name: text}, None, {})
    assert "(from flag)" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("max_sessions = true", "max_sessions"),
        ("default_ttft_seconds = false", "default_ttft_seconds"),
        ("max_sessions = [1]", "max_sessions"),
        ("policy = 5", "policy"),
        ("listen = 5000", "listen"),
        ("listen = {host = 'x'}", "listen"),
        ("journal_dir = 3", "journal_dir"),
        ("log_level = 2000-01-01", "log_level"),
        ("mode = false", "mode"),
        ("default_tbt_seconds = nan", "default_tbt_seconds"),
    ],
)
def test_wrong_type_in_the_file(line: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, line)
    assert str(caught.value).startswith(f"{name} = ")
    assert f"(from {tmp_path / 'sidecar.toml'}): " in str(caught.value)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "max_sessions = 0\ndrain_seconds = -1", SLIDINGSERVE_LOG_LEVEL="loud")
    lines = str(caught.value).splitlines()
    assert sorted(line.partition(" ")[0] for line in lines) == ["drain_seconds", "log_level", "max_sessions"]


@pytest.mark.parametrize("text", ["polcy = 'vllm'", "[sidecar]\npolicy = 'vllm'"])
def test_unknown_key_in_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting '(polcy|sidecar)'; known are: .*policy") as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "sidecar.toml"))


def test_unknown_variables_are_told_and_not_refused() -> None:
    """Kubernetes sets some of this prefix for a service of this name."""
    variables = {
        "SLIDINGSERVE_POLCY": "vllm",
        "SLIDINGSERVE_SERVICE_HOST": "10.0.0.1",
        "SLIDINGSERVE_POLICY": "vllm",
        "SLIDINGSERVE_DATA": "/data",
        "HOME": "/root",
    }
    load_settings({}, None, variables)
    assert unknown_variables(variables) == ["SLIDINGSERVE_POLCY", "SLIDINGSERVE_SERVICE_HOST"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"policy = vllm", "is not TOML"),
        (b"policy", "is not TOML"),
        (b"a = 1\na = 2", "is not TOML"),
        (b"\xff\xfe\x00", "is not TOML"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_file(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_settings({}, file, {})
    assert str(caught.value).startswith(f"{file}: ")
    assert "; " in str(caught.value)
    with pytest.raises(ConfigError, match=words):
        load_settings({}, None, {"SLIDINGSERVE_CONFIG": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({}, tmp_path, {})


def test_settings_cannot_be_changed() -> None:
    settings, _ = load_settings({}, None, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.policy = "other"
