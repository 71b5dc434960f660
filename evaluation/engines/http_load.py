"""Sends a workload to an OpenAI server at its arrival times, as streams, and records when each token came.

Open loop: a request is sent when it is due, however many are still being served. Times are counted from when it was
due, so a client that is late makes no server look better. Scores of such a run are those of a simulated one
(`evaluation.scores`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_adapter.simulated.outcome import Outcome
from evaluation.workloads import Workload
from slidingserve.contract.values import Floats

Headers = Mapping[str, str]
_DATA = b"data: "
_DONE = b"[DONE]"


class LoadClientMissing(RuntimeError):
    """The package ``aiohttp`` is not installed; it comes with vLLM."""


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request; seconds from the start of the run.

    Attributes:
        sent_seconds: when it was sent; NaN: never.
        token_seconds: when each token came.
        finish_reason: what the server said at the end, such as ``length``; empty: it did not come to that.
        error: what went wrong; empty: nothing.
    """

    sent_seconds: float = float("nan")
    token_seconds: list[float] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""

    def take(self, event: Mapping[str, Any], now_seconds: float) -> None:
        """Takes in one event of the stream, a completion chunk with usage so far. Raises KeyError if it is no such."""
        if "error" in event:
            self.error = str(event["error"])[:500]
            return
        for choice in event["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        if usage:  # counts tokens: several may come at once, and the text of one may be empty
            new = int(usage["completion_tokens"]) - len(self.token_seconds)
            self.token_seconds.extend([now_seconds] * new)


def random_prompts(workload: Workload, first: int, stop: int, seed: int) -> list[list[int]]:
    """Returns token ids from [first, stop) for each request, of its length."""
    draw = np.random.default_rng([seed, len(workload)])
    return [draw.integers(first, stop, int(tokens)).tolist() for tokens in workload.prompt_tokens]


def send_load(
    url: str,
    model: str,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    headers: Sequence[Headers],
    *,
    limit_seconds: float,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[RequestRecord]:
    """Sends every request and waits for all; returns their records in the order of the workload.

    Args:
        url: of the server, without a path.
        model: name that the server serves it by.
        workload: when requests are due and how many tokens they ask for; each gets exactly so many.
        prompts: token ids of each.
        headers: of each.
        limit_seconds: after so long, what is not finished is given up (its record has an error).
        progress: told how many are finished, as they finish.

    Raises:
        LoadClientMissing: see there.
    """
    if not len(workload) == len(prompts) == len(headers):
        raise ValueError(f"{len(workload)} requests, {len(prompts)} prompts, {len(headers)} headers: give one for each")
    return asyncio.run(_send_all(url, model, workload, prompts, headers, limit_seconds, progress))


def outcome_of(workload: Workload, records: Sequence[RequestRecord]) -> Outcome:
    """Returns what happened as `evaluation.scores.score` takes it. Linear in the tokens.

    A request is finished if it got all its tokens and no error. The makespan ends with the last token (or, if none
    came, with the last arrival).
    """
    tokens = [np.array(record.token_seconds, np.float64) for record in records]
    gaps = [np.diff(times) for times in tokens]
    ends = np.concatenate([np.zeros(0), *(times[1:] for times in tokens)])
    slos = zip(workload.arrival_seconds, workload.ttft_slo_seconds, workload.tbt_slo_seconds, strict=True)
    late, gap_missed = [], []
    for times, own, (arrival, ttft, tbt) in zip(tokens, gaps, slos, strict=True):
        due = arrival + ttft + np.arange(times.size) * tbt
        late.append(bool((times > due).any()))
        gap_missed.append(bool((own > tbt).any()))
    counts = np.array([times.size for times in tokens], np.int64)
    errors = np.array([bool(record.error) for record in records])
    last = _edge(tokens, -1)
    return Outcome(
        arrival_seconds=workload.arrival_seconds,
        first_token_seconds=_edge(tokens, 0),
        last_token_seconds=last,
        output_tokens=counts,
        deadline_missed=np.array(late, np.bool_),
        gap_missed=np.array(gap_missed, np.bool_),
        finished=(counts >= workload.output_tokens) & ~errors,
        token_gaps=np.concatenate([np.zeros(0), *gaps])[np.argsort(ends, kind="stable")],
        makespan_seconds=float(np.nanmax(last)) if counts.any() else float(workload.arrival_seconds.max()),
    )


def _edge(tokens: Sequence[Floats], place: int) -> Floats:
    return np.array([times[place] if times.size else np.nan for times in tokens])


async def _send_all(
    url: str,
    model: str,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    headers: Sequence[Headers],
    limit_seconds: float,
    progress: Callable[[int], None],
) -> list[RequestRecord]:
    try:
        import aiohttp
    except ImportError as error:
        raise LoadClientMissing("the package aiohttp is missing; pip install aiohttp") from error
    records = [RequestRecord() for _ in prompts]
    bodies = [
        json.dumps(_body(model, prompt, int(tokens))).encode()
        for prompt, tokens in zip(prompts, workload.output_tokens, strict=True)
    ]
    finished = 0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
    ) as client:
        started = time.perf_counter()

        async def one(place: int) -> None:
            nonlocal finished
            due = started + float(workload.arrival_seconds[place])
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            record = records[place]
            own = {"Content-Type": "application/json", **headers[place]}
            try:
                await _stream(client, f"{url}/v1/completions", bodies[place], own, record, started)
            except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
                record.error = record.error or f"{type(error).__name__}: {error}"
            if not record.finish_reason:
                record.error = record.error or "the stream ended before the request did"
            finished += 1
            progress(finished)

        tasks = [asyncio.create_task(one(place)) for place in range(len(records))]
        _, late = await asyncio.wait(tasks, timeout=limit_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    for record, task in zip(records, tasks, strict=True):
        if task in late:
            record.error = record.error or f"not finished within {limit_seconds:g} s"
    return records


async def _stream(client: Any, url: str, body: bytes, headers: Headers, record: RequestRecord, started: float) -> None:
    """Sends one request and records its stream of server-sent events."""
    record.sent_seconds = time.perf_counter() - started
    async with client.post(url, data=body, headers=headers) as answer:
        if answer.status != 200:
            record.error = f"status {answer.status}: {(await answer.text())[:500]}"
            return
        async for line in answer.content:
            now = time.perf_counter() - started
            if line.startswith(_DATA) and not line.startswith(_DONE, len(_DATA)):
                record.take(json.loads(line[len(_DATA) :]), now)


def _body(model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
