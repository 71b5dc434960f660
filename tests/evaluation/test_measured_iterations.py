"""Journals to measured iterations: every batch and time as the engine had it, none that is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.engines.measured_iterations import (
    LEAST_ITERATIONS,
    MeasuredIterations,
    TooFewIterations,
    fit_measured_model,
    measured_iterations,
    without_outliers,
)
from evaluation.inprocess import InProcessSource
from predictor.features import ROW, batch_features
from predictor.files import read_model, write_model
from predictor.model import linear_model
from sidecar.journal import JournalError, JournalWriter
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.codec import encode_request, encode_response
from slidingserve.contract.values import (
    AppliedBatch,
    BatchAllocation,
    EngineLimits,
    Floats,
    OpenSession,
    ProgressColumns,
    Request,
    Response,
    SessionOpened,
    Snapshot,
    Step,
)
from tests.strategies import LIMITS, LinearTimer, columns, floats, ints, random_feed, run_to_end, step

TIGHT = EngineLimits(max_tokens_per_iteration=48, max_sequences=12, kv_blocks=30, kv_block_tokens=4)


class RecordedSession:
    """A session whose exchanges go to a journal, as the service writes them."""

    def __init__(self, writer: JournalWriter) -> None:
        self._session, self._writer = Session("1"), writer

    def handle(self, message: Request) -> Response:
        answer = self._session.handle(message)
        self._writer.write(encode_request(message), encode_response(answer))
        return answer


@contextmanager
def recorded(path: Path) -> Iterator[RecordedSession]:
    writer = JournalWriter(path.open("wb"), "1", SessionDefaults())
    yield RecordedSession(writer)
    writer.close()


class Source:
    """Decides by a recorded session; hands each duration on ``depth`` steps late, loses every ``skipped``-th answer.

    ``censored`` names the steps whose message says that the duration is an upper bound.
    """

    def __init__(
        self, session: RecordedSession, depth: int = 0, skipped: int = 0, censored: frozenset[int] = frozenset()
    ) -> None:
        self._inner = InProcessSource()
        self._inner.session = session  # type: ignore[assignment]
        self._depth, self._skipped, self._censored = depth, skipped, censored
        self._seconds: list[float] = []

    def open(self, message: OpenSession) -> SessionOpened:
        return self._inner.open(message)

    def close(self) -> None:
        self._inner.close()

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        number = step.iteration.step
        self._seconds.append(step.iteration.last_iteration_seconds)
        late = self._seconds[number - self._depth] if number >= self._depth else 0.0
        changes: dict[str, Any] = {
            "last_iteration_seconds": late,
            "pipeline_depth": self._depth,
            "last_iteration_censored": number in self._censored,
        }
        if self._skipped and number % self._skipped == self._skipped - 1:
            return None

        def full() -> Snapshot:
            plain = snapshot()
            return plain._replace(iteration=plain.iteration._replace(**changes))

        return self._inner.decide(step._replace(iteration=step.iteration._replace(**changes)), full)


def run(
    path: Path,
    requests: int = 40,
    depth: int = 0,
    skipped: int = 0,
    censored: frozenset[int] = frozenset(),
    limits: EngineLimits = TIGHT,
) -> tuple[Floats, Floats, SimulatedEngine]:
    """Runs an engine that is recorded; returns the features and seconds of all its iterations, and itself."""
    timer = LinearTimer(keep=True)
    with recorded(path) as session:
        source = Source(session, depth, skipped, censored)
        source.open(OpenSession(limits, policy="vllm"))
        engine = SimulatedEngine(random_feed(1, requests, 40, 12, 0.02), limits, timer, source)
        run_to_end(engine)
    features, seconds = np.zeros((len(timer.batches), ROW)), np.zeros(len(timer.batches))
    again = LinearTimer()
    for i, batch in enumerate(timer.batches):
        chunk, context = (ints(*column) for column in zip(*batch, strict=True))
        batch_features(chunk, context, len(chunk), features[i])
        seconds[i] = again.seconds(chunk, context, len(chunk))
    return features, seconds, engine


def assert_same(measured: MeasuredIterations, features: Floats, seconds: Floats) -> None:
    assert measured.features.tolist() == features.tolist()
    assert measured.seconds.tolist() == pytest.approx(seconds.tolist())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_iteration_that_the_engine_told_of(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    features, seconds, engine = run(path, depth=depth)
    assert engine.outcome().preemptions >= 5
    assert engine.outcome().fallbacks == 0
    told = len(seconds) - 1 - depth  # nobody asks again after the last one
    assert_same(measured_iterations([path]), features[:told], seconds[:told])


def test_own_policy_of_the_engine_is_known_too_but_not_across_a_snapshot(tmp_path: Path) -> None:
    """Where an answer was lost the next message is a snapshot: it replaces the state, the batch before is unknown."""
    path = tmp_path / "a.journal"
    features, seconds, engine = run(path, skipped=7)
    assert engine.outcome().fallbacks > 5
    # A lost step tells neither the batch before it nor, with the snapshot that follows, its own.
    known = [i for i in range(len(seconds) - 1) if i % 7 not in (5, 6)]
    assert_same(measured_iterations([path]), features[known], seconds[known])


def test_upper_bounds_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    features, seconds, _ = run(path, censored=frozenset({3, 10}))
    known = [i for i in range(len(seconds) - 1) if i + 1 not in (3, 10)]
    assert_same(measured_iterations([path]), features[known], seconds[known])


def test_several_journals_and_a_torn_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a.journal", tmp_path / "b.journal"
    features, seconds, _ = run(first)
    run(second)
    second.write_bytes(second.read_bytes()[:-3])
    both = measured_iterations([first, second])
    told = len(seconds) - 1
    # The last message has lost its answer, so nobody knows whether it was taken.
    assert_same(both, np.concatenate([features[:told], features[: told - 1]]), np.append(seconds[:told], seconds[:-2]))


def test_prefix_cache_hits_count_as_context(tmp_path: Path) -> None:
    """The engine expected 8 cached tokens of request 1 and found 16; of request 2 nothing, and so it was."""
    path = tmp_path / "a.journal"
    with recorded(path) as session:
        session.handle(OpenSession(LIMITS))
        arrived = columns([1, 2], [30, 10], cached_prefix_tokens=ints(8, 0))
        answer = session.handle(step(0, arrived=arrived))
        assert isinstance(answer, BatchAllocation)
        assert answer.tokens.tolist() == [22, 10]
        applied = AppliedBatch(ints(1, 2), ints(14, 10))
        progress = ProgressColumns(ints(1), ints(30), ints(1))
        told = {"last_iteration_seconds": 0.02}
        session.handle(step(1, applied_exactly=False, applied=applied, progress=progress, iteration=told))
    measured = measured_iterations([path])
    row = np.zeros(ROW)
    batch_features(ints(14, 10), ints(16, 0), 2, row)
    assert_same(measured, row[None], floats(0.02))


def test_journal_without_iterations(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    with recorded(path) as session:
        session.handle(OpenSession(LIMITS))
        session.handle(step(0))
        session.handle(step(1))
    measured = measured_iterations([path])
    assert measured.features.shape == (0, ROW)
    assert measured_iterations([]).seconds.shape == (0,)
    with pytest.raises(TooFewIterations, match=f"^0 measured iterations; .* at least {LEAST_ITERATIONS}: .*--journal"):
        fit_measured_model(measured, "here")


def test_refused_session_has_no_iterations(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    with recorded(path) as session:
        session.handle(OpenSession(LIMITS, policy="nope"))
        session.handle(step(0))
    assert len(measured_iterations([path])) == 0


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a journal"):
        measured_iterations([path])


def test_model_of_measured_iterations_predicts_them(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="fitting needs the extra fit")
    path = tmp_path / "a.journal"
    features, seconds, _ = run(path, requests=150)
    model = fit_measured_model(measured_iterations([path]), "here", "An engine of a test.")
    assert np.abs(model.predict(features) / seconds - 1.0).mean() < 0.02
    assert model.profile == "here"
    assert model.errors["all"]["mape_percent"] < 2.0
    assert model.provenance.startswith("An engine of a test. Fitted to ")
    file = tmp_path / "model.json"
    assert write_model(model, file).version == read_model(file).version == model.version


def test_iterations_that_something_held_up_are_left_out() -> None:
    pytest.importorskip("sklearn", reason="fitting needs the extra fit")
    rng = np.random.default_rng(0)
    features = np.zeros((400, ROW))
    for row in features:
        chunk = np.append(rng.integers(1, 500, 1), np.ones(rng.integers(1, 20), np.int64))
        batch_features(chunk, rng.integers(0, 2000, len(chunk)), len(chunk), row)
    truth = linear_model("here", 0.005, prefill_tokens=5e-5, decodes=1e-4, prefill_work=3e-8)
    seconds = truth.predict(features) * rng.uniform(0.9, 1.1, 400)
    held_up = [0, 1, 50, 120]
    seconds[held_up] = [19.0, 3.0, 0.4, 0.3]
    kept = without_outliers(MeasuredIterations(features, seconds))
    assert kept.seconds.tolist() == np.delete(seconds, held_up).tolist()
    model = fit_measured_model(MeasuredIterations(features, seconds), "here")
    assert "4 outliers" in model.provenance
    assert np.abs(model.predict(features) / truth.predict(features) - 1.0).max() < 0.05
