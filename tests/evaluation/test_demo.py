"""The parts of `slidingserve demo vllm` that need no engine: its requests, its counts, its screen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.engines.demo import DemoRequest, DemoResult, DemoRun, planned_share, run_demo
from evaluation.engines.demo_load import (
    CHUNK_TOKENS,
    DemoSlos,
    demo_rate,
    demo_slos,
    demo_workload,
    slo_headers,
    warm_up_workload,
)
from evaluation.engines.demo_screen import WIDTH, render, to_json
from evaluation.engines.stage import OWN_POLICY, StageFailed
from evaluation.scores import Percentiles, Scores, Violations
from evaluation.workloads import WorkloadError
from predictor.model import LatencyModel, linear_model
from sidecar.journal import JournalWriter
from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.codec import encode_request, encode_response
from slidingserve.contract.values import AppliedBatch, OpenSession, Request
from tests.strategies import LIMITS, columns, ints, snapshot, step

# The measured costs of the tiny model on two ranks of one core (docs of the adapter): seconds.
SLOS = DemoSlos(0.2, 0.04, 2.0, 0.08)


def machine(slower: float) -> LatencyModel:
    return linear_model(
        "here", 0.005 * slower, prefill_tokens=2.2e-5 * slower, prefill_work=2.8e-8 * slower, decodes=1e-4 * slower
    )


@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0])
def test_pressure_is_the_same_on_every_machine(slower: float) -> None:
    usual = demo_slos(machine(1.0))
    slos = demo_slos(machine(slower))
    assert slos.chat_tbt == pytest.approx(slower * usual.chat_tbt)
    assert slos.chat_ttft - usual.chat_ttft == pytest.approx((slower - 1) * (usual.chat_ttft - 0.03))
    assert demo_rate(machine(slower)) == pytest.approx(demo_rate(machine(1.0)) / slower)
    full_chunk = slower * (0.005 + CHUNK_TOKENS * 2.2e-5 + CHUNK_TOKENS**2 * 2.8e-8)
    assert slos.chat_tbt < full_chunk, "a full chunk beside decodes breaks it"


def test_requests_are_those_of_the_seed() -> None:
    workload = demo_workload(SLOS, 8.0, 300, 5)
    assert len(workload) == 300
    assert np.diff(workload.arrival_seconds).mean() == pytest.approx(1 / 8.0, rel=0.2)
    documents = workload.class_index == 2
    assert 0.12 < documents.mean() < 0.3
    assert workload.prompt_tokens[documents].min() > CHUNK_TOKENS
    assert workload.prompt_tokens[~documents].max() <= 150
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 4096
    assert set(workload.ttft_slo_seconds[documents]) == {2.0}
    assert set(workload.tbt_slo_seconds[~documents]) == {0.04}
    again, other = demo_workload(SLOS, 8.0, 300, 5), demo_workload(SLOS, 8.0, 300, 6)
    assert workload.prompt_tokens.tolist() == again.prompt_tokens.tolist() != other.prompt_tokens.tolist()
    assert demo_workload(SLOS, 16.0, 300, 5).arrival_seconds == pytest.approx(workload.arrival_seconds / 2)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 40), (8.0, 256), (1000.0, 400)])
def test_number_of_requests_follows_the_rate(rate: float, count: int) -> None:
    assert len(demo_workload(SLOS, rate, None, 0)) == count


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rate_out_of_range(rate: float) -> None:
    with pytest.raises(WorkloadError, match="rate"):
        demo_workload(SLOS, rate, 10, 0)


def test_headers_are_those_that_the_middleware_reads() -> None:
    from engine_adapter.vllm.middleware import HEADERS

    workload = demo_workload(SLOS, 8.0, 30, 0)
    headers = slo_headers(workload)
    known = {name for names in HEADERS.values() for name in names}
    assert all(set(own) <= known for own in headers)
    chat = headers[int(np.flatnonzero(workload.class_index == 1)[0])]
    assert {name: chat[name] for name in sorted(chat)} == {
        "x-slidingserve-class": "chat",
        "x-slidingserve-tbt-slo-ms": "40.000",
        "x-slidingserve-ttft-slo-ms": "200.000",
    }
    assert slo_headers(warm_up_workload(3, 1.0, 0)) == [{}, {}, {}], "no SLO, no header"


def test_planned_share_counts_what_was_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    writer, session = JournalWriter(path.open("wb"), "1", SessionDefaults()), Session("1")

    def say(message: Request) -> None:
        answer = session.handle(message)
        writer.write(encode_request(message), encode_response(answer))

    say(OpenSession(LIMITS))
    say(step(0, arrived=columns([1, 2, 3], [9, 20, 5])))
    say(step(1))  # executed: 1 planned
    say(step(2, applied_exactly=False, applied=AppliedBatch(ints(2), ints(1))))  # 1 alone
    say(step(3, applied_exactly=False))  # a plan that was not used: no iteration
    # 2 planned: request 3 had ended when its turn came
    say(step(4, applied_exactly=False, applied=AppliedBatch(ints(1, 2), ints(1, 1)), finished_handles=ints(3)))
    say(snapshot([(1, 9, 10, 2), (2, 20, 21, 2)], 2, 20, number=7))  # three iterations without
    say(step(8, epoch=1, free=20))  # 3 planned
    writer.close()
    assert planned_share([path]) == 3 / 7
    assert planned_share([path, path]) == 3 / 7
    assert math.isnan(planned_share([]))


def result(*policies: str) -> DemoResult:
    scores = Scores(
        Violations(0.254, 0.3, 0.2), Percentiles(0.1, 0.2, 0.3), Percentiles(0.01, 0.02, math.nan), 3.0, 140.0
    )
    run = DemoRun(OWN_POLICY, scores, {"chat": 0.7, "document": math.nan}, math.nan, 0, 25.0)
    runs = (run, *(replace(run, policy=policy, planned_share=0.9996) for policy in policies))
    return DemoResult(runs, SLOS, 8.0, 200, 0, "0.32.0", 2, True, 1234, 0.051)


def test_screen_has_a_row_for_each_policy() -> None:
    screen = render(result("slidingserve", "slidingserve:max_tokens=256,objective=max_tokens,window=2"))
    assert screen.isascii()
    assert max(map(len, screen.splitlines())) <= WIDTH
    assert "vLLM 0.32.0, 2 ranks on CPUs, tiny random model: 200 requests, 8/s, seed 0" in screen
    assert "chats TTFT 200 ms, TBT 40 ms; documents TTFT 2,000 ms, TBT 80 ms" in screen
    (own,) = (line for line in screen.splitlines() if line.startswith(OWN_POLICY))
    assert [cell.strip() for cell in own.split("|")] == [
        *(OWN_POLICY, "74.6", "70.0", "-", "100.0", "200.0", "10.0", "-", "-")
    ]
    (one,) = (line for line in screen.splitlines() if line.startswith("slidingserve  "))
    assert one.endswith(" 99.9"), "rounded down: not every iteration was planned"


def test_json_has_no_nan() -> None:
    document = json.loads(json.dumps(to_json(result("slidingserve")), allow_nan=False))
    assert document["schema"] == 1
    assert [run["policy"] for run in document["runs"]] == [OWN_POLICY, "slidingserve"]
    own = document["runs"][0]
    assert own["met"]["deadline"] == pytest.approx(0.746)
    assert own["met_by_class"] == {"chat": 0.7, "document": None}
    assert own["planned_share"] is None
    assert own["tbt_seconds"] == {"p50": 0.01, "p90": 0.02, "p99": None}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (DemoRequest(policies=("nope",)), UnknownPolicyError),
        (DemoRequest(policies=("vllm:max_tokens=-1",)), PolicyParameterError),
        (DemoRequest(policies=("slidingserve:mode",)), PolicySpecError),
        (DemoRequest(policies=("slidingserve:model=/none.json",)), PolicyParameterError),
        (DemoRequest(requests=0), WorkloadError),
        (DemoRequest(seed=-1), WorkloadError),
        (DemoRequest(rate=0.0), WorkloadError),
        (DemoRequest(tensor_parallel=0), StageFailed),
        (DemoRequest(tensor_parallel=3), StageFailed),
    ],
)
def test_bad_request_is_refused_before_anything_starts(request_: DemoRequest, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_demo(request_, lambda line: pytest.fail("something was started"))
