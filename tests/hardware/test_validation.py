"""The simulated engine against real vLLM runs (public data of LLMServingSim)."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.hardware.validate import RUNS, run_limits, validate
from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import OpenSession

pytestmark = pytest.mark.data

EXACT = ("makespan", "TTFT mean", "TTFT p99", "TPOT mean", "TPOT p50", "TPOT p99")


@pytest.mark.parametrize(("timer", "tolerance"), [("tables", 0.03), ("profile", 0.05)])
def test_engine_reproduces_the_pro_6000_run(data_folder: Path, timer: str, tolerance: float) -> None:
    result = validate("rtxpro6000-tp1", data_folder, timer)
    errors = {name: result.error(name) for name in EXACT}
    assert max(map(abs, errors.values())) <= tolerance, errors
    assert abs(result.error("TTFT p50")) <= 0.10
    assert result.preemptions == 0


@pytest.mark.parametrize("timer", ["tables", "profile"])
def test_engine_is_near_the_4090_run_in_spite_of_its_prefix_cache(data_folder: Path, timer: str) -> None:
    result = validate("rtx4090-tp1", data_folder, timer)
    errors = {measure.name: measure.error for measure in result.measures}
    assert max(map(abs, errors.values())) <= 0.12, errors
    assert result.preemptions > 0


@pytest.mark.parametrize("profile", sorted(RUNS))
def test_policy_vllm_gives_the_same_run_as_the_engine_alone(data_folder: Path, profile: str) -> None:
    source = InProcessSource()
    source.open(OpenSession(run_limits(profile)))
    assert validate(profile, data_folder, "profile", source) == validate(profile, data_folder, "profile")
