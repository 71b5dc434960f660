"""Fits the latency predictor's models to iteration times, and measures them on iterations that they have not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine_adapter.simulated.profiles import HardwareProfile, ProfileError
from engine_adapter.simulated.timing import IterationTimer, ProfileTimer
from evaluation.hardware.batches import Batches, draw_batches
from evaluation.hardware.fit import ErrorRow, error_rows
from predictor.features import ROW, batch_features
from predictor.files import sealed
from predictor.model import LatencyModel
from predictor.training import PENALTY, fit_experts
from slidingserve.contract.values import Floats, Ints

NAME = "paper7/1"
# Drawn are at least this many requests, so that a model stays right when an engine's limit is raised.
_SEQUENCES = 256
# An engine that holds less hardly ever holds what is drawn.
_LEAST_KV_TOKENS, _LEAST_TOKENS = 2048, 64

_COMPARISON_SEED = 2**40  # more than `predictor fit --seed` takes: no model was fitted to its iterations


class PaperErrors(NamedTuple):
    """What the paper reports for one GPU: milliseconds, and the share of variance explained."""

    gpu: str
    mae_ms: float
    rmse_ms: float
    r2: float


PAPER_ERRORS = (
    PaperErrors("RTX 3090 TP2", 2.64, 4.33, 0.9956),
    PaperErrors("A6000 TP2", 2.52, 4.12, 0.9923),
    PaperErrors("A100", 2.72, 4.254, 0.9929),
)
"""arXiv 2606.05933, whole iterations of Qwen2.5-7B on its own runs; by scenario it reports nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured seconds of iterations, each iteration's `Scenario`, and the errors."""

    measured_seconds: Floats
    predicted_seconds: Floats
    scenarios: Ints
    errors: list[ErrorRow]


def fit_model(
    profile: HardwareProfile,
    *,
    seed: int = 0,
    train: int = 6000,
    test: int = 2000,
    timer: IterationTimer | None = None,
    source: str = "",
) -> tuple[LatencyModel, list[ErrorRow]]:
    """Fits a model to ``train`` drawn iterations of the profile's engine; errors are those on ``test`` others.

    Times come from the profile, or from ``timer``, which the provenance then calls ``source``. Deterministic; about 2 s
    from a profile. Raises `ProfileError` for an engine that is too small to draw iterations for.
    """
    rng = np.random.default_rng(seed)
    seen, unseen = (draw_iterations(profile, count, rng) for count in (train, test))
    chosen = timer or ProfileTimer(profile)
    experts = fit_experts(feature_rows(seen), seen.seconds(chosen))
    if timer is None:
        source = f"hardware profile {profile.name} ({profile.digest[:8]})"
    model = LatencyModel(
        name=NAME,
        profile=profile.name,
        experts=experts,
        provenance=(
            f"Fitted to {train} drawn iterations, seed {seed}, weighted by 1/T, ridge {PENALTY:g}; errors on {test} "
            f"others. Iteration times: {source or 'a timer that was given'}."
        ),
    )
    errors = _compared(model, unseen, chosen).errors
    return sealed(replace(model, errors=error_table(errors))), errors


def error_table(errors: Sequence[ErrorRow]) -> dict[str, dict[str, float]]:
    """Returns the errors as a model file holds them, by scenario."""
    return {
        row.scenario: {
            "mae_ms": round(row.mae_ms, 3),
            "rmse_ms": round(row.rmse_ms, 3),
            "r2": round(row.r2, 5),
            "mape_percent": round(row.mape_percent, 2),
        }
        for row in errors
    }


def draw_iterations(profile: HardwareProfile, count: int, rng: np.random.Generator) -> Batches:
    """Draws iterations that the profile's engine can hold; raises `ProfileError` if that is next to none."""
    for field, value, least in (
        ("kv_tokens", profile.kv_tokens, _LEAST_KV_TOKENS),
        ("max_tokens_per_iteration", profile.max_tokens_per_iteration, _LEAST_TOKENS),
    ):
        if value < least:
            raise ProfileError(f"profile {profile.name}: {field} is {value}; to fit a model takes at least {least}")
    return draw_batches(
        count,
        rng,
        kv_tokens=profile.kv_tokens,
        max_sequences=max(_SEQUENCES, profile.max_sequences),
        max_tokens=profile.max_tokens_per_iteration,
    )


def feature_rows(batches: Batches) -> Floats:
    """Returns the features of each iteration, float64[n, 8]."""
    rows = np.zeros((len(batches), ROW))
    for row, (chunk, context) in zip(rows, batches, strict=True):
        batch_features(chunk, context, len(chunk), row)
    return rows


def compare(
    model: LatencyModel, profile: HardwareProfile, *, count: int = 2000, timer: IterationTimer | None = None
) -> Comparison:
    """Compares a model with the profile's times, or ``timer``'s, on drawn iterations that none was fitted to.

    Raises `ProfileError` for an engine that is too small to draw iterations for.
    """
    batches = draw_iterations(profile, count, np.random.default_rng(_COMPARISON_SEED))
    return _compared(model, batches, timer or ProfileTimer(profile))


def _compared(model: LatencyModel, batches: Batches, timer: IterationTimer) -> Comparison:
    measured, predicted = batches.seconds(timer), model.predict(feature_rows(batches))
    return Comparison(measured, predicted, batches.scenarios(), error_rows(batches, measured, predicted))
