"""Workloads by their texts in `slidingserve simulate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.runner import complaint, run_here

QUICK = ("--transport", "inprocess", "--policy", "vllm", "--requests", "12", "--json", "-")


def run_of(*options: str) -> dict[str, Any]:
    ended = run_here("simulate", *QUICK, *options)
    assert (ended.status, ended.stderr) == (0, "")
    (run,) = json.loads(ended.stdout)["runs"]
    return run  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "name", "floor_seconds"),
    [
        (("--workload", "sharegpt"), "sharegpt", 0.2),
        (("--workload", "sharegpt:floor_ms=500", "--floor-ms", "100"), "sharegpt:floor_ms=500", 0.5),
        (("--workload", "sharegpt:slos=absolute"), "sharegpt:slos=absolute", 0.0),
    ],
)
def test_a_floor_in_the_text_wins(options: tuple[str, ...], name: str, floor_seconds: float) -> None:
    run = run_of(*options)
    assert (run["workload"], run["floor_seconds"]) == (name, floor_seconds)


def test_low_and_high_are_rates_where_none_is_asked_for() -> None:
    assert run_of("--workload", "transient")["rate"] == 1.75
    assert run_of("--workload", "transient", "--rate", "3")["rate"] == 3.0


def test_slos_that_cannot_be_kept_are_explained_and_run_all_the_same() -> None:
    ended = run_here("simulate", *QUICK, "--workload", "sharegpt", "--tbt-ms", "1")
    assert ended.status == 0
    assert "note: workload 'sharegpt' on rtx3090-tp2: even an idle engine cannot keep the SLOs of 100 %" in ended.stderr
    assert "TBT SLO 1 ms is below the" in ended.stderr


def test_a_recorded_workload_without_a_folder_names_flag_and_variable() -> None:
    said = complaint(run_here("simulate", *QUICK, "--workload", "azure-conv", SLIDINGSERVE_DATA=""))
    assert "give --data FOLDER or set SLIDINGSERVE_DATA to the folder that holds azure_llm_2023/conv.csv" in said
