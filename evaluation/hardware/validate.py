"""The simulated engine against real vLLM runs: same requests, same limits, who is how far off.

The runs are LLMServingSim's (300 ShareGPT requests, vLLM 0.19; ``llmservingsim/vllm_run_*`` in the data folder). A
request counts as arrived when the real engine had queued it, so that HTTP and tokenizer are not part of the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import IterationTimer, ProfileTimer
from engine_adapter.source import DecisionSource
from evaluation.hardware.catalog import hardware
from evaluation.hardware.tables import read_csv
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits, Floats

RUNS = {
    "rtxpro6000-tp1": ("vllm_run_rtxpro6000_llama-3.1-8b_requests.csv", 128),
    "rtx4090-tp1": ("vllm_run_rtx4090_llama-3.1-8b_requests.csv", 256),
}
"""Profile: file of the real run, its max_num_seqs. Both had max_num_batched_tokens 2048; the RTX 4090 run had prefix
caching on, which the simulated engine does not model."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity of a run, in seconds, real and simulated."""

    name: str
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.real - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """One simulated run beside the real one; timer is "tables" or "profile"."""

    profile: str
    timer: str
    measures: tuple[Measure, ...]
    iterations: int
    preemptions: int

    def error(self, name: str) -> float:
        """Returns the relative error of one measure."""
        return next(measure.error for measure in self.measures if measure.name == name)


def validate(profile: str, folder: Path, timer: str, source: DecisionSource | None = None) -> Validation:
    """Simulates a real run with the engine's own policy (or ``source``) and compares.

    Args:
        profile: a key of `RUNS`.
        folder: the data folder.
        timer: "tables" (measured kernel tables) or "profile" (the built-in fit).
        source: who decides; must be open for the limits of `run_limits`.

    Raises:
        DataError: the run or the tables are not in the folder.
    """
    frame = read_csv(folder, f"llmservingsim/{RUNS[profile][0]}")
    columns = {name: frame[name].to_numpy(np.float64) for name in frame.columns}
    workload = _workload(profile, columns)
    clock: IterationTimer = (
        ProfileTimer(load_profile(profile)) if timer == "profile" else hardware(profile).build_timer(folder)
    )
    outcome = SimulatedEngine(workload, run_limits(profile), clock, source).run()
    return Validation(profile, timer, _compare(columns, outcome), outcome.iterations, outcome.preemptions)


def run_limits(profile: str) -> EngineLimits:
    """Returns the limits of the real run."""
    entry = hardware(profile)
    return EngineLimits(2048, RUNS[profile][1], entry.kv_blocks, 16)


def _workload(profile: str, columns: dict[str, Floats]) -> Workload:
    order = np.argsort(columns["queued_s"], kind="stable")
    for name in columns:
        columns[name] = columns[name][order]
    count = len(order)
    return Workload(
        name=f"real run on {profile}",
        arrival_seconds=columns["queued_s"],
        prompt_tokens=columns["prompt_tokens"].astype(np.int64),
        output_tokens=columns["output_tokens"].astype(np.int64),
        ttft_slo_seconds=np.ones(count),
        tbt_slo_seconds=np.ones(count),
        ttlt_slo_seconds=np.zeros(count),
        class_index=np.zeros(count, np.int64),
        class_names=(),
        rate=0.0,
    )


def _compare(real: dict[str, Floats], outcome: Outcome) -> tuple[Measure, ...]:
    def latencies(arrival: Floats, first: Floats, last: Floats, tokens: Floats) -> dict[str, Floats]:
        return {"TTFT": first - arrival, "TPOT": ((last - first) / np.maximum(tokens - 1, 1))[tokens > 1]}

    theirs = latencies(real["queued_s"], real["first_token_s"], real["last_token_s"], real["output_tokens"])
    ours = latencies(
        outcome.arrival_seconds,
        outcome.first_token_seconds,
        outcome.last_token_seconds,
        outcome.output_tokens.astype(np.float64),
    )
    measures = [Measure("makespan", float(real["last_token_s"].max()), outcome.makespan_seconds)]
    for name in ("TTFT", "TPOT"):
        measures.append(Measure(f"{name} mean", float(theirs[name].mean()), float(ours[name].mean())))
        for percent in (50, 90, 99):
            pair = (float(np.percentile(side[name], percent)) for side in (theirs, ours))
            measures.append(Measure(f"{name} p{percent}", *pair))
    return tuple(measures)
