"""What is read from a session's journal equals what happened to its engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from evaluation.shadow_reading import SessionRecord, ShadowError, read_session
from sidecar.answering import answer_request
from sidecar.journal import JournalError, JournalWriter
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.codec import encode_request
from slidingserve.contract.values import AppliedBatch, Mode, OpenSession, ProgressColumns, Request, SloDefaults
from tests.evaluation.recorded_runs import RecordedSource, record
from tests.strategies import LIMITS, Feed, LinearTimer, columns, feed, floats, ints, random_feed, snapshot, step

MODES = [Mode.OFF, Mode.SHADOW, Mode.ACTIVE]


def assert_equal(read: SessionRecord, feed: Feed, outcome: Outcome) -> None:
    """Every request that finished before the last message is read as it was, to the last bit."""
    rows = read.requests
    assert rows["handle"].tolist() == list(range(len(feed.arrival_seconds)))
    assert np.array_equal(rows["arrival"], feed.arrival_seconds)
    assert np.array_equal(rows["prompt"], feed.prompt_tokens)
    for name, column in (("ttft", "ttft_slo_seconds"), ("tbt", "tbt_slo_seconds"), ("ttlt", "ttlt_slo_seconds")):
        assert np.array_equal(rows[name], getattr(feed, column)), name
    done = read.scored
    assert done.sum() >= len(rows) - LIMITS.max_sequences, "all but those that the last iteration finished"
    for name, column in (
        ("first", "first_token_seconds"),
        ("last", "last_token_seconds"),
        ("output", "output_tokens"),
        ("late", "deadline_missed"),
        ("gap_missed", "gap_missed"),
    ):
        assert np.array_equal(rows[name][done], getattr(outcome, column)[done]), name
    names = ("", *feed.class_names)
    assert [read.class_names[index] for index in rows["class_index"]] == [names[i] for i in feed.class_index]


@pytest.mark.parametrize("mode", MODES)
def test_reads_what_happened_in_each_mode(mode: Mode, tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    requests = random_feed(2, 80, prompt=60, output=12, gap_seconds=0.08)
    outcome = record(path, requests, LinearTimer(), OpenSession(LIMITS, mode=mode))
    assert outcome.preemptions > 0
    read = read_session(path)
    assert_equal(read, requests, outcome)
    assert 0 < outcome.deadline_missed.sum() < 80, "there is something to tell apart"
    gaps = outcome.token_gaps[: len(read.token_gaps)]  # the last iteration's are not reported any more
    assert np.array_equal(np.sort(read.token_gaps), np.sort(gaps))
    assert read.decisions.modes == {mode: outcome.iterations}
    assert read.was_active is (mode is Mode.ACTIVE)
    assert read.overhead_seconds == pytest.approx(0.0, abs=1e-9)


def test_reads_through_switches_of_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    requests = random_feed(3, 120, prompt=60, output=12, gap_seconds=0.05)
    switches = {number: MODES[number // 10 % 3] for number in range(10, 200, 10)}
    outcome = record(path, requests, LinearTimer(), OpenSession(LIMITS), switches=switches)
    assert_equal(read_session(path), requests, outcome)


def test_engine_that_slept_got_its_tokens_before(tmp_path: Path) -> None:
    """The last batch is reported when the next request comes; its tokens came when it ended."""
    path = tmp_path / "session.journal"
    requests = feed([(0.0, 10, 3), (100.0, 10, 3), (200.0, 10, 1), (300.0, 10, 1)])
    outcome = record(path, requests, LinearTimer(), OpenSession(LIMITS, mode=Mode.SHADOW))
    read = read_session(path)
    assert read.scored.tolist() == [True, True, True, False]
    assert_equal(read, requests, outcome)
    assert not read.requests["late"].any()


def test_requests_that_finish_after_a_snapshot_are_followed_if_only_one_iteration_was_missed(tmp_path: Path) -> None:
    """A step that was refused or lost: the snapshot that follows it tells all, and at the right time."""
    path = tmp_path / "session.journal"
    requests = random_feed(5, 80, prompt=40, output=12, gap_seconds=0.05)
    source = RecordedSource(path)
    source.open(OpenSession(LIMITS, mode=Mode.SHADOW))
    source.snapshots = {40, 41, 75}
    engine = SimulatedEngine(requests, LIMITS, LinearTimer(), source)
    outcome = engine.run()
    source.close()
    read = read_session(path)
    assert read.requests["followed"].all()
    assert_equal(read, requests, outcome)


@pytest.mark.parametrize("missed", [3, 20])
def test_a_gap_costs_those_who_got_tokens_in_it(missed: int, tmp_path: Path) -> None:
    requests = random_feed(5, 80, prompt=40, output=12, gap_seconds=0.05)
    path = tmp_path / "session.journal"
    lost = frozenset(range(40, 40 + missed))
    outcome = record(path, requests, LinearTimer(), OpenSession(LIMITS, mode=Mode.SHADOW), lost=lost)
    read = read_session(path)
    rows = read.requests
    left = ~rows["followed"]
    assert 0 < left.sum() < 40
    done = read.scored
    assert done.sum() > 20
    handles = rows["handle"][done]
    assert np.array_equal(rows["last"][done], outcome.last_token_seconds[handles])
    assert np.array_equal(rows["late"][done], outcome.deadline_missed[handles])
    assert np.array_equal(rows["output"][rows["finished"]], outcome.output_tokens[rows["handle"][rows["finished"]]])


def test_time_between_iterations_is_measured(tmp_path: Path) -> None:
    """An engine that spends 2 ms between iterations and does not count them as part of any."""

    path = tmp_path / "session.journal"
    messages: list[Request] = [OpenSession(LIMITS, mode=Mode.SHADOW)]
    now = 0.0
    for number in range(20):
        if number == 0:
            messages.append(step(0, now, arrived=columns([1], [9])))
        else:
            batch = AppliedBatch(ints(1), ints(9 if number == 1 else 1))
            took = {"last_iteration_seconds": 0.01}
            messages.append(step(number, now, 30, applied_exactly=False, applied=batch, iteration=took))
        now += 0.012
    write(path, messages)
    assert read_session(path).overhead_seconds == pytest.approx(0.002)


class AskingAhead:
    """An engine's messages about one request, each sent when an iteration is launched, as the adapter in vLLM does.

    ``ends`` holds when each iteration really ended; the messages only hold when it was expected to.
    """

    OVERHEAD_SECONDS = 0.001

    def __init__(self, mode: Mode, predicted: bool) -> None:
        self.messages: list[Request] = [
            OpenSession(LIMITS, mode=mode),
            step(0, 1.0, arrived=columns([1], [9], arrival_seconds=floats(1.0))),
        ]
        self.ends: list[float] = []
        self._predicted = predicted
        self._typical = 0.0
        self._launched = 0.0
        self._now = 1.0

    def run(self, durations: list[float]) -> None:
        for seconds in durations:
            done = len(self.ends)
            launched = self._now + self.OVERHEAD_SECONDS
            measured: dict[str, float] = {"pipeline_depth": 1}
            if done:
                last = self.ends[-1] - self._launched
                self._typical += (0.1 if self._typical else 1.0) * (last - self._typical)
                measured["last_iteration_seconds"] = last
            expected = launched + (0.02 if self._predicted else self._typical)
            batch = AppliedBatch(ints(1), ints(1 if done else 9))
            self.messages.append(step(done + 1, expected, 30, applied_exactly=False, applied=batch, iteration=measured))
            self._launched = launched
            self._now = launched + seconds
            self.ends.append(self._now)


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.ACTIVE])
def test_engine_that_asks_ahead_is_dated_by_how_long_its_iterations_took(mode: Mode, tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    engine = AskingAhead(mode, predicted=mode is Mode.ACTIVE)
    durations = [0.05, 0.01, 0.01, 0.3, 0.01, 0.012, 0.5, 0.01, 0.01, 0.02]
    engine.run(durations)
    last = {"pipeline_depth": 1, "last_iteration_seconds": durations[-1]}
    gone = step(11, engine.ends[-1] + 0.1, 40, applied_exactly=False, iteration=last, finished_handles=ints(1))
    write(path, [*engine.messages, gone], predicted_seconds=0.02)
    read = read_session(path)
    (row,) = read.requests
    assert read.scored.all()
    assert row["output"] == len(durations)
    assert row["first"] == pytest.approx(engine.ends[0])
    assert row["last"] == pytest.approx(engine.ends[-1])
    assert read.token_gaps == pytest.approx(np.diff(engine.ends))
    assert read.overhead_seconds == pytest.approx(engine.OVERHEAD_SECONDS)
    assert row["gap_missed"]
    assert row["late"] == any(end > 1.0 + row["ttft"] + place * row["tbt"] for place, end in enumerate(engine.ends))


def test_token_that_was_computed_in_vain_does_not_count(tmp_path: Path) -> None:
    """With an iteration in flight: the request had ended with the one before."""
    path = tmp_path / "session.journal"
    engine = AskingAhead(Mode.SHADOW, predicted=False)
    engine.run([0.01] * 5)
    vain = AppliedBatch(ints(1), ints(1))
    measured = {"pipeline_depth": 1, "last_iteration_seconds": 0.01}
    gone = step(6, 1.07, 40, applied_exactly=False, applied=vain, iteration=measured, finished_handles=ints(1))
    write(path, [*engine.messages, gone])
    (row,) = read_session(path).requests
    assert row["output"] == 5
    assert row["last"] == pytest.approx(engine.ends[-1])


def write(path: Path, messages: list[Request], defaults: SessionDefaults | None = None, **answer: float) -> None:
    """A journal of these messages and what a session answers; ``answer`` changes fields of allocations."""
    defaults = defaults or SessionDefaults()
    session, writer = Session("1", defaults), JournalWriter(path.open("wb"), "1", defaults)
    for message in messages:
        request = encode_request(message)
        response = answer_request(session, request)[1]
        if response.HasField("batch_allocation"):
            for name, value in answer.items():
                setattr(response.batch_allocation, name, value)
        writer.write(request, response)
    writer.close()


def test_what_the_sidecar_decided_counts_where_the_engine_left_it_open(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    defaults = SessionDefaults("vllm", {"max_tokens": "32"}, SloDefaults(2.0, 0.07), "a100-tp1", Mode.SHADOW)
    write(path, [OpenSession(LIMITS, mode=Mode.ACTIVE), step(0, arrived=columns([1], [9]))], defaults)
    read = read_session(path)
    assert (read.opening.policy, read.opening.policy_parameters) == ("vllm", {"max_tokens": "32"})
    assert (read.opening.profile, read.opening.mode) == ("a100-tp1", Mode.SHADOW)
    assert (read.requests["ttft"][0], read.requests["tbt"][0]) == (2.0, 0.07)
    assert not read.scored.any()


def test_tokens_of_one_iteration_come_together(tmp_path: Path) -> None:
    """Accepted drafts: three tokens at once, the first of them decides whether any was late."""
    path = tmp_path / "session.journal"
    arrived = columns([1], [9], speculative_tokens=ints(2), ttft_slo_seconds=floats(1.0), tbt_slo_seconds=floats(0.1))
    more = ProgressColumns(ints(1), ints(12), ints(4))
    write(
        path,
        [
            OpenSession(LIMITS),
            step(0, 0.0, arrived=arrived),
            step(1, 0.9, 37),
            step(2, 1.05, 37, progress=more),
            step(3, 1.15, 37, finished_handles=ints(1)),
        ],
    )
    read = read_session(path)
    (row,) = read.requests
    assert (row["output"], row["first"], row["last"]) == (5, 0.9, 1.15)
    assert read.scored.all()
    assert not row["late"], "tokens 2 to 4 were due at 1.1 s and later, token 5 at 1.4 s"
    assert row["gap_missed"], "0.15 s passed before the second"
    assert np.sort(read.token_gaps) == pytest.approx([0.0, 0.0, 0.1, 0.15])


def test_request_without_a_token_and_one_that_was_under_way_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    write(
        path,
        [
            OpenSession(LIMITS),
            snapshot([(1, 8, 8, 1), (2, 9, 0, 0), (3, 9, 0, 0)], running=1, free=37),
            step(1, 0.5, 30, epoch=1, applied_exactly=False, finished_handles=ints(3)),
            step(2, 1.0, 30, epoch=1),
            step(3, 1.5, 30, epoch=1, finished_handles=ints(1, 2)),
        ],
    )
    read = read_session(path)
    assert read.requests["handle"].tolist() == [1, 2, 3]
    assert read.requests["followed"].tolist() == [False, True, True]
    assert read.requests["finished"].tolist() == [True, True, False]
    assert read.requests["output"].tolist() == [3, 2, 0]


def test_decision_equals_what_the_engine_did_whatever_the_order(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    both = columns([1, 2], [9, 30])
    write(
        path,
        [
            OpenSession(LIMITS, mode=Mode.SHADOW),
            step(0, 0.0, 40, arrived=both),
            step(1, 0.1, 30, applied_exactly=False, applied=AppliedBatch(ints(2, 1), ints(30, 9))),
            step(2, 0.2, 29, applied_exactly=False, applied=AppliedBatch(ints(1), ints(1))),
            step(3, 0.3, 29, applied_exactly=False),
            step(4, 0.4, 29),
            step(5, 0.5, 29, applied_exactly=False, applied=AppliedBatch(ints(2), ints(1), ints(1))),
        ],
    )
    decisions = read_session(path).decisions
    assert (decisions.compared, decisions.equal) == (4, 2), "nothing ran in the third: it was asked for anew"
    assert decisions.paths == {"fcfs": 6}
    assert (decisions.active, decisions.obeyed) == (0, 0)


def test_journal_in_which_nothing_opened(tmp_path: Path) -> None:
    path = tmp_path / "session.journal"
    write(path, [OpenSession(LIMITS, policy="nope"), step(0)])
    with pytest.raises(ShadowError, match=r"session\.journal: no session was opened in it; give"):
        read_session(path)
    with pytest.raises(JournalError, match="cannot be read"):
        read_session(tmp_path / "none")
