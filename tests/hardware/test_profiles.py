from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine_adapter.simulated.profiles import (
    FEATURES,
    HardwareProfile,
    ProfileError,
    TimingParameters,
    load_profile,
    profile_names,
    write_profile,
)
from sidecar.cli.profiles import app

BUILT_IN = ("a100-tp1", "h100-tp1", "rtx3090-tp2", "rtx4090-tp1", "rtxpro6000-tp1", "rtxpro6000-tp2")


def small_profile(**changes: Any) -> HardwareProfile:
    parameters = TimingParameters(
        token_edges=(0, 64, 128),
        segment_seconds=((0.01, 0.012), (0.02, 0.021)),
        feature_seconds=tuple(1e-9 * (i + 1) for i in range(len(FEATURES))),
        parallel_tiles=4.0,
    )
    profile = HardwareProfile("small", "a GPU", 1, "a model", 100, 8, parameters)
    return dataclasses.replace(profile, **changes)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the file's content and gives it the right digest again, as someone who edits by script would."""
    from engine_adapter.simulated import profiles

    document = json.loads(path.read_text())
    del document["digest"]
    change(document)
    path.write_text(json.dumps({**document, "digest": profiles._digest(document)}))


def test_the_built_in_profiles_are_the_six_named_ones() -> None:
    assert profile_names() == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_profile_is_small_and_complete(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.parameters.count <= 130
    assert profile.max_tokens_per_iteration == 2048
    assert profile.kv_block_tokens == 16
    assert profile.provenance
    assert profile.fit_errors is not None
    assert {"all", "decode", "prefill", "mixed", "mixed_small"} == set(profile.fit_errors)
    assert profile.fit_errors["all"]["mape_percent"] < 3.5


@pytest.mark.parametrize(
    ("name", "kv_tokens"),
    # Logged by real runs (rounded down to blocks), and by the formula for 80 GiB less 16.06 GB of weights.
    [("rtx4090-tp1", 41_408), ("rtxpro6000-tp1", 562_064), ("a100-tp1", 467_280)],
)
def test_kv_capacity(name: str, kv_tokens: int) -> None:
    assert load_profile(name).kv_tokens == kv_tokens


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    profile = small_profile(fit_errors={"all": {"mape_percent": 1.5}}, cpu_seconds_per_iteration=1e-4)
    write_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert load_profile(str(tmp_path / "p.json")).digest == profile.digest


def test_the_digest_covers_every_field() -> None:
    digests = {
        small_profile().digest,
        small_profile(kv_blocks=101).digest,
        small_profile(provenance="elsewhere").digest,
        small_profile(
            parameters=dataclasses.replace(small_profile().parameters, segment_seconds=((0.01, 0.012), (0.02, 0.022)))
        ).digest,
    }
    assert len(digests) == 4


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"'gtx1080'.*rtx4090-tp1.*\.json"):
        load_profile("gtx1080")


def test_a_path_outside_the_folder_is_no_profile_name() -> None:
    with pytest.raises(ProfileError, match="unknown profile"):
        load_profile("../profiles/rtx4090-tp1")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent\.json: cannot be read"):
        load_profile(tmp_path / "absent.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b'{"schema": 1}', b"{}"])
def test_a_corrupt_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"broken\.json"):
        load_profile(path)


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(small_profile(), path)
    path.write_text(path.read_text().replace('"kv_blocks": 100', '"kv_blocks": 200'))
    with pytest.raises(ProfileError, match=r"p\.json: digest is .* undo the change or fit it again"):
        load_profile(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(small_profile(), path)
    rewritten(path, lambda d: d.update(schema=2))
    with pytest.raises(ProfileError, match=r"schema 2 is newer than 1; upgrade"):
        load_profile(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_blocks", 0),
        ("kv_blocks", 1.5),
        ("max_sequences", -1),
        ("tensor_parallel", True),
        ("cpu_seconds_per_iteration", -1e-3),
        ("cpu_seconds_per_iteration", float("nan")),
        ("parallel_tiles", 0.0),
        ("token_edges", [0, 128, 64]),
        ("token_edges", [0, 64]),
        ("segment_seconds", [[0.01, 0.02]]),
        ("segment_seconds", [[0.01, 0.02], [0.0, 0.02]]),
        ("segment_seconds", [[0.01, 0.02], [0.02, float("inf")]]),
        ("segment_seconds", [[0.01, 0.02], [0.02, "fast"]]),
        ("feature_seconds", {"decode_requests_to_8": 1e-6}),
        ("feature_seconds", dict.fromkeys(FEATURES, -1e-9)),
        ("feature_seconds", dict.fromkeys(FEATURES, float("inf"))),
    ],
)
def test_impossible_values_are_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "p.json"
    write_profile(small_profile(), path)
    rewritten(path, lambda d: d.update({field: value}))
    with pytest.raises(ProfileError, match=field):
        load_profile(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(small_profile(), path)
    rewritten(path, lambda d: d.pop("max_sequences"))
    with pytest.raises(ProfileError, match="max_sequences"):
        load_profile(path)


def test_an_impossible_profile_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="kv_blocks"):
        write_profile(small_profile(kv_blocks=-1), tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()


def test_the_command_lists_and_shows_profiles() -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in BUILT_IN)
    shown = runner.invoke(app, ["show", "rtx4090-tp1"])
    assert shown.exit_code == 0
    assert "41,408 tokens" in shown.output
    unknown = runner.invoke(app, ["show", "gtx1080"])
    assert unknown.exit_code == 2
    assert "a100-tp1" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "rtx4090-tp1"], "no data folder: pass --data"),
        (["fit"], "either the NAME of a profile or --all"),
        (["fit", "rtx4090-tp1", "--all"], "either the NAME of a profile or --all"),
        (["fit", "rtx4090-tp1", "--data", "nowhere"], "'nowhere' has no llmservingsim/"),
    ],
)
def test_fitting_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.delenv("SLIDINGSERVE_DATA", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
