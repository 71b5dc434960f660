"""Headers that become ``vllm_xargs``, and all that must pass untouched."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.vllm.middleware import GENERATING_PATHS, HEADERS, Message, Receive, Scope, Send, SLOHeaders

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "vllm_reference.md"
TTFT = (b"x-llm-d-slo-ttft-ms", b"250")
JSON_TYPE = (b"content-type", b"application/json")


def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that waits for nothing but what is there already."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


@dataclass
class Application:
    """An ASGI application that reads its whole body, then waits for the end of the connection."""

    scope: Scope = field(default_factory=dict)
    body: bytes = b""
    messages: list[Message] = field(default_factory=list)
    chunks: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        if scope["type"] == "http":
            while True:
                message = await receive()
                self.messages.append(message)
                if message["type"] != "http.request":
                    return
                self.body += message.get("body", b"")
                if not message.get("more_body", False):
                    break
            self.messages.append(await receive())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


class Exchange:
    """One request through the middleware to an application."""

    def __init__(
        self,
        body: bytes | list[bytes],
        headers: Iterable[tuple[bytes, bytes]] = (TTFT,),
        path: str = "/v1/completions",
        method: str = "POST",
        length: bool = True,
        truncated: bool = False,
        largest_body_bytes: int = 2**20,
        **scope: Any,
    ) -> None:
        chunks = body if isinstance(body, list) else [body]
        self.sent = b"".join(chunks)
        self.given_headers = [JSON_TYPE, *headers]
        if length:
            self.given_headers.append((b"content-length", str(len(self.sent)).encode()))
        self.given_scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": self.given_headers,
            **scope,
        }
        self._incoming: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": truncated or n + 1 < len(chunks)}
            for n, chunk in enumerate(chunks)
        ]
        self._incoming.append({"type": "http.disconnect"})
        self.read_before_the_application = 0
        self.responses: list[Message] = []
        self.application = Application()
        self.middleware = SLOHeaders(self._enter, largest_body_bytes=largest_body_bytes)
        finish(self.middleware(self.given_scope, self._receive, self._send))

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.read_before_the_application = self._read
        await self.application(scope, receive, send)

    _read = 0

    async def _receive(self) -> Message:
        self._read += 1
        return self._incoming.pop(0)

    async def _send(self, message: Message) -> None:
        self.responses.append(message)

    @property
    def counted(self) -> dict[str, int]:
        return dict(self.middleware.counters)

    @property
    def xargs(self) -> Any:
        return json.loads(self.application.body)["vllm_xargs"]

    def assert_untouched(self) -> None:
        assert self.application.body == self.sent
        assert self.application.scope is self.given_scope
        assert self.application.scope["headers"] == self.given_headers

    def assert_whole(self) -> None:
        """The application was reached, read all, saw the end, and answered."""
        assert self.application.messages[-1] == {"type": "http.disconnect"}
        assert [message["type"] for message in self.responses] == ["http.response.start", "http.response.body"]
        lengths = [value for name, value in self.application.scope["headers"] if name.lower() == b"content-length"]
        assert all(int(value) == len(self.application.body) for value in lengths)


@pytest.mark.parametrize("path", [*GENERATING_PATHS, "/api/v1/completions"])
def test_headers_become_xargs(path: str) -> None:
    headers = [
        TTFT,
        (b"X-SLO-TPOT-ms", b" 40.5 "),
        (b"x-slo-ttlt-ms", b"30000"),
        (b"x-llm-d-inference-objective", b"premium"),
        (b"x-tenant", "größe".encode()),
    ]
    exchange = Exchange(b'{"model": "m", "prompt": "Hi"}', headers, path, root_path="/api")
    assert exchange.xargs == {
        "ttft_slo_ms": 250,
        "tbt_slo_ms": 40.5,
        "ttlt_slo_ms": 30000,
        "class": "premium",
        "tenant": "größe",
    }
    assert json.loads(exchange.application.body).keys() == {"vllm_xargs", "model", "prompt"}
    assert exchange.given_scope["headers"] is exchange.given_headers
    assert exchange.counted == {"applied": 1}
    exchange.assert_whole()


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in HEADERS.items() for name in names])
def test_every_header_has_its_key(key: str, name: str) -> None:
    assert Exchange(b"{}", [(name.encode(), b"7")]).xargs == {key: "7" if key in ("class", "tenant") else 7}


@pytest.mark.parametrize("key", HEADERS)
def test_the_first_name_of_the_table_that_can_be_used_wins(key: str) -> None:
    headers = [(name.encode(), str(n + 1).encode()) for n, name in enumerate(HEADERS[key])]
    assert str(Exchange(b"{}", reversed(headers)).xargs[key]) == "1"
    spoilt = [(headers[0][0], b"\x00"), *headers[1:]]
    exchange = Exchange(b"{}", spoilt)
    assert str(exchange.xargs[key]) == "2"
    assert exchange.counted == {"invalid_header": 1, "applied": 1}


def test_the_rest_of_the_body_stays_byte_for_byte() -> None:
    body = b' \r\n{ "seed":12345678901234567890, "top_p":1.10,"a":1e400, "a":"\\ud800\\/", "prompt":"\xc3\xa9" }\n'
    exchange = Exchange(body)
    added = b'"vllm_xargs": {"ttft_slo_ms": 250}, '
    assert exchange.application.body.replace(added, b"", 1) == body
    assert exchange.application.body.index(added) == body.index(b"{") + 1


def test_the_body_wins_key_by_key() -> None:
    own = {"ttft_slo_ms": 900, "tenant": None, "x": [1, "a"]}
    headers = [TTFT, (b"x-tenant", b"acme"), (b"x-slo-tpot-ms", b"40")]
    exchange = Exchange(json.dumps({"prompt": "é", "vllm_xargs": own}).encode(), headers)
    assert exchange.xargs == {"ttft_slo_ms": 900, "tenant": "acme", "x": [1, "a"], "tbt_slo_ms": 40}
    assert json.loads(exchange.application.body)["prompt"] == "é"
    exchange.assert_whole()
    silent = Exchange(json.dumps({"vllm_xargs": {"ttft_slo_ms": 0}}).encode())
    silent.assert_whole()
    assert silent.application.body == silent.sent
    assert silent.counted == {"body_wins": 1}
    assert Exchange(b'{"vllm_xargs": null}').xargs == {"ttft_slo_ms": 250}


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_other_encodings_of_json_are_understood_as_vllm_does(codec: str) -> None:
    exchange = Exchange('{"prompt": "größe"}'.encode(codec))
    assert json.loads(exchange.application.body) == {"prompt": "größe", "vllm_xargs": {"ttft_slo_ms": 250}}
    exchange.assert_whole()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b'{"a": 1} x', "not_json"),
        (b'{"a": "\xff"}', "not_json"),
        pytest.param(b'{"a": ' * 200_000, "not_json", id="deep"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not_json", id="long number"),
        (b"[1]", "no_object"),
        (b"null", "no_object"),
        (b'"text"', "no_object"),
        (b'{"vllm_xargs": [1]}', "no_object"),
        (b'{"vllm_xargs": ""}', "no_object"),
        (b'{"vllm_xargs": 0}', "no_object"),
    ],
)
def test_what_cannot_hold_xargs_passes_byte_for_byte(body: bytes, kind: str) -> None:
    exchange = Exchange(body, largest_body_bytes=2**24)
    exchange.assert_untouched()
    exchange.assert_whole()
    assert exchange.counted == {kind: 1}


@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [
        ("/v1/completions", "POST", []),
        ("/v1/completions", "POST", [(b"x-request-id", b"1")]),
        ("/v1/completions", "GET", [TTFT]),
        ("/v1/completions/render", "POST", [TTFT]),
        ("/v1/completions/", "POST", [TTFT]),
        ("/v1/messages/count_tokens", "POST", [TTFT]),
        ("/v1/embeddings", "POST", [TTFT]),
        ("/health", "POST", [TTFT]),
    ],
)
def test_other_requests_are_not_even_read(path: str, method: str, headers: list[tuple[bytes, bytes]]) -> None:
    exchange = Exchange(b"{}", headers, path, method)
    exchange.assert_untouched()
    exchange.assert_whole()
    assert (exchange.read_before_the_application, exchange.counted) == (0, {})


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_connections_pass(kind: str) -> None:
    application = Application()
    scope: Scope = {"type": kind, "path": "/v1/completions", "headers": [TTFT]}
    finish(SLOHeaders(application)(scope, None, None))  # type: ignore[arg-type]
    assert application.scope is scope


def test_compressed_bodies_pass_unread() -> None:
    exchange = Exchange(gzip.compress(b"{}", mtime=0), [TTFT, (b"Content-Encoding", b"gzip")])
    exchange.assert_untouched()
    assert (exchange.read_before_the_application, exchange.counted) == (0, {"compressed": 1})
    assert Exchange(b"{}", [TTFT, (b"content-encoding", b"identity")]).xargs == {"ttft_slo_ms": 250}


@pytest.mark.parametrize(
    "value", [b"", b"fast", b"-5", b"0", b"nan", b"inf", b"1e999", b"1_000", b"5, 6", b"\xff", b"1" * 33]
)
def test_numbers_that_are_none_say_nothing_and_are_counted(value: bytes) -> None:
    exchange = Exchange(b"{}", [(b"x-slo-ttft-ms", value)])
    exchange.assert_untouched()
    assert exchange.counted == {"invalid_header": 1}
    assert Exchange(b"{}", [(b"x-slo-ttft-ms", value), (b"x-tenant", b"a")]).xargs == {"tenant": "a"}


def test_a_header_given_twice_counts_if_it_says_one_thing() -> None:
    assert Exchange(b"{}", [TTFT, TTFT]).xargs == {"ttft_slo_ms": 250}
    exchange = Exchange(b"{}", [TTFT, (TTFT[0].upper(), b"300")])
    exchange.assert_untouched()
    assert exchange.counted == {"conflicting_header": 1}
    fallback = Exchange(b"{}", [TTFT, (TTFT[0], b"300"), (b"x-slo-ttft-ms", b"9")])
    assert fallback.xargs == {"ttft_slo_ms": 9}


def test_names_are_cut_and_cleaned() -> None:
    headers = [(b"x-tenant", b"a\x00\x1b[1m" + b"b" * 100), (b"x-slidingserve-class", b"caf\xe9")]
    xargs = Exchange(b"{}", headers).xargs
    assert xargs == {"tenant": ("a[1m" + "b" * 100)[:64], "class": "café"}


def test_chunked_bodies_are_put_together_and_get_no_length() -> None:
    exchange = Exchange([b'{"prompt"', b"", b': "Hi"}'], [TTFT, (b"transfer-encoding", b"chunked")], length=False)
    assert exchange.xargs == {"ttft_slo_ms": 250}
    assert b"content-length" not in dict(exchange.application.scope["headers"])
    exchange.assert_whole()


def test_bodies_that_are_announced_too_large_pass_unread() -> None:
    exchange = Exchange(b'{"prompt": "Hi"}', largest_body_bytes=15)
    exchange.assert_untouched()
    exchange.assert_whole()
    assert (exchange.read_before_the_application, exchange.counted) == (0, {"too_large": 1})
    assert Exchange(b'{"prompt": "Hi"}', largest_body_bytes=16).xargs == {"ttft_slo_ms": 250}


@pytest.mark.parametrize("length", [(), ((b"content-length", b"1"),), ((b"content-length", b"x"),)])
def test_bodies_that_turn_out_too_large_pass_as_they_come(length: tuple[tuple[bytes, bytes], ...]) -> None:
    chunks = [b'{"prompt": ', b'"' + b"x" * 20, b"y" * 20, b'"}']
    exchange = Exchange(chunks, [TTFT, *length], length=False, largest_body_bytes=30)
    exchange.assert_untouched()
    assert exchange.read_before_the_application == 2
    assert [message.get("body") for message in exchange.application.messages] == [*chunks, None]
    assert exchange.counted == {"too_large": 1}


def test_a_client_that_leaves_early_is_seen_leaving() -> None:
    exchange = Exchange([b'{"prompt": ', b'"H'], truncated=True)
    exchange.assert_untouched()
    assert [message["type"] for message in exchange.application.messages] == ["http.request"] * 2 + ["http.disconnect"]
    assert exchange.responses == []
    assert exchange.counted == {"incomplete": 1}


def test_headers_that_break_the_rules_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(b"{}", [(b"x-tenant", None)])  # type: ignore[list-item]
    exchange.assert_untouched()
    assert exchange.counted == {"failed": 1}
    assert "failed" in caplog.text


def test_each_kind_is_logged_once_and_what_is_normal_never(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exchange = Exchange(b"{}", [TTFT, (b"x-slo-tpot-ms", b"x")])
    for _ in range(3):
        exchange.middleware._with_xargs(b"[", {"tenant": "a"})
        exchange.middleware._with_xargs(b"{}", {"tenant": "a"})
    assert [record.getMessage() for record in caplog.records] == [
        "SLO headers of a request: invalid header tbt_slo_ms (said once)",
        "SLO headers of a request: not json (said once)",
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["prompt", "n", "vllm_xargs"]) | st.text(max_size=6), VALUES, max_size=4)
NAMES = st.sampled_from([name.encode() for names in HEADERS.values() for name in names])
HEADER_LISTS = st.lists(st.tuples(NAMES, st.binary(max_size=8) | st.sampled_from([b"250", b"acme"])), max_size=5)


def cut(body: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(body)) for place in places})
    return [body[start:end] for start, end in zip([0, *ends], [*ends, len(body)], strict=True)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OBJECTS, HEADER_LISTS, st.lists(st.integers(0, 60), max_size=3), st.booleans(), st.booleans())
def test_objects_keep_all_they_say(
    said: dict[str, Any], headers: list[tuple[bytes, bytes]], places: list[int], ascii_only: bool, length: bool
) -> None:
    body = json.dumps(said, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass" if ascii_only else "replace")
    exchange = Exchange(cut(body, places), headers, length=length)
    exchange.assert_whole()
    got, meant = json.loads(exchange.application.body), json.loads(body)
    added = got.pop("vllm_xargs", None)
    own = meant.pop("vllm_xargs", None)
    assert got == meant
    if own is None or isinstance(own, dict):
        assert {**(added or {}), **{k: v for k, v in (own or {}).items() if v is not None}} == (added or {})
        assert set(added or {}) - set(own or {}) <= set(HEADERS)
    else:
        assert added == own
    if exchange.counted.get("applied", 0) == 0:
        exchange.assert_untouched()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.binary(max_size=40) | st.sampled_from([b'{"vllm_xargs"', b"{}", b'{"a":1}']),
    HEADER_LISTS,
    st.lists(st.integers(0, 40), max_size=3),
)
def test_whatever_the_bytes_they_pass_or_were_a_json_object(
    body: bytes, headers: list[tuple[bytes, bytes]], places: list[int]
) -> None:
    exchange = Exchange(cut(body, places), headers)
    exchange.assert_whole()
    if exchange.counted.get("applied", 0):
        assert isinstance(json.loads(body), dict)
        assert set(exchange.xargs) <= set(HEADERS)
    else:
        exchange.assert_untouched()
    assert exchange.counted.get("failed", 0) == 0


def test_the_reference_lists_every_header() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`x-.*?) \| .* \|$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {key: tuple(re.findall("`(.*?)`", names)) for key, names in rows} == HEADERS


@pytest.mark.vllm
@pytest.mark.parametrize("path", GENERATING_PATHS)
def test_vllm_reads_them_from_the_body(path: str) -> None:
    pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")
    fastapi, httpx = pytest.importorskip("fastapi"), pytest.importorskip("httpx")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    message = {"role": "user", "content": "Hi"}
    requests: dict[str, tuple[Any, dict[str, Any]]] = {
        "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
        "/v1/chat/completions": (ChatCompletionRequest, {"messages": [message]}),
        "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
        "/v1/messages": (AnthropicMessagesRequest, {"messages": [message], "max_tokens": 4}),
    }
    model, body = requests[path]
    application = fastapi.FastAPI()

    async def answer(request: Any) -> dict[str, Any]:
        return {"xargs": request.vllm_xargs}

    answer.__annotations__["request"] = model
    application.post(path)(answer)
    application.add_middleware(SLOHeaders)

    async def ask() -> Any:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            headers = {"x-llm-d-slo-ttft-ms": "250", "x-slo-tpot-ms": "40.5", "x-tenant": "acme"}
            return (await client.post(path, json={"model": "m", **body}, headers=headers)).json()

    assert asyncio.run(ask()) == {"xargs": {"ttft_slo_ms": 250, "tbt_slo_ms": 40.5, "tenant": "acme"}}
