"""``vllm serve`` on two CPU ranks with the adapter: streams, headers, a sidecar that fails in every way, aborts.

One server for all tests (half a minute to start); the sidecars come and go at the address that it knows.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.engines.tiny_model import make_tiny_model
from evaluation.engines.vllm_process import VllmServer
from evaluation.sidecar_process import SidecarProcess
from sidecar.journal import read_journal
from slidingserve.contract.codec import decode_request
from slidingserve.contract.values import BatchAllocation, IterationState, RequestColumns, Snapshot, Step
from tests.adapter.scripted_sidecar import Reply, Script, ScriptedSidecar, allocation
from tests.vllm.streams import CHAT, Ask, Told, metric, stream_all

pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")
pytestmark = [pytest.mark.vllm, pytest.mark.long]

TOKENS = 40
MOST_LOADS, ENOUGH_ANSWERS = 12, 8
"""The breaker lets few questions through to a sidecar like that; so much load, and so many answers, are enough."""
LIMITS = (
    *("--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "32"),
    "--no-enable-prefix-caching",
)
ADAPTER = (
    *("--scheduler-cls", "engine_adapter.vllm.build_scheduler"),
    *("--middleware", "engine_adapter.vllm.middleware.SLOHeaders"),
)


class Served:
    """The server, and where its sidecar is expected."""

    def __init__(self, server: VllmServer, target: str) -> None:
        self.server, self.target, self.url = server, target, server.url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serving")
    make_tiny_model(folder)
    target = f"unix:{folder}/s.sock"
    settings = {"slidingserve": {"target": target, "classes": {"chat": {"ttft_slo_ms": 700, "tbt_slo_ms": 70}}}}
    arguments = (*LIMITS, *ADAPTER, "--additional-config", json.dumps(settings))
    environment = {"VLLM_LOGGING_LEVEL": "INFO"}  # the last test reads the log
    with VllmServer(folder, arguments, tensor_parallel=2, environment=environment) as server:
        stream_all(server.url, asks(4))  # kernels are compiled on the way
        yield Served(server, target)


@pytest.fixture(scope="module")
def own(served: Served) -> list[Told]:
    """What is said without a sidecar."""
    told = stream_all(served.url, asks(24))
    check_complete(told)
    return told


def asks(count: int, **headers: str) -> list[Ask]:
    draw = random.Random(7)
    return [
        Ask(
            {
                "prompt": [draw.randrange(2, 4000) for _ in range(draw.choice((5, 60, 400, 900)))],
                "max_tokens": TOKENS,
                "ignore_eos": True,
            },
            headers=headers,
        )
        for _ in range(count)
    ]


def check_complete(told: list[Told]) -> None:
    """No failed request, no lost and no additional token."""
    assert [t.error for t in told] == [""] * len(told)
    assert [len(t.tokens) for t in told] == [TOKENS] * len(told)
    assert {t.finish_reason for t in told} == {"length"}


def wait_for(what: str, holds: Any) -> None:
    """Waits until something has come to pass in another process, three minutes at most."""
    end = time.monotonic() + 180
    while not holds():
        assert time.monotonic() < end, f"it never came to pass: {what}"
        time.sleep(0.05)


def open_sidecar(served: Served, *arguments: str) -> SidecarProcess:
    """Starts a sidecar and waits until the engine has found it."""
    sidecar = SidecarProcess(arguments, served.target)
    wait_for(f"a session; the sidecar says: {sidecar.log}", lambda: "session opened" in sidecar.log)
    return sidecar


def arrivals(folder: Path) -> Iterator[tuple[RequestColumns, tuple[str, ...], tuple[str, ...]]]:
    """Yields the requests that a journal tells of, with the names of classes and tenants that they point to."""
    for path in sorted(folder.iterdir()):
        classes: list[str] = [""]
        tenants: list[str] = [""]
        for request, _ in read_journal(path).exchanges:
            message = decode_request(request)
            columns = None
            if isinstance(message, Snapshot):
                columns, classes, tenants = message.requests, [""], [""]
            elif isinstance(message, Step):
                columns = message.arrived
            if columns is not None and len(columns.handles):
                classes += columns.class_names
                tenants += columns.tenant_names
                yield columns, tuple(classes), tuple(tenants)


def test_headers_reach_the_sidecar_with_completions_and_chat(served: Served, tmp_path: Path) -> None:
    headers = {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "40", "x-llm-d-inference-fairness-id": "acme"}
    chat = Ask(
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS, "ignore_eos": True, "priority": 3},
        CHAT,
        {"x-llm-d-inference-objective": "chat"},
    )
    nonsense = asks(1, **{"x-slo-ttft-ms": "soon", "x-slo-tpot-ms": "-1"})
    body_wins = Ask({**asks(1)[0].body, "vllm_xargs": {"ttft_slo_ms": 111}}, headers=headers)
    with open_sidecar(served, "--journal-dir", str(tmp_path)):
        told = stream_all(served.url, [*asks(3, **headers), chat, *nonsense, body_wins])
    check_complete(told)
    assert told[3].text
    seen = []
    for columns, classes, tenants in arrivals(tmp_path):
        for row in range(len(columns.handles)):
            seen.append(
                (
                    round(float(columns.ttft_slo_seconds[row]), 6),
                    round(float(columns.tbt_slo_seconds[row]), 6),
                    classes[columns.class_index[row]],
                    tenants[columns.tenant_index[row]],
                    int(columns.priority[row]),
                )
            )
    assert sorted(set(seen)) == [
        (0.0, 0.0, "", "", 0),  # nonsense is as good as nothing
        (0.111, 0.04, "", "acme", 0),
        (0.25, 0.04, "", "acme", 0),
        (0.7, 0.07, "chat", "", 3),
    ]


@pytest.mark.parametrize("policy", ["vllm:max_tokens=64", "slidingserve"])
def test_streams_are_those_of_vllm(served: Served, own: list[Told], policy: str) -> None:
    with open_sidecar(served, "--policy", policy, "--profile", "rtx3090-tp2"):
        told = stream_all(served.url, asks(24))
    check_complete(told)
    assert [t.tokens for t in told] == [t.tokens for t in own]


def test_a_sidecar_that_stops_dies_and_comes_back_costs_no_token(served: Served, own: list[Told]) -> None:
    with open_sidecar(served) as sidecar:

        def harm() -> None:
            time.sleep(0.3)
            sidecar.process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            sidecar.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            sidecar.process.kill()
            sidecar.restart()
            wait_for("a second session", lambda: sidecar.log.count("session opened") > 1)

        told = stream_all(served.url, asks(24), at_once=8, during=harm)
    check_complete(told)
    assert [t.tokens for t in told] == [t.tokens for t in own]


def nonsense(iteration: IterationState) -> Reply:
    """A different mistake at each step."""
    kind = iteration.step % 7
    many = np.arange(1000, dtype=np.int64)
    answers: list[BatchAllocation] = [
        allocation(iteration, handles=many + 10**6, tokens=many + 1),  # unknown requests
        allocation(iteration, handles=many, tokens=many * 0 + 10**6),  # far above the budget
        allocation(iteration, handles=many[:0], tokens=many[:0]),  # an empty plan
        allocation(iteration, step=iteration.step + 5),  # of another step
        allocation(iteration, handles=many[:3] * 0 + 1, tokens=many[:3] + 1),  # one request thrice
        allocation(iteration, handles=many[:2], tokens=many[:2] - 1),  # tokens below 1
        allocation(iteration, preempted_handles=many),  # everybody is to go
    ]
    return answers[kind]


def slow(iteration: IterationState) -> Reply:
    time.sleep(0.02)
    return allocation(iteration)


@pytest.mark.parametrize("script", [nonsense, slow])
def test_a_sidecar_that_lies_or_dawdles_costs_no_token(served: Served, own: list[Told], script: Script) -> None:
    sidecar = ScriptedSidecar(served.target)
    sidecar.will(*[script] * 100_000)
    sidecar.start()
    try:
        wait_for("a session", lambda: bool(sidecar.received))
        for _ in range(MOST_LOADS):
            told = stream_all(served.url, asks(24))
            check_complete(told)
            assert [t.tokens for t in told] == [t.tokens for t in own]
            if len(sidecar.received) > ENOUGH_ANSWERS:
                return
    finally:
        sidecar.stop()
    raise AssertionError(f"only {len(sidecar.received)} messages in {MOST_LOADS} loads")


def test_five_hundred_requests_with_random_aborts_leave_every_block_free(served: Served) -> None:
    draw = random.Random(11)
    wanted = [
        Ask(
            {
                "prompt": [draw.randrange(2, 4000) for _ in range(draw.randint(1, 300))],
                "max_tokens": draw.randint(1, 12),
                "ignore_eos": True,
            },
            hang_up_after=draw.choice((None, None, 0, 1, 3)),
        )
        for _ in range(500)
    ]
    with open_sidecar(served, "--policy", "slidingserve", "--profile", "rtx3090-tp2"):
        told = stream_all(served.url, wanted, at_once=48)
        wait_for("all requests gone", lambda: metric(served.url, "vllm:num_requests_running") == 0)
    assert [t.error for t in told] == [""] * 500
    assert sum(t.hung_up for t in told) > 100
    for ask, said in zip(wanted, told, strict=True):
        if not said.hung_up:
            assert len(said.tokens) == ask.body["max_tokens"]
    assert metric(served.url, "vllm:num_requests_waiting") == 0
    assert metric(served.url, "vllm:kv_cache_usage_perc") == 0.0


def test_the_engine_log_tells_what_happened(served: Served) -> None:
    """Runs last: what the others did is in the log, and nothing of it failed inside the engine."""
    log = served.server.log
    assert "slidingserve: active at unix:" in log
    assert "slidingserve: failed" not in log
