"""Recorded loads are scored as simulated runs are, and the client records what servers do, good and bad."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from evaluation.engines.http_load import RequestRecord, outcome_of, random_prompts, send_load
from evaluation.scores import Violations, score
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits, Ints
from tests.strategies import LinearTimer, floats, ints

LIMITS = EngineLimits(max_tokens_per_iteration=48, max_sequences=8, kv_blocks=200, kv_block_tokens=4)


def workload_of(arrivals: list[float], prompts: list[int], outputs: list[int]) -> Workload:
    count = len(arrivals)
    return Workload(
        name="hand",
        arrival_seconds=floats(*arrivals),
        prompt_tokens=ints(*prompts),
        output_tokens=ints(*outputs),
        ttft_slo_seconds=np.full(count, 0.15),
        tbt_slo_seconds=np.full(count, 0.04),
        ttlt_slo_seconds=np.zeros(count),
        class_index=np.ones(count, np.int64),
        class_names=("hand",),
        rate=1.0,
    )


class TokenTimes:
    """A timer that also notes when each request's iterations ended, which is when a client would see its tokens."""

    def __init__(self) -> None:
        self.timer = LinearTimer()

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        return self.timer.seconds(chunk, context, count)


def simulated(workload: Workload) -> tuple[Outcome, list[RequestRecord]]:
    """Runs the simulated engine; returns its outcome, and what a client would have recorded of it."""
    engine = SimulatedEngine(workload, LIMITS, TokenTimes())
    records = [RequestRecord(finish_reason="length") for _ in range(len(workload))]
    while engine.step():
        so_far = engine.outcome()
        for record, tokens in zip(records, so_far.output_tokens.tolist(), strict=True):
            record.token_seconds += [engine.now_seconds] * (tokens - len(record.token_seconds))
    return engine.outcome(), records


def test_a_recorded_load_has_the_scores_of_the_run_that_it_records() -> None:
    draw = np.random.default_rng(3)
    count = 60
    arrivals = np.cumsum(draw.exponential(0.15, count)).tolist()
    workload = workload_of(arrivals, draw.integers(1, 90, count).tolist(), draw.integers(1, 15, count).tolist())
    outcome, records = simulated(workload)
    ours = outcome_of(workload, records)
    assert 0.1 < score(workload, outcome).violations.deadline < 0.9, "the rules have something to tell apart"
    assert score(workload, ours) == score(workload, outcome)
    for name in ("first_token_seconds", "last_token_seconds", "output_tokens", "deadline_missed", "gap_missed"):
        assert getattr(ours, name).tolist() == getattr(outcome, name).tolist(), name
    assert sorted(ours.token_gaps.tolist()) == sorted(outcome.token_gaps.tolist())


def test_errors_and_missing_tokens_are_misses() -> None:
    workload = workload_of([0.0] * 4, [10] * 4, [2] * 4)
    good = [0.1, 0.12]
    records = [
        RequestRecord(0.0, good, "length"),
        RequestRecord(0.0, good[:1], "stop"),
        RequestRecord(0.0, good, "length", "something broke"),
        RequestRecord(),
    ]
    outcome = outcome_of(workload, records)
    assert outcome.finished.tolist() == [True, False, False, False]
    assert math.isnan(outcome.first_token_seconds[3])
    assert score(workload, outcome).violations == Violations(0.75, 0.75, 0.75)
    assert outcome.makespan_seconds == 0.12


def test_a_load_without_any_token_still_has_an_outcome() -> None:
    workload = workload_of([0.5], [10], [2])
    outcome = outcome_of(workload, [RequestRecord(error="refused")])
    assert score(workload, outcome).violations.deadline == 1.0


def test_prompts_are_of_their_length_and_follow_the_seed() -> None:
    workload = workload_of([0.0, 1.0], [5, 70], [1, 1])
    prompts = random_prompts(workload, 2, 9, seed=1)
    assert [len(prompt) for prompt in prompts] == [5, 70]
    assert set(prompts[1]) == set(range(2, 9))
    assert prompts == random_prompts(workload, 2, 9, seed=1)
    assert prompts != random_prompts(workload, 2, 9, seed=2)


def chunk(tokens: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "", "finish_reason": finish}], "usage": {"completion_tokens": tokens}}


def test_tokens_are_counted_by_usage() -> None:
    """A token may have no text of its own yet, and a chunk may hold several."""
    record = RequestRecord()
    for event, now in ((chunk(1), 1.0), (chunk(1), 1.5), (chunk(4), 2.0), (chunk(5, "length"), 3.0)):
        record.take(event, now)
    record.take({"choices": [], "usage": {"completion_tokens": 5}}, 3.5)
    assert record.token_seconds == [1.0, 2.0, 2.0, 2.0, 3.0]
    assert (record.finish_reason, record.error) == ("length", "")
    record.take({"error": {"message": "out of memory"}}, 4.0)
    assert "out of memory" in record.error


class _Handler(BaseHTTPRequestHandler):
    """Answers by the length of the prompt: 1 a whole stream, 2 status 400, 3 a stream that breaks off, 4 no JSON."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[Mapping[str, str], dict[str, Any]]]
    hold: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((dict(self.headers), body))
        kind = len(body["prompt"])
        if kind == 2:
            self._answer(400, b'{"error": {"message": "no such model"}}')
            return
        if kind == 5:
            self.hold.wait(60)
        events = [chunk(1), chunk(2), chunk(3, "length")]
        lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        if kind == 3:
            lines = lines[:2]
        elif kind == 4:
            lines = [b"data: {oops\n\n"]
        self._answer(200, b"".join(lines))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    pytest.importorskip("aiohttp", reason="the load client needs aiohttp")
    _Handler.seen, _Handler.hold = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    _Handler.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_streams_are_recorded_and_what_goes_wrong_is_told(server: ThreadingHTTPServer) -> None:
    workload = workload_of([0.0, 0.0, 0.01, 0.02], [1, 2, 3, 4], [3] * 4)
    prompts = [[7] * length for length in workload.prompt_tokens.tolist()]
    headers = [{"x-slidingserve-ttft-slo-ms": str(number)} for number in range(4)]
    told: list[int] = []
    records = send_load(url_of(server), "tiny", workload, prompts, headers, limit_seconds=60.0, progress=told.append)
    whole, refused, broken, odd = records
    assert (len(whole.token_seconds), whole.finish_reason, whole.error) == (3, "length", "")
    assert all(later >= whole.sent_seconds for later in whole.token_seconds)
    assert refused.error.startswith("status 400: ")
    assert "no such model" in refused.error
    assert (len(broken.token_seconds), broken.error) == (2, "the stream ended before the request did")
    assert "JSONDecodeError" in odd.error
    assert all(record.sent_seconds >= due for record, due in zip(records, workload.arrival_seconds, strict=True))
    assert told == [1, 2, 3, 4]
    sent = {headers["x-slidingserve-ttft-slo-ms"]: body for headers, body in _Handler.seen}
    assert sorted(sent) == ["0", "1", "2", "3"]
    body = sent["0"]
    assert (body["prompt"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ([7], 3, True, True)
    assert outcome_of(workload, records).finished.tolist() == [True, False, False, False]


def test_what_takes_too_long_is_given_up(server: ThreadingHTTPServer) -> None:
    workload = workload_of([0.0, 0.0], [1, 5], [3, 3])
    records = send_load(url_of(server), "tiny", workload, [[7], [7] * 5], [{}, {}], limit_seconds=1.0)
    assert records[1].error == "not finished within 1 s"
    assert outcome_of(workload, records).finished[1] == np.False_


def test_nobody_listens(server: ThreadingHTTPServer) -> None:
    workload = workload_of([0.0], [1], [3])
    (record,) = send_load("http://127.0.0.1:9", "tiny", workload, [[7]], [{}], limit_seconds=60.0)
    assert "127.0.0.1:9" in record.error


def test_columns_must_fit() -> None:
    workload = workload_of([0.0], [1], [3])
    with pytest.raises(ValueError, match="1 requests, 2 prompts, 1 headers"):
        send_load("http://127.0.0.1:9", "tiny", workload, [[1], [2]], [{}], limit_seconds=1.0)
