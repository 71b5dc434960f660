"""What requests ask for, read from whatever they bring."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.vllm.settings import AdapterSettings, load_settings
from engine_adapter.vllm.slos import RequestTerms, TermsReader

CLASSES = {
    "chat": {"ttft_slo_ms": 300, "tbt_slo_ms": 40, "weight": 2, "priority": 5},
    "batch": {"ttlt_slo_ms": 60_000},
}
SETTINGS = load_settings({"slidingserve": {"classes": CLASSES, "ttft_slo_ms": 900}}, {})


class Reading:
    """A reader and what it logged."""

    def __init__(self, settings: AdapterSettings = SETTINGS) -> None:
        self.lines: list[str] = []
        self.reader = TermsReader(settings, self.lines.append)

    def __call__(self, extra_args: Any, priority: Any = 0) -> RequestTerms:
        return self.reader.read(extra_args, priority)


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_request_that_brings_nothing_gets_the_defaults_of_the_session(reading: Reading, nothing: Any) -> None:
    assert reading(nothing) == RequestTerms()
    assert reading(nothing, 7) == RequestTerms(priority=7)
    assert reading.reader.counters == {}


def test_what_a_request_brings(reading: Reading) -> None:
    extra_args = {"ttft_slo_ms": 500, "tbt_slo_ms": 50.5, "ttlt_slo_ms": "30000", "tenant": "acme", "other": [1]}
    assert reading(extra_args, -3) == RequestTerms(0.5, 0.0505, 30.0, -3, 1.0, "", "acme")
    assert reading({"tenant": 42, "class": "chat"}).tenant == "42"
    assert reading.lines == []


def test_its_own_value_wins_over_its_class_and_that_over_the_default(reading: Reading) -> None:
    assert reading({"class": "chat"}) == RequestTerms(0.3, 0.04, 0.0, 5, 2.0, "chat")
    assert reading({"class": "chat", "tbt_slo_ms": 20}, 1) == RequestTerms(0.3, 0.02, 0.0, 1, 2.0, "chat")
    assert reading({"class": "batch"}) == RequestTerms(ttlt_slo_seconds=60.0, class_name="batch")
    assert reading({"class": "chat", "ttft_slo_ms": 0, "tbt_slo_ms": None}) == reading({"class": "chat"})


def test_the_default_class_is_that_of_requests_that_name_none() -> None:
    reading = Reading(load_settings({"slidingserve": {"classes": CLASSES, "default_class": "chat"}}, {}))
    assert reading(None) == reading({}) == RequestTerms(0.3, 0.04, 0.0, 5, 2.0, "chat")
    assert reading(None, 1).priority == 1
    assert reading({"tenant": "acme", "class": ""}) == RequestTerms(0.3, 0.04, 0.0, 5, 2.0, "chat", "acme")
    assert reading({"class": "batch"}).ttft_slo_seconds == 0.0


def test_a_class_that_the_settings_lack_is_kept_and_said_once(reading: Reading) -> None:
    assert reading({"class": "video"}) == RequestTerms(class_name="video")
    reading({"class": "audio"})
    assert reading.reader.counters == {"unknown_class": 2}
    (line,) = reading.lines
    assert "'video'" in line
    assert "chat, batch" in line
    plain = Reading(load_settings(None, {}))
    assert plain({"class": "video"}).class_name == "video"
    assert plain.reader.counters == {}


@pytest.mark.parametrize(
    "value",
    [-1, -0.5, math.nan, -math.inf, "", "fast", "5_0_", "1" * 65, True, b"500", [500], {"ms": 500}, object(), "\ud800"],
    ids=repr,
)
def test_nonsense_is_the_default_and_counted(reading: Reading, value: object) -> None:
    terms = reading({"ttft_slo_ms": 250, "tbt_slo_ms": value, "class": "chat"})
    assert terms == RequestTerms(0.25, 0.04, 0.0, 5, 2.0, "chat")
    assert reading.reader.counters == {"invalid_tbt_slo_ms": 1}
    assert len(reading.lines) == 1
    assert reading.lines[0].isascii()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0.25, 0.001), ("1e-9", 0.001), (math.inf, 86_400.0), (10**20, 86_400.0), ("1e999", 86_400.0), (1e9, 86_400.0)],
)
def test_slos_out_of_bounds_are_clamped_and_counted(reading: Reading, value: object, seconds: float) -> None:
    assert reading({"ttlt_slo_ms": value}).ttlt_slo_seconds == seconds
    assert reading.reader.counters == {"clamped_ttlt_slo_ms": 1}


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        ("x" * 65, "x" * 64, "cleaned_tenant"),
        pytest.param("x" * 1_000_000, "x" * 64, "cleaned_tenant", id="long"),
        (" a\r\nSet-Cookie: b\x00 ", "aSet-Cookie: b", "cleaned_tenant"),
        ("\ud800\x1b[31m", "[31m", "cleaned_tenant"),
        ("\x00" * 300 + "late", "", "cleaned_tenant"),
        ("größe 大", "größe 大", ""),
        (b"acme", "", "invalid_tenant"),
        (1.5, "", "invalid_tenant"),
        pytest.param(10**5000, "", "invalid_tenant", id="huge"),
        (["acme"], "", "invalid_tenant"),
    ],
)
def test_names_are_short_and_printable(reading: Reading, value: object, name: str, kind: str) -> None:
    assert reading({"tenant": value}).tenant == name
    assert list(reading.reader.counters) == ([kind] if kind else [])
    assert all(len(line) < 300 for line in reading.lines)


class Level(enum.IntEnum):
    HIGH = -2


@pytest.mark.parametrize(
    ("priority", "read", "kind"),
    [
        (Level.HIGH, -2, ""),
        (2**31, 2**31 - 1, "clamped_priority"),
        pytest.param(-(10**5000), 1 - 2**31, "clamped_priority", id="huge"),
        (None, 0, "invalid_priority"),
        (True, 0, "invalid_priority"),
        ("1", 0, "invalid_priority"),
    ],
)
def test_priorities_fit_the_contract(reading: Reading, priority: object, read: int, kind: str) -> None:
    terms = reading(None, priority)
    assert (terms.priority, type(terms.priority)) == (read, int)
    assert list(reading.reader.counters) == ([kind] if kind else [])


class Hostile:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    __bool__ = __len__ = __float__ = __int__ = __str__ = __repr__ = __hash__ = __eq__ = __iter__ = __format__ = (  # type: ignore[assignment]
        lambda self, *_: (_ for _ in ()).throw(RuntimeError)
    )


class HostileText(str):
    """A text that raises when it is looked at."""

    def isprintable(self) -> bool:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


class HostileNumber(float):
    def __ge__(self, other: object) -> bool:
        raise RuntimeError


class HostileMapping(Mapping[str, object]):
    def __getitem__(self, key: str) -> object:
        raise KeyError(key)

    def __iter__(self) -> Any:
        raise RuntimeError

    def __len__(self) -> int:
        return 1

    def get(self, key: str, default: object = None) -> object:
        raise RuntimeError


@pytest.mark.parametrize("make", [Hostile, HostileMapping, lambda: 5, lambda: "text", lambda: [1]])
def test_what_is_no_mapping_or_fights_back_is_the_defaults(reading: Reading, make: Callable[[], object]) -> None:
    assert reading(make()) == RequestTerms()
    assert sum(reading.reader.counters.values()) == len(reading.lines) == 1


def test_a_log_that_fails_harms_nobody() -> None:
    def fail(line: str) -> None:
        raise OSError(line)

    reader = TermsReader(SETTINGS, fail)
    assert reader.read({"ttft_slo_ms": "x", "tbt_slo_ms": 40}) == RequestTerms(tbt_slo_seconds=0.04)
    assert reader.counters == {"invalid_ttft_slo_ms": 1}


def test_each_kind_is_logged_once(reading: Reading) -> None:
    for _ in range(5):
        reading({"ttft_slo_ms": "x", "tenant": b""})
    assert reading.reader.counters == {"invalid_ttft_slo_ms": 5, "invalid_tenant": 5}
    assert len(reading.lines) == 2


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**320), 10**320)
    | st.floats()
    | st.text(st.characters(), max_size=80)
    | st.binary(max_size=8)
    | st.floats().map(str)
    | st.builds(Hostile)
    | st.text(max_size=4).map(HostileText)
    | st.floats(allow_nan=False).map(HostileNumber)
)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
NAMED = st.dictionaries(
    st.sampled_from(["ttft_slo_ms", "tbt_slo_ms", "ttlt_slo_ms", "class", "tenant", "other"]),
    JUNK | st.sampled_from(["chat", 250, "250"]),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(NAMED | JUNK, SCALARS), max_size=4))
def test_whatever_arrives_what_is_read_can_be_sent(requests: list[tuple[Any, Any]]) -> None:
    reading = Reading()
    for extra_args, priority in requests:
        terms = reading(extra_args, priority)
        assert type(terms) is RequestTerms
        for seconds in terms[:3]:
            assert type(seconds) is float
            assert seconds == 0.0 or 0.001 <= seconds <= 86_400.0
        assert type(terms.priority) is int
        assert abs(terms.priority) < 2**31
        assert terms.weight in (1.0, 2.0)
        for name in (terms.class_name, terms.tenant):
            assert type(name) is str
            assert len(name) <= 64
            assert name == "" or name.isprintable()
            assert name.encode("utf-8").decode("utf-8") == name
    counters = reading.reader.counters
    assert len(reading.lines) == len(counters) <= 16
    assert all(line.isascii() and line.isprintable() and len(line) < 1200 for line in reading.lines)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(NAMED, st.sampled_from(["chat", "batch"]), st.floats(1.0, 86_400_000.0), st.integers(1, 2**31 - 1))
def test_good_values_are_read_beside_bad_ones(junk: dict[str, Any], name: str, ttft_ms: float, priority: int) -> None:
    terms = Reading()({**junk, "class": name, "ttft_slo_ms": ttft_ms}, priority)
    assert (terms.class_name, terms.priority) == (name, priority)
    assert terms.ttft_slo_seconds == ttft_ms / 1000.0
