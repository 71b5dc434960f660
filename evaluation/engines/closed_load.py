"""A closed-loop load for profiling: so many requests at once, of lengths that fill their space, as long as it takes.

Answers are not streamed: a client that reads tokens one by one would take time from an engine on the same machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from slidingserve.contract.values import EngineLimits

MOST_REQUESTS = 256
"""At once; each is a thread that sleeps."""
FIRST_TOKEN, LAST_TOKEN = 100, 1000
"""Ids that prompts are drawn from: ordinary tokens of every usual vocabulary."""
LEVELS = (1.0, 0.25, 1.0, 0.06)
"""Shares of all requests that are there at once, in turn, so that small batches occur in which nobody is held back."""
LEVEL_SECONDS = 8.0

_LONGEST_OUTPUT = 512
_SHORTEST_OUTPUT = 4
_ITERATIONS_A_PROMPT = 16  # as many full iterations may the longest prompt take
_ANSWER_SECONDS = 600.0
_GOLDEN = 1.32471795724474602596  # Roberts' R sequence in two dimensions


class LoadFailed(RuntimeError):
    """The server does not take requests; holds what it said."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself: the name of its model, and the longest context in tokens (0: unknown)."""

    model: str
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """Which lengths requests have, and how many there are at once."""

    requests: int
    longest_prompt: int
    longest_output: int

    @property
    def longest_context(self) -> int:
        """Tokens of the longest prompt with its output."""
        return self.longest_prompt + self.longest_output

    def lengths(self, number: int) -> tuple[int, int]:
        """Returns prompt and output tokens of a request; both log-uniform over the numbers. O(1)."""
        first, second = (0.5 + number / _GOLDEN) % 1.0, (0.5 + number / _GOLDEN**2) % 1.0
        prompt = round(math.exp(first * math.log(self.longest_prompt)))
        spread = math.log(self.longest_output / _SHORTEST_OUTPUT) if self.longest_output > _SHORTEST_OUTPUT else 0.0
        output = round(min(_SHORTEST_OUTPUT, self.longest_output) * math.exp(second * spread))
        return max(1, prompt), max(1, output)


def shapes_for(limits: EngineLimits, longest_tokens: int = 0) -> Shapes:
    """Returns what to send to an engine: within its context, an eighth of its KV cache and 16 full iterations a prompt.

    ``longest_tokens`` is what the server allows; 0: unknown.
    """
    kv_tokens = limits.kv_blocks * limits.kv_block_tokens
    bounds = (longest_tokens, limits.max_model_tokens, max(2, kv_tokens // 8))
    longest = max(2, min(bound for bound in bounds if bound > 0))
    output = max(1, min(_LONGEST_OUTPUT, longest // 8))
    prompt = min(longest - output, _ITERATIONS_A_PROMPT * limits.max_tokens_per_iteration)
    return Shapes(min(limits.max_sequences, MOST_REQUESTS), max(1, prompt), output)


def server_facts(url: str) -> ServerFacts:
    """Asks an OpenAI server for its model. Raises `LoadFailed`."""
    connection = _connect(url)
    try:
        connection.request("GET", f"{urlsplit(url).path.rstrip('/')}/v1/models")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise LoadFailed(f"{url}/v1/models: status {answer.status}: {text[:300]}")
        model = json.loads(text)["data"][0]
        return ServerFacts(str(model["id"]), int(model.get("max_model_len") or 0))
    except (OSError, http.client.HTTPException) as error:
        raise LoadFailed(f"no server answers at {url} ({error}); give the address of vLLM's OpenAI server") from error
    except (ValueError, LookupError, TypeError) as error:
        raise LoadFailed(f"{url} is no OpenAI server: its /v1/models cannot be read ({error!r})") from error
    finally:
        connection.close()


class ClosedLoad:
    """Keeps requests coming until it is closed.

    Args:
        url: of the server, without a path.
        model: name that it serves the model by.
        shapes: which requests.
        seed: of the prompts' tokens.
    """

    def __init__(self, url: str, model: str, shapes: Shapes, seed: int = 0) -> None:
        self._url, self._model, self._shapes, self._seed = url, model, shapes, seed
        self._lock = threading.Lock()
        self._next = 0
        self._failure = ""
        self._stop = threading.Event()
        self._connections: list[http.client.HTTPConnection] = []
        self._threads = [
            threading.Thread(target=self._work, args=(place,), daemon=True) for place in range(shapes.requests)
        ]
        self.finished = 0

    def start(self) -> None:
        """Begins to send."""
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises `LoadFailed` if a request failed."""
        if self._failure:
            raise LoadFailed(f"{self._url}: {self._failure}")

    def close(self) -> None:
        """Gives up what is under way: the server sees that its client has gone, and ends those requests."""
        self._stop.set()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5.0)

    def _work(self, place: int) -> None:
        connection = _connect(self._url)
        with self._lock:
            self._connections.append(connection)
        try:
            while not self._stop.is_set():
                if place >= self._level():
                    self._stop.wait(0.2)
                    continue
                self._send(connection)
                connection.close()  # the server would, after some seconds without a request; the next opens it again
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._stop.is_set():
                self._failure = self._failure or f"a request failed ({error!r}); see the log of the server"
        finally:
            connection.close()

    def _level(self) -> float:
        """Returns how many requests there are to be now."""
        phase = int((time.monotonic() - self._started) / LEVEL_SECONDS) % len(LEVELS)
        return max(1.0, LEVELS[phase] * self._shapes.requests)

    def _send(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            number, self._next = self._next, self._next + 1
        prompt, output = self._shapes.lengths(number)
        tokens = np.random.default_rng([self._seed, number]).integers(FIRST_TOKEN, LAST_TOKEN, prompt).tolist()
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        headers = {"Content-Type": "application/json"}
        path = f"{urlsplit(self._url).path.rstrip('/')}/v1/completions"
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            said = text.decode(errors="replace")[:300]
            raise ValueError(f"status {answer.status} for {prompt} + {output} tokens: {said}")
        with self._lock:
            self.finished += 1


def _connect(url: str) -> http.client.HTTPConnection:
    """Returns a connection that opens itself; proxies, which could not reach this machine's own ports, are not used."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LoadFailed(f"{url!r} is no address of a server; give it as http://host:port")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        port = parts.port
    except ValueError:
        raise LoadFailed(f"{url!r} has no port that there is; give it as http://host:port") from None
    return kind(parts.hostname, port, timeout=_ANSWER_SECONDS)
