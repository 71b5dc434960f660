"""HTTP headers as SLOs: ``vllm serve --middleware engine_adapter.vllm.middleware.SLOHeaders``.

vLLM hands no header on to its scheduler, but it does hand on ``vllm_xargs`` of the body; `SLOHeaders` copies the one
into the other. Plain ASGI, nothing of vLLM is imported.

The names are those of the llm-d router, and of the Gateway API Inference Extension before it. Such a router may take
its own headers out of what it passes on; the names with ``x-slidingserve`` are for those who come through one.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from engine_adapter.vllm.parsing import clean_name
from engine_adapter.vllm.slos import CLASS_KEY, TBT_KEY, TENANT_KEY, TTFT_KEY, TTLT_KEY

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Ends of the paths whose bodies may hold ``vllm_xargs``."""
HEADERS: dict[str, tuple[str, ...]] = {
    TTFT_KEY: ("x-slidingserve-ttft-slo-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    TBT_KEY: ("x-slidingserve-tbt-slo-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    TTLT_KEY: ("x-slidingserve-ttlt-slo-ms", "x-slo-ttlt-ms", "x-slo-e2e-ms"),
    CLASS_KEY: ("x-slidingserve-class", "x-llm-d-inference-objective", "x-gateway-inference-objective"),
    TENANT_KEY: (
        "x-slidingserve-tenant",
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
        "x-tenant",
    ),
}
"""Headers for each key of ``vllm_xargs``; the first that has a value is used."""
LARGEST_BODY_BYTES = 16 * 2**20
"""Larger bodies pass as they are, so that no request makes the middleware hold more than this."""

_NAMES = frozenset(name.encode("ascii") for names in HEADERS.values() for name in names)
_log = logging.getLogger(__name__)


class SLOHeaders:
    """ASGI middleware that copies headers into ``vllm_xargs``; what the body says wins.

    A request that has none of the `HEADERS`, or is no POST to `GENERATING_PATHS`, is not touched. Neither is a body
    that is compressed, no JSON object, larger than ``largest_body_bytes``, or ends too early: it passes byte for byte,
    and vLLM says what is wrong with it. `counters` says how often.
    """

    def __init__(self, app: ASGIApp, largest_body_bytes: int = LARGEST_BODY_BYTES) -> None:
        self._app = app
        self._largest_body_bytes = largest_body_bytes
        self.counters: Counter[str] = Counter()
        """``applied``; ``body_wins``: it said everything already; ``invalid_header``; ``conflicting_header``: given
        twice with different values; bodies that passed as they are: ``compressed``, ``not_json``, ``no_object``,
        ``too_large``, ``incomplete``; ``failed``: by a mistake of this class."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection; see the ASGI specification."""
        xargs = self._xargs(scope) if _is_generating(scope) else {}
        if not xargs:
            await self._app(scope, receive, send)
            return
        if (length := _content_length(scope)) is not None and length > self._largest_body_bytes:
            self._count("too_large")
            await self._app(scope, receive, send)
            return
        messages, body = await self._read(receive)
        changed = None if body is None else self._with_xargs(body, xargs)
        if changed is not None:
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            scope = {**scope, "headers": _with_length(scope["headers"], len(changed))}
        await self._app(scope, _first(messages, receive), send)

    def _xargs(self, scope: Scope) -> dict[str, float | int | str]:
        """Returns what the headers say; empty where nothing may be done."""
        try:
            given: dict[bytes, set[bytes]] = {}
            for name, value in scope["headers"]:
                if name.lower() in _NAMES:
                    given.setdefault(name.lower(), set()).add(value.strip())
            if not given:
                return {}
            if not _is_plain(scope["headers"]):
                self._count("compressed")
                return {}
            xargs: dict[str, float | int | str] = {}
            for key, names in HEADERS.items():
                value = self._first_valid(key, [given[n] for n in map(str.encode, names) if n in given])
                if value is not None:
                    xargs[key] = value
            return xargs
        except Exception:
            self._count("failed", exc_info=True)
            return {}

    def _first_valid(self, key: str, candidates: Iterable[set[bytes]]) -> float | int | str | None:
        for values in candidates:
            if len(values) > 1:
                self._count("conflicting_header", key)
                continue
            value = _name(*values) if key in (CLASS_KEY, TENANT_KEY) else _milliseconds(*values)
            if value is not None:
                return value
            self._count("invalid_header", key)
        return None

    async def _read(self, receive: Receive) -> tuple[list[Message], bytes | None]:
        """Returns the messages received, and the whole body unless it is too large or does not arrive."""
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                self._count("incomplete")
                return messages, None
            size += len(message.get("body", b""))
            if size > self._largest_body_bytes:
                self._count("too_large")
                return messages, None
            if not message.get("more_body", False):
                return messages, b"".join(m.get("body", b"") for m in messages)

    def _with_xargs(self, body: bytes, xargs: dict[str, float | int | str]) -> bytes | None:
        """Returns the body with ``xargs`` in it; None: leave it as it is."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            self._count("not_json")
            return None
        try:
            own = _own_xargs(request)
            if own is None:
                self._count("no_object")
                return None
            missing = {key: value for key, value in xargs.items() if own.get(key) is None}
            if not missing:
                self._count("body_wins")
                return None
            if "vllm_xargs" in request or not _is_utf8(body):
                changed = json.dumps({**request, "vllm_xargs": {**own, **missing}}).encode("ascii")
            else:
                changed = _inserted(body, missing, empty=not request)
        except Exception:
            self._count("failed", exc_info=True)
            return None
        self._count("applied")
        return changed

    def _count(self, kind: str, key: str = "", exc_info: bool = False) -> None:
        self.counters[kind] += 1
        if self.counters[kind] == 1 and kind not in ("applied", "body_wins"):
            what = f"{kind.replace('_', ' ')} {key}".strip()
            _log.warning("SLO headers of a request: %s (said once)", what, exc_info=exc_info)


def _is_generating(scope: Scope) -> bool:
    # The end of the path: it may begin with a root path or with where vLLM's application is mounted.
    return bool(scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(GENERATING_PATHS))


def _is_plain(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    codings = [value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"]
    return all(coding in (b"", b"identity") for coding in codings)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return None


def _with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers with another content-length; a chunked request has none and gets none."""
    text = str(length).encode("ascii")
    return [(name, text if name.lower() == b"content-length" else value) for name, value in headers]


def _milliseconds(value: bytes) -> float | int | None:
    """Returns a positive number; None: it is none. 0 and less are none, for there is nothing to say."""
    try:
        number = float(value) if len(value) <= 32 and b"_" not in value else math.nan
    except ValueError:
        return None
    if not 0.0 < number < math.inf:
        return None
    return int(number) if number.is_integer() and number < 2**53 else number


def _name(value: bytes) -> str | None:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    return clean_name(text) or None


def _own_xargs(request: object) -> dict[str, Any] | None:
    """Returns the ``vllm_xargs`` of a body; None: it can have none."""
    if not isinstance(request, dict):
        return None
    own = request.get("vllm_xargs")
    if own is None:
        return {}
    return own if isinstance(own, dict) else None


def _is_utf8(body: bytes) -> bool:
    """Whether a JSON object is in UTF-8 without a mark; UTF-16 and UTF-32 have a zero byte next to the brace."""
    start = body.lstrip(b" \t\r\n")[:2]
    return start[:1] == b"{" and b"\0" not in start


def _inserted(body: bytes, xargs: dict[str, float | int | str], empty: bool) -> bytes:
    """Returns a JSON object with one more member, in front, and all else byte for byte.

    In front, because of members that are given twice the last one counts: should the body hold ``vllm_xargs`` after all
    in a spelling that was overlooked, it wins.
    """
    start = body.index(b"{") + 1
    member = b'"vllm_xargs": ' + json.dumps(xargs).encode("ascii") + (b"" if empty else b", ")
    return body[:start] + member + body[start:]


def _first(messages: list[Message], receive: Receive) -> Receive:
    """Returns a ``receive`` that gives these messages, then those of ``receive``."""
    pending = iter(messages)

    async def replay() -> Message:
        for message in pending:
            return message
        return await receive()

    return replay
