"""Model files: what is written is read, and what cannot be trusted is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from predictor import files
from predictor.features import FEATURES
from predictor.files import ModelError, load_model, model_names, read_model, sealed, write_model
from predictor.model import Expert, LatencyModel

MODEL = LatencyModel(
    name="paper7/1",
    profile="a GPU",
    experts={
        "global": Expert(0.01, (1e-9, -1e-9, 2e-7, 3e-5, -1e-7, 6e-5, 0.0), 700),
        "decode": Expert(0.011, (0.0, 0.0, 0.0, 4e-5, 1e-7, 0.0, 0.0), 200),
    },
    table_seconds=(0.0, 0.001, 0.002),
    errors={"all": {"mae_ms": 1.5, "r2": 0.99}},
    provenance="somebody's measurements",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.json"
    write_model(MODEL, file)
    return file


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the file's content and gives it the right digest again, as someone who edits by script would."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps({**document, "digest": files._digest(document)}))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_a_model_survives_its_file(path: Path) -> None:
    read = read_model(path)
    assert dataclasses.replace(read, digest="") == MODEL
    assert read == load_model(str(path)) == sealed(MODEL)
    assert len(read.digest) == 64
    assert read.pack().tolist() == MODEL.pack().tolist()


def test_writing_returns_what_would_be_read(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    assert write_model(MODEL, file) == read_model(file)


def test_the_version_names_profile_kind_and_content(path: Path) -> None:
    read = load_model(path)
    assert read.version == f"a GPU/paper7/1@{read.digest[:8]}"
    assert MODEL.version == "a GPU/paper7/1@unsaved"
    other = sealed(dataclasses.replace(MODEL, table_seconds=(0.0, 0.001)))
    assert other.version != read.version


def test_a_missing_file(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere.json")
    assert "cannot be read" in message
    assert "check the path" in message


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(ModelError, match="check the path"):
        load_model("model\0.json")


def test_an_unknown_name_says_the_known_ones_and_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"'gtx1080'.*predictor fit") as caught:
        load_model("gtx1080")
    assert all(name in str(caught.value) for name in model_names())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe{}", "UTF-8"),
        (b"", "not JSON"),
        (b'{"kind": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1, 2]", "kind is 'list'"),
        (b"null", "kind is 'NoneType'"),
        (b"{}", "kind is None"),
        (b'{"kind": "grocery list", "schema": 1}', "kind is 'grocery list'"),
    ],
)
def test_files_that_hold_no_model(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    message = refusal(file)
    assert why in message
    assert "predictor fit" in message or "check the path" in message


def test_a_hardware_profile_is_another_kind_of_file() -> None:
    from engine_adapter.simulated import profiles

    message = refusal(Path(profiles.__file__).parent / "profiles" / "a100-tp1.json")
    assert "another kind of file" in message


@pytest.mark.parametrize("schema", [None, 0, -1, True, "1", 1.5])
def test_a_schema_that_is_no_number(path: Path, schema: object) -> None:
    rewritten(path, lambda d: d.update(schema=schema))
    assert f"schema is {schema!r}, expected 1" in refusal(path)


def test_a_newer_schema_asks_for_an_upgrade(path: Path) -> None:
    rewritten(path, lambda d: d.update(schema=2))
    message = refusal(path)
    assert "schema 2 is newer than 1" in message
    assert "upgrade slidingserve" in message


def test_an_altered_file_is_refused(path: Path) -> None:
    document = json.loads(path.read_text())
    document["experts"]["global"]["intercept_seconds"] = 0.02
    path.write_text(json.dumps(document))
    message = refusal(path)
    assert document["digest"] in message
    assert "undo the change or fit" in message


@pytest.mark.parametrize(
    "field", ["name", "profile", "experts", "table_seconds", "errors", "provenance", "experts.global.samples"]
)
def test_a_missing_field_is_named(path: Path, field: str) -> None:
    def drop(document: dict[str, Any]) -> None:
        *outer, last = field.split(".")
        for key in outer:
            document = document[key]
        del document[last]

    rewritten(path, drop)
    message = refusal(path)
    assert repr(field.split(".")[-1]) in message
    assert "predictor fit" in message


ZEROS = dict.fromkeys(FEATURES, 0.0)


def expert(**changes: object) -> dict[str, object]:
    good = {"samples": 9, "intercept_seconds": 0.01, "weights_seconds": ZEROS}
    return {"global": {**good, **changes}}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("experts", {}, "experts is []"),
        ("experts", {"decode": expert()["global"]}, "experts is ['decode']"),
        ("experts", {**expert(), "spec": expert()["global"]}, "experts is ['global', 'spec']"),
        ("experts", [], "malformed"),
        ("experts", expert(samples=-1), "experts.global.samples is -1"),
        ("experts", expert(samples=True), "experts.global.samples is True"),
        ("experts", expert(intercept_seconds=float("nan")), "experts.global.intercept_seconds is nan"),
        ("experts", expert(intercept_seconds=10**400), "malformed"),
        ("experts", expert(weights_seconds={"decodes": 1.0}), "does not know context, decode_context"),
        ("experts", expert(weights_seconds={**ZEROS, "luck": 1.0}), "does not know luck"),
        ("experts", expert(weights_seconds={**ZEROS, "decodes": "x"}), "decodes is 'x'"),
        (
            "experts",
            expert(weights_seconds={**ZEROS, "decodes": float("inf")}),
            "decodes is inf",
        ),
        ("experts", expert(weights_seconds=list(FEATURES)), "malformed"),
        ("table_seconds", [0.1], "table_seconds has 1 entry"),
        ("table_seconds", [0.1, None], "table_seconds[1] is None"),
        ("table_seconds", None, "malformed"),
        ("errors", {"all": {"mae_ms": float("nan")}}, "errors.all.mae_ms is nan"),
        ("errors", {"all": 3}, "malformed"),
        ("name", "", "name is ''"),
        ("profile", 7, "profile is 7"),
    ],
)
def test_impossible_values_are_refused_by_name(path: Path, field: str, value: object, says: str) -> None:
    rewritten(path, lambda d: d.update({field: value}))
    message = refusal(path)
    assert says in message
    assert "predictor fit" in message


def test_an_impossible_model_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"table_seconds\[1\] is nan"):
        write_model(dataclasses.replace(MODEL, table_seconds=(0.0, float("nan"))), tmp_path / "model.json")
    assert not (tmp_path / "model.json").exists()
