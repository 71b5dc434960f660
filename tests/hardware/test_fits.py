from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_adapter.simulated.profiles import load_profile
from evaluation.hardware import tables
from evaluation.hardware.batches import Scenario, draw_batches
from evaluation.hardware.catalog import HARDWARE, hardware
from evaluation.hardware.fit import fit_profile
from evaluation.hardware.grids import Curve, Grid, fill_gaps
from evaluation.hardware.tables import DataError, resolve_folder

# Mean relative error in percent that a fit may have: all iterations, and mixed ones of at most 128 tokens.
BOUNDS = {
    "a100-tp1": (1.5, 1.5),
    "h100-tp1": (1.5, 1.8),
    "rtx3090-tp2": (3.4, 5.5),
    "rtx4090-tp1": (1.3, 1.6),
    "rtxpro6000-tp1": (1.5, 1.9),
    "rtxpro6000-tp2": (1.9, 2.7),
}


def test_a_curve_goes_on_with_its_slope() -> None:
    curve = Curve(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 30.0]))
    assert curve(0.0) == 10.0
    assert curve(3.0) == 25.0
    assert curve(6.0) == 40.0


def test_a_grid_reproduces_a_multilinear_function_inside_and_above() -> None:
    axes = [np.array([0.0, 1.0, 3.0]), np.array([2.0, 5.0]), np.array([1.0, 4.0])]
    x, y, z = np.meshgrid(*axes, indexing="ij")
    grid = Grid(axes, 1.0 + 2.0 * x + 3.0 * y * z)
    for point in ((0.5, 3.0, 2.0), (3.0, 5.0, 4.0), (7.0, 9.0, 6.0)):
        assert grid(*point) == pytest.approx(1.0 + 2.0 * point[0] + 3.0 * point[1] * point[2])
    assert grid(-5.0, 2.0, 1.0) == grid(0.0, 2.0, 1.0)


def test_a_grid_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Grid([np.array([0.0, 1.0])], np.array([0.0, np.nan]))


def test_gaps_are_filled_linearly_beyond_and_with_the_nearest_before() -> None:
    axes = [np.array([0.0, 1.0]), np.array([1.0, 2.0, 3.0, 5.0])]
    values = np.array([[1.0, 2.0, np.nan, np.nan], [np.nan, 4.0, np.nan, 8.0]])
    filled = fill_gaps(values, axes)
    assert filled[0].tolist() == [1.0, 2.0, 3.0, 5.0]
    assert filled[1] == pytest.approx([4.0, 4.0, 4.0 + 4.0 / 3.0, 8.0])


def test_drawn_batches_fit_the_engine_and_repeat() -> None:
    batches = draw_batches(400, np.random.default_rng(3), kv_tokens=41_408)
    again = draw_batches(400, np.random.default_rng(3), kv_tokens=41_408)
    assert np.array_equal(batches.chunk, again.chunk)
    assert np.array_equal(batches.context, again.context)
    assert batches.total_tokens().max() <= 2048
    for chunk, context in batches:
        assert 0 < len(chunk) <= 256
        assert (chunk + context).sum() <= 41_408
    counts = {scenario: int((batches.scenarios() == scenario).sum()) for scenario in Scenario}
    assert counts == {Scenario.DECODE: 100, Scenario.PREFILL: 100, Scenario.MIXED: 200}


def test_unknown_hardware_names_the_known() -> None:
    with pytest.raises(DataError, match=r"'gtx1080'.*a100-tp1"):
        hardware("gtx1080")


def test_the_data_folder_comes_from_option_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIDINGSERVE_DATA", raising=False)
    with pytest.raises(DataError, match="--data"):
        resolve_folder()
    (tmp_path / "llmservingsim").mkdir()
    monkeypatch.setenv("SLIDINGSERVE_DATA", str(tmp_path))
    assert resolve_folder() == tmp_path
    with pytest.raises(DataError, match=r"attention\.csv"):
        tables.read_vllm_attention(resolve_folder(), "rtx4090_llama-3.1-8b_tp1")


@pytest.mark.data
def test_the_measured_timer_returns_what_was_measured(data_folder: Path) -> None:
    """At points of the tables the time is the sum of their rows: linear layers + logits + 32 layers of attention."""
    stem = "rtx4090_llama-3.1-8b_tp1"
    timer = hardware("rtx4090-tp1").build_timer(data_folder)
    dense, logits = tables.read_vllm_dense(data_folder, stem), tables.read_vllm_logits(data_folder, stem)
    rows = tables.read_csv(data_folder, f"llmservingsim/vllm019_{stem}_attention.csv").set_index(
        ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    )
    for chunk, prefix, requests, kv in ((0, 0, 64, 1024), (512, 4096, 0, 0), (256, 0, 16, 2048), (64, 1024, 32, 512)):
        entries = [(chunk, prefix)] * (chunk > 0) + [(1, kv)] * requests
        chunks, contexts = (np.array(column, np.int64) for column in zip(*entries, strict=True))
        expected = dense(chunk + requests) + logits(len(entries))
        expected += 32e-6 * float(rows.time_us.loc[(chunk, prefix, requests, kv)])
        assert timer.seconds(chunks, contexts, len(entries)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_the_fit_reproduces_the_built_in_profile(name: str, data_folder: Path) -> None:
    built_in = load_profile(name)
    profile, errors = fit_profile(hardware(name), data_folder)
    by_scenario = {row.scenario: row for row in errors}
    everything, small = BOUNDS[name]
    assert by_scenario["all"].mape_percent < everything
    assert by_scenario["mixed_small"].mape_percent < small
    assert by_scenario["all"].r2 > 0.995
    assert built_in.fit_errors is not None
    assert by_scenario["all"].mape_percent == pytest.approx(built_in.fit_errors["all"]["mape_percent"], abs=0.05)
    assert profile.parameters.segment_seconds[-1] == pytest.approx(built_in.parameters.segment_seconds[-1], rel=0.01)
    assert profile.kv_blocks == built_in.kv_blocks


@pytest.mark.data
@pytest.mark.parametrize("entry", HARDWARE, ids=lambda entry: entry.name)
def test_measured_times_stay_sane_outside_the_tables(entry: object, data_folder: Path) -> None:
    timer = hardware(entry.name).build_timer(data_folder)  # type: ignore[attr-defined]
    for chunk, context in (([1], [100_000]), ([2048], [100_000]), ([4096], [0]), ([1] * 600, [800] * 600), ([1], [1])):
        seconds = timer.seconds(np.array(chunk, np.int64), np.array(context, np.int64), len(chunk))
        assert 1e-3 < seconds < 30.0
    assert timer.seconds(np.zeros(0, np.int64), np.zeros(0, np.int64), 0) == 0.0
