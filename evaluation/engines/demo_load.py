"""The requests of the demonstration: chats that want every token soon, and documents whose prompts are in their way.

How long iterations take depends on the machine, so SLOs and rate are derived from the latency model that was fitted to
its warm-up, as papers derive theirs from the time that a prompt takes alone. The pressure is then the same on a laptop
and on a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evaluation.workloads import MAX_RATE, Workload, check_number, check_requests
from predictor.features import ROW, batch_features
from predictor.model import LatencyModel
from slidingserve.contract.values import Ints

Bools: TypeAlias = NDArray[np.bool_]

CHUNK_TOKENS = 2048
"""Token budget of an iteration, vLLM's own default on GPUs: a document's prompt takes two iterations."""
CLASSES = ("chat", "document")
DEFAULT_SECONDS = 32.0
"""How long requests arrive for, if their number is not given."""

_FEWEST, _MOST = 40, 400
_UTILISATION = 0.7
_DOCUMENT_SHARE = 0.2
_DECODES, _DECODE_CONTEXT = 8, 200
_CHAT_PROMPT, _CHAT_OUTPUT = (20, 150), (20, 60)
_DOCUMENT_PROMPT, _DOCUMENT_OUTPUT = (2500, 3600), (8, 20)
# What HTTP, tokenizer and the way back take, beside iterations.
_FLOOR_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class DemoSlos:
    """SLOs in seconds, for chats and documents."""

    chat_ttft: float
    chat_tbt: float
    document_ttft: float
    document_tbt: float


def demo_slos(model: LatencyModel) -> DemoSlos:
    """Returns SLOs in proportion to what iterations take on this machine.

    A chat's first token is due after one and a half full chunks, and its tokens come at the pace of a third of one: an
    engine that decides as the papers' rule wants can keep that, one that puts a full chunk beside decodes cannot.
    """
    full = seconds_of(model, CHUNK_TOKENS, 0)
    decodes = seconds_of(model, 0, 0)
    tbt = max(full / 3, 2.5 * decodes)
    return DemoSlos(_FLOOR_SECONDS + 1.5 * full, tbt, _FLOOR_SECONDS + 25 * full, 2 * tbt)


def demo_rate(model: LatencyModel) -> float:
    """Returns the rate in requests/s at which iterations fill `_UTILISATION` of the time, if 8 decodes share each."""
    decode = seconds_of(model, 0, 0) / _DECODES
    mean_document, mean_chat = sum(_DOCUMENT_PROMPT) / 2, sum(_CHAT_PROMPT) / 2
    prompts = [
        seconds_of(model, CHUNK_TOKENS, 0) + seconds_of(model, int(mean_document) - CHUNK_TOKENS, CHUNK_TOKENS),
        seconds_of(model, int(mean_chat), 0) - seconds_of(model, 0, 0),
    ]
    outputs = [decode * sum(_DOCUMENT_OUTPUT) / 2, decode * sum(_CHAT_OUTPUT) / 2]
    shares = [_DOCUMENT_SHARE, 1 - _DOCUMENT_SHARE]
    busy = sum(share * (prompt + output) for share, prompt, output in zip(shares, prompts, outputs, strict=True))
    return _UTILISATION / busy


def demo_workload(slos: DemoSlos, rate: float, requests: int | None, seed: int) -> Workload:
    """Returns the requests: one in five is a document. Poisson arrivals at ``rate`` requests/s.

    Raises:
        WorkloadError: the rate or the number is out of range.
    """
    check_number("rate", rate, 0.0, MAX_RATE, "requests/s", above=True)
    count = min(max(round(rate * DEFAULT_SECONDS), _FEWEST), _MOST) if requests is None else requests
    check_requests(count)
    draw = np.random.default_rng([seed, 1])
    arrivals = np.cumsum(draw.standard_exponential(count)) / rate
    is_document = draw.random(count) < _DOCUMENT_SHARE
    return Workload(
        name="demo",
        arrival_seconds=arrivals,
        prompt_tokens=_lengths(draw, is_document, _DOCUMENT_PROMPT, _CHAT_PROMPT),
        output_tokens=_lengths(draw, is_document, _DOCUMENT_OUTPUT, _CHAT_OUTPUT),
        ttft_slo_seconds=np.where(is_document, slos.document_ttft, slos.chat_ttft),
        tbt_slo_seconds=np.where(is_document, slos.document_tbt, slos.chat_tbt),
        ttlt_slo_seconds=np.zeros(count),
        class_index=is_document.astype(np.int64) + 1,
        class_names=CLASSES,
        rate=rate,
    )


def warm_up_workload(requests: int, rate: float, seed: int) -> Workload:
    """Returns requests of all lengths, log-uniform, and without SLOs: for an engine to be measured with."""
    draw = np.random.default_rng([seed, 2])
    none = np.zeros(requests)
    low, high = np.log(16), np.log(_DOCUMENT_PROMPT[1])
    return Workload(
        name="warm-up",
        arrival_seconds=np.arange(requests) / rate,
        prompt_tokens=np.exp(draw.uniform(low, high, requests)).astype(np.int64),
        output_tokens=draw.integers(8, 40, requests),
        ttft_slo_seconds=none,
        tbt_slo_seconds=none,
        ttlt_slo_seconds=none,
        class_index=np.zeros(requests, np.int64),
        class_names=(),
        rate=rate,
    )


def slo_headers(workload: Workload) -> list[dict[str, str]]:
    """Returns each request's SLOs and class as HTTP headers, the names of `engine_adapter.vllm.middleware`."""
    names = ("", *workload.class_names)
    return [
        {
            name: text
            for name, text in (
                ("x-slidingserve-ttft-slo-ms", _milliseconds(ttft)),
                ("x-slidingserve-tbt-slo-ms", _milliseconds(tbt)),
                ("x-slidingserve-class", names[kind]),
            )
            if text
        }
        for ttft, tbt, kind in zip(
            workload.ttft_slo_seconds.tolist(),
            workload.tbt_slo_seconds.tolist(),
            workload.class_index.tolist(),
            strict=True,
        )
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds > 0.0 else ""


def _lengths(draw: np.random.Generator, is_first: Bools, first: tuple[int, int], second: tuple[int, int]) -> Ints:
    """Draws uniform lengths, bounds included; both kinds draw, so that one request's kind shifts no other's length."""
    count = len(is_first)
    of_first, of_second = (draw.integers(low, high + 1, count) for low, high in (first, second))
    return np.where(is_first, of_first, of_second)


def seconds_of(model: LatencyModel, chunk_tokens: int, context: int) -> float:
    """Returns the predicted time of 8 decodes and a chunk (0: none)."""
    row = np.zeros(ROW)
    chunk = np.array([1] * _DECODES + [chunk_tokens], np.int64)
    contexts = np.array([_DECODE_CONTEXT] * _DECODES + [context], np.int64)
    batch_features(chunk, contexts, len(chunk), row)
    return float(model.predict(row[None])[0])
