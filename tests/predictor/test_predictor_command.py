"""``slidingserve predictor``: what it prints, what it writes, what it says when it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.simulated.profiles import load_profile, write_profile
from predictor import files
from predictor.files import load_model, model_names, write_model
from predictor.model import linear_model
from tests.cli.runner import complaint, run, run_here
from tests.hardware.test_profiles import small_profile


def test_list_shows_every_model_and_the_paper() -> None:
    ended = run_here("predictor", "list")
    assert ended.status == 0
    for name in model_names():
        model = load_model(name)
        line = next(line for line in ended.stdout.splitlines() if name in line)
        for figure in (f"@{model.digest[:8]}", "6000", f"{model.errors['all']['mae_ms']:.3f}"):
            assert figure in line
    paper = next(line for line in ended.stdout.splitlines() if "RTX 3090 TP2" in line)
    assert all(figure in paper for figure in ("2.640", "4.330", "0.9956"))
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_show_prints_facts_errors_weights_and_a_picture() -> None:
    ended = run_here("predictor", "show", "rtx4090-tp1")
    model = load_model("rtx4090-tp1")
    assert ended.status == 0
    assert model.version in ended.stdout
    assert "seed 0" in ended.stdout
    assert f"{model.errors['mixed_small']['mape_percent']:.2f}" in ended.stdout
    assert "paper, A100" in ended.stdout
    assert f"{1e6 * model.experts['decode'].weights[3]:.6g}" in ended.stdout
    picture = ended.stdout[ended.stdout.index(f"{model.version} over hardware profile rtx4090-tp1") :]
    assert picture.isascii()
    assert "2000 drawn iterations not fitted to: MAE " in picture
    assert "predicted, ms" in picture
    assert "measured, ms" in picture
    assert picture.count("@") > 8


def test_show_writes_a_png(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    ended = run_here("predictor", "show", "h100-tp1", "--png", str(file))
    assert ended.status == 0
    assert f"wrote {file}" in ended.stdout
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_fit_prints_errors_and_writes_where_told(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "models"
    ended = run_here("predictor", "fit", "h100-tp1", "--seed", "5", "--out", str(folder))
    assert ended.status == 0
    written = load_model(folder / "h100-tp1.json")
    assert "seed 5" in written.provenance
    assert written.digest != load_model("h100-tp1").digest
    assert written.version in ended.stdout
    for scenario, errors in written.errors.items():
        line = next(line for line in ended.stdout.splitlines() if f" {scenario} " in line)
        assert f"{errors['mae_ms']:.3f}" in line
    assert f"wrote {folder / 'h100-tp1.json'}" in ended.stdout
    assert [f.name for f in folder.iterdir()] == ["h100-tp1.json"]


def test_a_profile_of_ones_own_is_fitted_and_shown(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    write_profile(small_profile(name="lab", kv_blocks=2000, max_tokens_per_iteration=256), own)
    assert run_here("predictor", "fit", str(own), "--out", str(tmp_path / "models")).status == 0
    model = str(tmp_path / "models" / "lab.json")
    assert load_model(model).profile == "lab"
    message = complaint(run_here("predictor", "show", model))
    assert "unknown profile 'lab'" in message
    assert "--profile" in message
    shown = run_here("predictor", "show", model, "--profile", str(own))
    assert shown.status == 0
    assert "over hardware profile lab" in shown.stdout


def test_writing_replaces_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import predictor

    monkeypatch.setattr(predictor, "__file__", str(tmp_path / "__init__.py"))
    assert run_here("predictor", "fit", "a100-tp1", "--write").status == 0
    assert load_model(tmp_path / "models" / "a100-tp1.json").profile == "a100-tp1"


@pytest.mark.data
def test_the_kernel_tables_measure_when_given(data_folder: Path, tmp_path: Path) -> None:
    ended = run_here("predictor", "fit", "rtx4090-tp1", "--data", str(data_folder), "--out", str(tmp_path))
    assert ended.status == 0
    model = load_model(tmp_path / "rtx4090-tp1.json")
    assert "measured kernel tables of rtx4090-tp1" in model.provenance
    shown = run_here("predictor", "show", "rtx4090-tp1", "--data", str(data_folder))
    assert "over measured kernel tables of rtx4090-tp1" in shown.stdout


@pytest.fixture
def odd_files(tmp_path: Path) -> dict[str, str]:
    """Files that are no good models, and a file where a folder should be."""
    document: dict[str, Any] = json.loads((Path(files.__file__).parent / "models" / "a100-tp1.json").read_text())
    contents = {
        "altered": json.dumps({**document, "profile": "h100-tp1"}),
        "newer": json.dumps({**document, "schema": 9}),
        "foreign": '{"kind": "grocery list"}',
        "corrupt": '{"kind": ',
        "plain": "not a folder",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    write_profile(small_profile(), tmp_path / "small.json")
    write_model(linear_model("nowhere", 0.01), tmp_path / "orphan.json")
    return {name: str(tmp_path / f"{name}.json") for name in (*contents, "small", "orphan")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "gtx1080"], "no built-in latency model for profile 'gtx1080'; there is one for a100-tp1"),
        (["show", "nowhere.json"], "nowhere.json: cannot be read"),
        (["show", "{corrupt}"], "not JSON"),
        (["show", "{foreign}"], "kind is 'grocery list'"),
        (["show", "{newer}"], "schema 9 is newer than 1; upgrade slidingserve"),
        (["show", "{altered}"], "undo the change"),
        (["show", "{orphan}"], "unknown profile 'nowhere'"),
        (["show", "a100-tp1", "--profile", "gtx1080"], "unknown profile 'gtx1080'"),
        (["show", "a100-tp1", "--data", "nowhere"], "'nowhere' has no llmservingsim/"),
        (["show", "a100-tp1", "--png", "{plain}/picture.png"], "cannot be written"),
        (["fit"], "either a PROFILE or --all"),
        (["fit", "a100-tp1", "--all"], "either a PROFILE or --all"),
        (["fit", "gtx1080"], "unknown profile 'gtx1080': choose one of a100-tp1"),
        (["fit", "nowhere.json"], "nowhere.json: cannot be read"),
        (["fit", "{foreign}"], "schema is None"),
        (["fit", "{small}"], "kv_tokens is 1600"),
        (["fit", "a100-tp1", "--data", "nowhere"], "'nowhere' has no llmservingsim/"),
        (["fit", "{small}", "--data", "nowhere"], "unknown hardware 'small'"),
        (["fit", "a100-tp1", "--out", "{plain}/models"], "cannot be written"),
        (["fit", "a100-tp1", "--out", "{plain}"], "cannot be written"),
    ],
)
def test_one_message_says_what_is_wrong(arguments: list[str], says: str, odd_files: dict[str, str]) -> None:
    assert says in complaint(run_here("predictor", *(argument.format(**odd_files) for argument in arguments)))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("sklearn.linear_model", ["fit", "a100-tp1"]),
        ("matplotlib.figure", ["show", "a100-tp1", "--png", "picture.png"]),
    ],
)
def test_a_missing_extra_is_named(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'slidingserve[fit]'" in complaint(run_here("predictor", *arguments))


def test_a_picture_as_text_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sklearn", "sklearn.linear_model", "matplotlib", "matplotlib.figure", "scipy", "pandas"):
        monkeypatch.setitem(sys.modules, module, None)
    assert run_here("predictor", "show", "a100-tp1").status == 0


def test_the_command_as_users_run_it() -> None:
    ended = run("predictor", "show", "rtxpro6000-tp2")
    assert ended.status == 0, ended.stderr
    assert ended.stderr == ""
    assert load_profile("rtxpro6000-tp2").digest[:8] in ended.stdout
