"""Samples of an engine's iterations: the file that they are kept in, what they cover, and the model fitted to them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from evaluation.engines.journal_following import Sample
from evaluation.engines.measured_iterations import MeasuredIterations, without_outliers
from evaluation.hardware.fit import ErrorRow, grouped_errors
from evaluation.hardware.latency_models import error_table
from predictor.features import (
    DECODE_CONTEXT,
    DECODES,
    FEATURES,
    PREFILL_SQUARES,
    PREFILL_TOKENS,
    PREFILL_WORK,
    ROW,
    TOKENS,
    scenario_of,
)
from predictor.files import sealed
from predictor.model import LatencyModel
from predictor.training import PENALTY, fit_experts
from slidingserve.contract.values import EngineLimits, Floats, Ints

MODEL_NAME = "paper7/1"
LEAST_SAMPLES = 200
"""Fewer say too little to fit a model to, and to measure its errors on a fifth of them."""
OUTLIER_SIGMAS = 2.5
"""Iterations whose relative error under a first fit is beyond so many standard deviations were held up by others."""
SAMPLES_PER_CELL = 8
"""So many samples make a cell of the grid count as covered."""

_HEAD = "# slidingserve profile samples 1: "
_COLUMNS = ("tokens", *FEATURES, "seconds")
_HELD_OUT = 5  # every fifth


class SamplesError(ValueError):
    """A file of samples that cannot be used or written; the message names it and the remedy."""


class TooFewSamples(ValueError):
    """There are not enough samples to fit a model to; says how many there are."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What iteration times depend on; samples of two that differ are never mixed."""

    engine: str
    version: str
    model: str
    tensor_parallel: int
    pipeline_parallel: int
    hardware: str

    def __str__(self) -> str:
        parallel = f"tensor parallel {self.tensor_parallel}"
        if self.pipeline_parallel > 1:
            parallel += f", pipeline parallel {self.pipeline_parallel}"
        return f"{self.engine} {self.version}, model {self.model}, {parallel}, on {self.hardware}"


class SampleFile:
    """A CSV file that samples are added to as they come: a line that says of which engine, the columns' names, rows.

    Args:
        path: read if it exists; a torn last line, as a crash leaves it, is cut off when samples are added.

    Attributes:
        identity: of the engine; None: nothing has been measured yet.

    Raises:
        SamplesError: the file cannot be read or is another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: EngineIdentity | None = None
        self._rows: list[list[float]] = []
        self._length = 0  # bytes of whole lines
        if path.exists():
            self._load()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def measured(self) -> MeasuredIterations:
        """All samples, in the order in which they were measured."""
        table = np.array(self._rows, np.float64).reshape(-1, ROW + 1)
        return MeasuredIterations(table[:, :ROW], table[:, ROW])

    def bind(self, identity: EngineIdentity) -> None:
        """Says whose samples these are; begins the file if there is none.

        Raises:
            SamplesError: those in the file are of another engine, or it cannot be written.
        """
        if self.identity is None:
            self.identity = identity
            self._write(f"{_HEAD}{json.dumps(asdict(identity))}\n{','.join(_COLUMNS)}\n")
        elif identity != self.identity:
            raise SamplesError(
                f"{self.path}: holds samples of another engine ({self.identity}); this one is {identity}; "
                "give another --out, or remove the file"
            )

    def add(self, samples: Sequence[Sample]) -> None:
        """Appends samples; they are on disk when it returns. Raises `SamplesError` if they cannot be written."""
        if not samples:
            return
        rows = [[*features.tolist(), seconds] for features, seconds in samples]
        self._rows += rows
        self._write("".join(",".join(f"{value:.12g}" for value in row) + "\n" for row in rows))

    def _write(self, text: str) -> None:
        try:
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.truncate(self._length)
                file.seek(self._length)
                file.write(text.encode())
                self._length = file.tell()
        except OSError as error:
            raise SamplesError(f"{self.path}: cannot be written ({error.strerror}); give another --out") from error

    def _load(self) -> None:
        remedy = "give another --out, or remove the file"
        try:
            content = self.path.read_bytes()
            lines = content.decode().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise SamplesError(f"{self.path}: cannot be read ({error}); {remedy}") from error
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        if len(lines) < 2:  # nothing was measured: begin anew
            if content and not content.startswith(_HEAD.encode()[: len(content)]):
                raise SamplesError(f"{self.path}: holds no samples of an engine; {remedy}")
            return
        try:
            self.identity = EngineIdentity(**json.loads(lines[0].removeprefix(_HEAD)))
            if tuple(lines[1].strip().split(",")) != _COLUMNS:
                raise ValueError(f"columns {lines[1].strip()}")
            self._rows = [[float(value) for value in line.split(",")] for line in lines[2:]]
            odd = next((n for n, row in enumerate(self._rows, 3) if not _is_sample(row)), 0)
            if odd:
                raise ValueError(f"line {odd} is no sample")
        except (ValueError, TypeError) as error:
            raise SamplesError(f"{self.path}: holds no samples of an engine ({error}); {remedy}") from error
        self._length = sum(len(line.encode()) for line in lines)


def _is_sample(row: list[float]) -> bool:
    values = np.array(row)
    return len(row) == ROW + 1 and bool(np.isfinite(values).all() and (values >= 0.0).all() and row[-1] > 0.0)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many cells of a coarse grid hold enough samples, and how many there are."""

    filled: int
    cells: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.filled / self.cells if self.cells else 1.0


class Grid:
    """A coarse grid over what iterations can hold: prompt tokens by decodes, and contexts of either by scenario.

    Args:
        limits: the engine's; bins that it hardly reaches are no cells.
        requests: how many are there at once.
        longest_context: tokens.
    """

    _PREFILL = (1, 17, 65, 257, 1025, 4097)
    _DECODES = (1, 2, 9, 33, 129)
    _CONTEXT = (1, 65, 513, 4097, 32769)

    def __init__(self, limits: EngineLimits, requests: int, longest_context: int) -> None:
        prefills = _reached(self._PREFILL, limits.max_tokens_per_iteration)
        decodes = _reached(self._DECODES, min(limits.max_sequences, requests) // 2)
        contexts = range(1, _reached(self._CONTEXT, longest_context // 2) + 1)
        sizes = [("size", p, d) for p in range(prefills + 1) for d in range(decodes + 1) if p or d]
        kinds = itertools.product(("decodes", "prompts"), (0, 1), contexts)
        self._cells: list[tuple[str, int, int]] = [*sizes, *kinds]

    def coverage(self, features: Floats) -> Coverage:
        """Returns what samples (float64[n, 8]) cover. Linear."""
        counts = self._counts(features)
        filled = sum(counts.get(cell, 0) >= SAMPLES_PER_CELL for cell in self._cells)
        return Coverage(filled, len(self._cells))

    def _counts(self, features: Floats) -> dict[tuple[str, int, int], int]:
        x = features.T
        decodes, prompt = x[DECODES], x[PREFILL_TOKENS]
        mixed = (decodes > 0) & (prompt > 0)
        decode_context = x[DECODE_CONTEXT] / np.maximum(decodes, 1.0)
        # Mean over the prompt tokens of what was computed before their chunk.
        prompt_context = (x[PREFILL_WORK] - x[PREFILL_SQUARES]) / np.maximum(prompt, 1.0)
        counts: dict[tuple[str, int, int], int] = {}
        for name, first, second, at in (
            ("size", _bins(self._PREFILL, prompt), _bins(self._DECODES, decodes), x[TOKENS] > 0),
            ("decodes", mixed.astype(np.int64), np.maximum(1, _bins(self._CONTEXT, decode_context)), decodes > 0),
            ("prompts", mixed.astype(np.int64), np.maximum(1, _bins(self._CONTEXT, prompt_context)), prompt > 0),
        ):
            pairs, number = np.unique(np.stack((first[at], second[at])), axis=1, return_counts=True)
            for (a, b), count in zip(pairs.T.tolist(), number.tolist(), strict=True):
                counts[name, a, b] = count
        return counts


def _reached(edges: Sequence[int], top: int) -> int:
    """Returns how many bins, counted from the first, begin well below ``top``."""
    return 1 + sum(1.5 * edge <= top for edge in edges[1:])


def _bins(edges: Sequence[int], values: Floats) -> Ints:
    """Returns the bin of each value: 0 below the first edge."""
    return np.searchsorted(np.array(edges), values, side="right").astype(np.int64)


@dataclass(frozen=True, slots=True)
class SampleFit:
    """A model fitted to four fifths of the samples, and how far it is off on the others.

    Attributes:
        model: its errors are those below.
        errors: on the held-out fifth, outliers left out; over all and by scenario.
        raw_mape_percent: mean relative error on the held-out fifth with its outliers.
        samples, outliers: how many there were, and how many of them were left out.
    """

    model: LatencyModel
    errors: list[ErrorRow]
    raw_mape_percent: float
    samples: int
    outliers: int

    @property
    def mape_percent(self) -> float:
        """Mean relative error over all that was held out."""
        return self.errors[0].mape_percent


def fit_samples(measured: MeasuredIterations, profile: str, provenance: str = "") -> SampleFit:
    """Fits a model; deterministic, a tenth of a second for some thousand samples.

    Outliers are told by a fit to the four fifths alone, so nothing held out has a say in the model.

    Raises:
        TooFewSamples: there are fewer than `LEAST_SAMPLES`.
    """
    if len(measured) < LEAST_SAMPLES:
        raise TooFewSamples(f"{len(measured)} samples; to fit a latency model takes at least {LEAST_SAMPLES}")
    x, seconds = measured.features, measured.seconds
    held_out = np.arange(len(measured)) % _HELD_OUT == _HELD_OUT - 1
    plain = without_outliers(MeasuredIterations(x[~held_out], seconds[~held_out]))
    first = LatencyModel(MODEL_NAME, profile, fit_experts(plain.features, plain.seconds))
    sigma = float(np.std(plain.seconds / first.predict(plain.features) - 1.0))
    kept = np.abs(seconds / first.predict(x) - 1.0) <= max(OUTLIER_SIGMAS * sigma, 1e-6)
    train, test = kept & ~held_out, kept & held_out
    model = LatencyModel(MODEL_NAME, profile, fit_experts(x[train], seconds[train]))
    scenarios = np.array([scenario_of(row) for row in x], np.int64)
    predicted = model.predict(x)
    errors = grouped_errors(scenarios[test], x[test, TOKENS].astype(np.int64), seconds[test], predicted[test])
    raw = float(100.0 * np.mean(np.abs(predicted[held_out] / seconds[held_out] - 1.0)))
    outliers = int((~kept).sum())
    said = f"{provenance}. " if provenance else ""
    text = (
        f"{said}Fitted to {int(train.sum())} measured iterations, weighted by 1/T, ridge {PENALTY:g}; errors on "
        f"{int(test.sum())} others. {outliers} outliers beyond {OUTLIER_SIGMAS:g} sigma left out; with those held out, "
        f"the mean relative error is {raw:.2f} %."
    )
    complete = replace(model, errors=error_table(errors), provenance=text)
    return SampleFit(sealed(complete), errors, raw, len(measured), outliers)
