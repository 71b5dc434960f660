"""Streams of an OpenAI server, many at once, some of them hung up on."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(slots=True)
class Ask:
    """One request: its body beside model, stream and sampling; ``hang_up_after``: events that are read at most."""

    body: Mapping[str, Any]
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up_after: int | None = None
    delay_seconds: float = 0.0


@dataclass(slots=True)
class Told:
    """What came back."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    hung_up: bool = False


def stream_all(url: str, asks: Sequence[Ask], *, at_once: int = 64, during: Any = None) -> list[Told]:
    """Sends all, ``at_once`` of them at a time; ``during`` is run in a thread meanwhile."""
    return asyncio.run(_stream_all(url, asks, at_once, during))


def metric(url: str, name: str) -> float:
    """Returns the sum of a metric's samples."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    assert values, f"no metric {name}"
    return sum(values)


async def _stream_all(url: str, asks: Sequence[Ask], at_once: int, during: Any) -> list[Told]:
    import aiohttp

    told = [Told() for _ in asks]
    room = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:

        async def one(ask: Ask, said: Told) -> None:
            async with room:
                await asyncio.sleep(ask.delay_seconds)
                body = {"model": "tiny", "stream": True, "temperature": 0.0, "return_token_ids": True, **ask.body}
                async with client.post(url + ask.path, json=body, headers=dict(ask.headers)) as answer:
                    if answer.status != 200:
                        said.error = f"{answer.status}: {await answer.text()}"
                        return
                    await _read(answer, ask, said)

        work = asyncio.gather(*(one(ask, said) for ask, said in zip(asks, told, strict=True)))
        if during is None:
            await work
        else:
            await asyncio.gather(work, asyncio.to_thread(during))
    return told


async def _read(answer: Any, ask: Ask, said: Told) -> None:
    events = 0
    async for line in answer.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        if ask.hang_up_after is not None and events >= ask.hang_up_after:
            said.hung_up = True
            return
        events += 1
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            said.error = str(event["error"])
            return
        for choice in event["choices"]:
            said.tokens += choice.get("token_ids") or []
            said.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            said.finish_reason = choice.get("finish_reason") or said.finish_reason
