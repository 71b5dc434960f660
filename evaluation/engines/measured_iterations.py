"""What a real engine's iterations held and how long they took, read from the sidecar's journals.

An engine tells in each step which batch it executed in the one before, and how long the last finished one took. The
mirror of the engine's queues, brought up to date by the recorded messages, knows the context of each request in that
batch. No policy runs: what the sidecar answered is in the journal too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from predictor.features import ROW, TOKENS, Scenario, add_chunk, add_decode, scenario_of
from predictor.files import sealed
from predictor.model import LatencyModel
from predictor.training import PENALTY, fit_experts
from sidecar.journal import Journal, read_journal
from sidecar.policies.base import Plan
from sidecar.queues import WAITING
from sidecar.session.machine import fill_slos
from sidecar.session.mirror import Mirror
from slidingserve.contract.codec import decode_request, decode_response
from slidingserve.contract.values import (
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    Floats,
    Ints,
    OpenSession,
    ProgressColumns,
    Response,
    SessionOpened,
    SloDefaults,
    Snapshot,
    Step,
)
from slidingserve.journal.v1.journal_pb2 import JournalHeader
from slidingserve.scheduler.v1.scheduler_pb2 import ScheduleRequest, ScheduleResponse

MODEL_NAME = "paper7/1"
LEAST_ITERATIONS = 50
"""Fewer say too little to fit eight numbers to; see `predictor.training.MINIMUM_SAMPLES` for what is enough."""

OUTLIER_RATIO = 3.0
"""An iteration that took more than so many times what a first fit predicts was held up by something else (another
process, a page fault, code that was compiled on first use)."""

_OUTLIER_ROUNDS = 5
_HELD_OUT = 5  # every fifth iteration
_NO_PLAN = Plan(0)  # nothing is applied that an answer said: the executed batch is always given in full

Bools: TypeAlias = NDArray[np.bool_]


class TooFewIterations(ValueError):
    """The journals hold too few measured iterations to fit a model; says how many, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredIterations:
    """n iterations: ``features`` float64[n, 8] (rows of `predictor.features`), ``seconds`` float64[n]."""

    features: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)


def measured_iterations(journals: Iterable[Path]) -> MeasuredIterations:
    """Returns the measured iterations of all journals, in their order.

    Left out are iterations whose time is unknown or only an upper bound, whose batch is unknown (a snapshot, a refused
    message or the end of the file came in between), and those without tokens. Linear in the journals.

    Raises:
        JournalError: see `sidecar.journal.read_entries`.
        Refusal: a message that was answered makes no sense, so the file was not written by a sidecar.
    """
    samples = [sample for path in journals for sample in _samples(read_journal(path))]
    if not samples:
        return MeasuredIterations(np.zeros((0, ROW)), np.zeros(0))
    rows, seconds = zip(*samples, strict=True)
    return MeasuredIterations(np.stack(rows), np.array(seconds))


def fit_measured_model(measured: MeasuredIterations, profile: str, provenance: str = "") -> LatencyModel:
    """Returns a latency model fitted to measured iterations, those that something else held up left out.

    ``profile`` names the hardware and engine that they were measured on. The errors are those on every fifth iteration,
    of a fit to the others; the model itself is fitted to all. Deterministic.

    Raises:
        TooFewIterations: there are fewer than `LEAST_ITERATIONS`.
    """
    if len(measured) < LEAST_ITERATIONS:
        raise TooFewIterations(
            f"{len(measured)} measured iterations; to fit a latency model takes at least {LEAST_ITERATIONS}: let the "
            "engine serve more requests while the sidecar runs with --journal-dir"
        )
    kept = without_outliers(measured, profile)
    unseen = np.arange(len(kept)) % _HELD_OUT == 0
    other = LatencyModel(MODEL_NAME, profile, fit_experts(kept.features[~unseen], kept.seconds[~unseen]))
    said = f"{provenance} " if provenance else ""
    model = LatencyModel(
        name=MODEL_NAME,
        profile=profile,
        experts=fit_experts(kept.features, kept.seconds),
        errors=_errors(other, kept.features[unseen], kept.seconds[unseen]),
        provenance=(
            f"{said}Fitted to {len(kept)} measured iterations, weighted by 1/T, ridge {PENALTY:g}; "
            f"{len(measured) - len(kept)} outliers left out; errors on every fifth, of a fit to the others."
        ),
    )
    return sealed(model)


def without_outliers(measured: MeasuredIterations, profile: str = "") -> MeasuredIterations:
    """Leaves out iterations that took more than `OUTLIER_RATIO` times what a fit to the others predicts.

    Repeats the fit until it drops no more, a few times at most: the first one is spoiled by what it is to find.
    """
    kept = measured
    for _ in range(_OUTLIER_ROUNDS):
        model = LatencyModel(MODEL_NAME, profile, fit_experts(kept.features, kept.seconds))
        at = kept.seconds <= OUTLIER_RATIO * model.predict(kept.features)
        if at.all() or at.sum() < LEAST_ITERATIONS:
            break
        kept = MeasuredIterations(kept.features[at], kept.seconds[at])
    return kept


def _errors(model: LatencyModel, features: Floats, seconds: Floats) -> dict[str, dict[str, float]]:
    """Returns mean absolute and mean relative error, over all iterations and by scenario."""
    error = np.abs(model.predict(features) - seconds)
    scenarios = np.array([scenario_of(row) for row in features])
    groups = {"all": scenarios >= 0, **{scenario.name.lower(): scenarios == scenario for scenario in Scenario}}
    return {
        name: {
            "mae_ms": round(1e3 * float(error[at].mean()), 3),
            "mape_percent": round(100.0 * float((error[at] / seconds[at]).mean()), 2),
        }
        for name, at in groups.items()
        if at.any()
    }


class IterationReader:
    """Reads one session's journal entry by entry, as the sidecar writes it.

    Attributes:
        opening: how the engine opened the session; None: it has not yet, or was refused.
        censored: iterations left out because their time is only an upper bound.
    """

    def __init__(self, header: JournalHeader) -> None:
        slos = header.default_slos
        self._default_slos = SloDefaults(slos.ttft_slo_seconds, slos.tbt_slo_seconds, slos.ttlt_slo_seconds)
        self._mirror: _EngineMirror | None = None
        self.opening: OpenSession | None = None
        self.censored = 0

    def take(self, request: ScheduleRequest, response: ScheduleResponse | None) -> tuple[Floats, float] | None:
        """Takes in one exchange; returns (features, seconds) of the iteration that it completes, if any.

        Raises:
            Refusal: see `measured_iterations`.
        """
        message = decode_request(request)
        answer = decode_response(response) if response is not None else None
        if isinstance(message, OpenSession):
            self.opening = message if isinstance(answer, SessionOpened) else None
            self._mirror = _EngineMirror(message, self._default_slos) if self.opening is not None else None
            return None
        if self._mirror is None or message is None:
            return None
        self.censored += message.iteration.last_iteration_censored
        return self._mirror.take(message, answer)


def _samples(journal: Journal) -> Iterator[tuple[Floats, float]]:
    """Yields (features, seconds) of the measured iterations of one session."""
    reader = IterationReader(journal.header)
    for request, response in journal.exchanges:
        sample = reader.take(request, response)
        if sample is not None:
            yield sample


class _EngineMirror:
    """Follows one session, and remembers what its latest iterations held until it hears how long they took."""

    def __init__(self, opening: OpenSession, default_slos: SloDefaults) -> None:
        self._mirror = Mirror(opening.limits, fill_slos(opening.slo_defaults, default_slos))
        self._in_step = True  # the mirror equals the engine
        self._allocation: BatchAllocation | None = None
        self._features: dict[int, Floats] = {}

    def take(self, message: Snapshot | Step, answer: Response | None) -> tuple[Floats, float] | None:
        """Takes in one message and its answer; returns what it completes: an iteration's features and seconds."""
        if not isinstance(answer, BatchAllocation):
            self._in_step = False  # the message was refused, and only a snapshot leads back
            return None
        if isinstance(message, Snapshot):
            self._mirror.restore(message)
            self._in_step = True
        elif self._in_step:
            self._apply(message)
        self._allocation = answer
        iteration = message.iteration
        finished = iteration.step - 1 - iteration.pipeline_depth
        features = self._features.pop(finished, None)
        self._features = {step: row for step, row in self._features.items() if step > finished}
        seconds = iteration.last_iteration_seconds
        if features is None or iteration.last_iteration_censored or not seconds > 0.0:
            return None
        return features, seconds

    def _apply(self, message: Step) -> None:
        """Brings the mirror up to date; remembers the features of the batch that the step says was executed."""
        executed = self._executed(message)
        queues = self._mirror.queues
        slots = queues.slots(executed.handles)
        before = queues.requests[slots]  # a copy, as the index is an array
        message = message._replace(applied_exactly=False, applied=executed)
        self._mirror.update(message, _NO_PLAN)
        context = before["computed"]
        context[np.isin(executed.handles, executed.preempted_handles)] = 0
        self._correct(context, before["state"] == WAITING, executed, message.progress)
        decodes = (before["target"] - before["computed"] == 1) & (before["output"] > 0)
        row = np.zeros(ROW)
        for tokens, known, is_decode in zip(executed.tokens.tolist(), context.tolist(), decodes.tolist(), strict=True):
            (add_decode if is_decode else add_chunk)(row, float(tokens), float(known))
        if row[TOKENS] > 0.0:
            self._features[message.iteration.step - 1] = row

    def _executed(self, message: Step) -> AppliedBatch:
        """Returns what the engine executed in the iteration before: the last answer, or what it says instead."""
        if not message.applied_exactly:
            return message.applied or AppliedBatch(NO_INTS, NO_INTS)
        if self._allocation is None:  # nothing has been asked yet
            return AppliedBatch(NO_INTS, NO_INTS)
        return AppliedBatch(self._allocation.handles, self._allocation.tokens, self._allocation.preempted_handles)

    @staticmethod
    def _correct(context: Ints, admitted: Bools, executed: AppliedBatch, progress: ProgressColumns | None) -> None:
        """Gives requests that the batch admitted the context that the engine's prefix cache really held."""
        if progress is None:
            return
        computed = dict(zip(progress.handles.tolist(), progress.computed_tokens.tolist(), strict=True))
        for place in np.flatnonzero(admitted).tolist():
            after = computed.get(int(executed.handles[place]))
            if after is not None:
                context[place] = max(0, after - int(executed.tokens[place]))
