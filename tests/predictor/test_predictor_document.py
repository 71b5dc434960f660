"""What docs/predictor.md says of the models and shows as code is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.hardware.batches import draw_batches
from predictor.files import load_model, model_names

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "predictor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", model_names())
def test_the_table_holds_the_errors_of_the_model_files(name: str) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    shown = re.findall(r"\d+\.\d+", row.split("|", 2)[2])
    errors = load_model(name).errors
    expected = [errors["all"][metric] for metric in ("mae_ms", "rmse_ms", "r2", "mape_percent")]
    for scenario in ("decode", "prefill", "mixed", "mixed_small"):
        expected += [errors[scenario]["mae_ms"], errors[scenario]["mape_percent"]]
    assert len(shown) == len(expected)
    for figure, exact in zip(shown, expected, strict=True):
        half_a_digit = 0.51 * 10.0 ** -len(figure.split(".")[1])
        assert float(figure) == pytest.approx(exact, abs=half_a_digit)


def test_the_code_fits_a_model_to_measured_iterations(tmp_path: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    names: dict[str, Any] = {}
    exec(code[0], names)
    batches = draw_batches(500, np.random.default_rng(4), kv_tokens=100_000)
    measured = batches.seconds(ProfileTimer(load_profile("a100-tp1")))
    written = names["fit"](list(batches), measured, tmp_path / "my-gpu.json")
    assert load_model(tmp_path / "my-gpu.json") == written
    assert written.experts["mixed"].samples == 250
