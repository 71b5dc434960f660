"""Fits a hardware profile to measured iteration times and reports its error on iterations that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.profiles import FEATURES, HardwareProfile, TimingParameters
from engine_adapter.simulated.timing import ProfileTimer, batch_features
from evaluation.hardware.batches import Batches, Scenario, draw_batches
from evaluation.hardware.catalog import MODEL, Hardware
from slidingserve.contract.values import Floats, Ints

# Segments of the staircase over total tokens: GEMM tiles fill at multiples of 64, then 128.
TOKEN_EDGES = (0, 16, 64, *range(128, 1025, 64), *range(1152, 2049, 128))
SMALL_MIXED_TOKENS = 128

# Features that are consecutive segments of one quantity: beyond what iterations can hold, the last slope goes on.
_SEGMENTED = (
    ("decode_requests_to_8", "decode_requests_to_32", "decode_requests_to_128", "decode_requests_above_128"),
    ("decode_kv_to_4k", "decode_kv_to_16k", "decode_kv_to_64k", "decode_kv_to_256k", "decode_kv_above_256k"),
    ("mixed_requests_to_32", "mixed_requests_above_32"),
    ("mixed_kv_to_8k", "mixed_kv_to_32k", "mixed_kv_to_128k", "mixed_kv_to_256k", "mixed_kv_above_256k"),
    ("logits_to_64", "logits_to_128", "logits_to_256", "logits_above_256"),
)
_ENOUGH_ITERATIONS = 20

_REWEIGHTINGS = 4
_RELATIVE_FLOOR = 0.003
_SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors on one scenario: relative in percent, absolute in milliseconds, and the share of variance explained."""

    scenario: str
    count: int
    mape_percent: float
    mae_ms: float
    rmse_ms: float
    r2: float


def fit_profile(
    entry: Hardware, folder: Path, *, seed: int = 0, train: int = 6000, test: int = 2000
) -> tuple[HardwareProfile, list[ErrorRow]]:
    """Fits ``entry`` to its measured timer on ``train`` iterations; errors are those on ``test`` others.

    ``folder`` is the data folder. Takes about 10 s. The catalogue's CPU time is added after the fit.
    """
    timer = entry.build_timer(folder)
    limits = {"kv_tokens": entry.kv_tokens or entry.kv_blocks * 16, "max_sequences": 256}
    rng = np.random.default_rng(seed)
    seen, unseen = draw_batches(train, rng, **limits), draw_batches(test, rng, **limits)
    parameters = fit_parameters(seen, seen.seconds(timer), entry.parallel_tiles)
    kernels_only = HardwareProfile(
        name=entry.name,
        gpu=entry.gpu,
        tensor_parallel=entry.tensor_parallel,
        model=MODEL,
        kv_blocks=entry.kv_blocks,
        max_sequences=entry.max_sequences,
        parameters=parameters,
        provenance=f"{entry.provenance}. Fitted to {train} drawn iterations, seed {seed}; errors on {test} others.",
    )
    errors = error_rows(unseen, unseen.seconds(timer), unseen.seconds(ProfileTimer(kernels_only)))
    table = {
        row.scenario: {
            "mape_percent": round(row.mape_percent, 2),
            "mae_ms": round(row.mae_ms, 3),
            "rmse_ms": round(row.rmse_ms, 3),
            "r2": round(row.r2, 5),
        }
        for row in errors
    }
    profile = replace(kernels_only, fit_errors=table, cpu_seconds_per_iteration=entry.cpu_seconds_per_iteration)
    return profile, errors


def fit_parameters(batches: Batches, seconds: Floats, parallel_tiles: float) -> TimingParameters:
    """Minimises the sum of relative errors over non-negative coefficients: least squares, reweighted towards L1."""
    from scipy.optimize import nnls

    design = design_matrix(batches, parallel_tiles)
    scale = np.maximum(design.max(axis=0), 1e-12)
    weights = 1.0 / seconds
    coefficients = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTINGS):
        coefficients, _ = nnls(design / scale * weights[:, None], seconds * weights, maxiter=50 * design.shape[1])
        error = np.abs(design @ (coefficients / scale) - seconds) / seconds
        weights = 1.0 / (seconds * np.sqrt(np.maximum(error, _RELATIVE_FLOOR)))
    values = [_rounded(v) for v in coefficients / scale]
    segments = len(TOKEN_EDGES) - 1
    counts = (design[:, 2 * segments :] > 0.0).sum(axis=0)
    starts, ends = values[:segments], values[segments : 2 * segments]
    return TimingParameters(
        token_edges=TOKEN_EDGES,
        segment_seconds=_without_zeros(list(zip(starts, ends, strict=True))),
        feature_seconds=_continued(values[2 * segments :], counts >= _ENOUGH_ITERATIONS),
        parallel_tiles=parallel_tiles,
    )


def design_matrix(batches: Batches, parallel_tiles: float) -> Floats:
    """Returns one row per iteration: share of each segment's start, of its end, then `FEATURES`."""
    segments = len(TOKEN_EDGES) - 1
    design = np.zeros((len(batches), 2 * segments + len(FEATURES)))
    edges = np.array(TOKEN_EDGES)
    for row, (chunk, context) in zip(design, batches, strict=True):
        tokens = batch_features(chunk, context, len(chunk), parallel_tiles, row[2 * segments :])
        at = int(np.searchsorted(edges, tokens)) - 1
        share = (tokens - edges[at] - 1) / max(1, edges[at + 1] - edges[at] - 1)
        row[at], row[segments + at] = 1.0 - share, share
    return design


def error_rows(batches: Batches, measured: Floats, fitted: Floats) -> list[ErrorRow]:
    """Returns the errors over all iterations, by scenario, and for mixed iterations of few tokens."""
    return grouped_errors(batches.scenarios(), batches.total_tokens(), measured, fitted)


def grouped_errors(scenarios: Ints, tokens: Ints, measured: Floats, fitted: Floats) -> list[ErrorRow]:
    """As `error_rows`, from each iteration's scenario and total tokens."""
    groups = {"all": scenarios >= 0}
    groups |= {s.name.lower(): scenarios == s for s in Scenario}
    groups["mixed_small"] = (scenarios == Scenario.MIXED) & (tokens <= SMALL_MIXED_TOKENS)
    return [_row(name, measured[at], fitted[at]) for name, at in groups.items() if at.any()]


def _row(name: str, measured: Floats, fitted: Floats) -> ErrorRow:
    error = fitted - measured
    variance = float(((measured - measured.mean()) ** 2).sum())
    return ErrorRow(
        scenario=name,
        count=len(measured),
        mape_percent=float(100.0 * np.mean(np.abs(error) / measured)),
        mae_ms=float(1e3 * np.mean(np.abs(error))),
        rmse_ms=float(1e3 * np.sqrt(np.mean(error**2))),
        r2=1.0 - float((error**2).sum()) / variance if variance > 0.0 else 0.0,
    )


def _continued(coefficients: list[float], determined: NDArray[np.bool_]) -> tuple[float, ...]:
    """Gives segments that (almost) no iteration reached the coefficient of the segment before."""
    continued = dict(zip(FEATURES, coefficients, strict=True))
    known = dict(zip(FEATURES, determined.tolist(), strict=True))
    for names in _SEGMENTED:
        for before, name in pairwise(names):
            if not known[name]:
                continued[name] = continued[before]
    return tuple(continued[name] for name in FEATURES)


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _without_zeros(segments: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Replaces an end that no iteration determined (or that was fitted to 0) by the other end of its segment."""
    return tuple((start or end, end or start) for start, end in segments)
