"""What each request asks for: SLOs, class, tenant and priority, out of vLLM's ``extra_args``.

Clients set them as ``vllm_xargs`` in the body of a request (`engine_adapter.vllm.middleware` also takes HTTP headers),
or offline as ``SamplingParams(extra_args=...)``. Anything may arrive here, and nothing may be raised into vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine_adapter.vllm.parsing import clean_name, shown
from engine_adapter.vllm.settings import LARGEST_PRIORITY, LONGEST_SLO_MS, SHORTEST_SLO_MS, AdapterSettings

TTFT_KEY = "ttft_slo_ms"
TBT_KEY = "tbt_slo_ms"
TTLT_KEY = "ttlt_slo_ms"
CLASS_KEY = "class"
TENANT_KEY = "tenant"
"""Keys of ``vllm_xargs`` and ``SamplingParams.extra_args``."""


class RequestTerms(NamedTuple):
    """What one request asks for. Seconds; 0: the session's default."""

    ttft_slo_seconds: float = 0.0
    """Arrival to first token."""
    tbt_slo_seconds: float = 0.0
    """Between tokens."""
    ttlt_slo_seconds: float = 0.0
    """Arrival to last token."""
    priority: int = 0
    """Smaller is more important, as in vLLM; fits 32 bits."""
    weight: float = 1.0
    """Relative worth of meeting the SLO; that of the class."""
    class_name: str = ""
    """At most 64 printable characters; empty: no class."""
    tenant: str = ""
    """At most 64 printable characters; empty: no tenant."""


class TermsReader:
    """Reads `RequestTerms`; for one thread. What cannot be used is counted, and logged once for each kind.

    Keys: ``ttft_slo_ms``, ``tbt_slo_ms``, ``ttlt_slo_ms`` (numbers, also as text; 0: the default), ``class`` and
    ``tenant`` (text, or a whole number). A request's own value wins over that of its class, and that over the defaults
    of the session, for which 0 stands. Names of classes that the settings do not define are kept, too: how many names
    there can be is for the caller to bound.
    """

    def __init__(self, settings: AdapterSettings, log: Callable[[str], None]) -> None:
        self._log = log
        self._terms = {
            name: RequestTerms(
                ttft_slo_seconds=entry.ttft_slo_seconds,
                tbt_slo_seconds=entry.tbt_slo_seconds,
                ttlt_slo_seconds=entry.ttlt_slo_seconds,
                priority=entry.priority,
                weight=entry.weight,
                class_name=name,
            )
            for name, entry in settings.classes.items()
        }
        self._known = f"the settings define {', '.join(self._terms)}"
        self._default = self._terms.get(settings.default_class, RequestTerms(class_name=settings.default_class))
        self.counters: dict[str, int] = {}
        """What was met, by kind: ``invalid_KEY`` (left out), ``clamped_KEY`` (SLO or priority out of bounds),
        ``cleaned_KEY`` (name cut, or without its control characters), ``unknown_class`` (not in the settings, which
        have some), ``unreadable`` (the defaults were used)."""

    def read(self, extra_args: Mapping[str, object] | None, priority: int = 0) -> RequestTerms:
        """Returns what a request asks for; never raises, whatever it is given.

        ``priority`` is vLLM's; a class's is used where it is 0. The cost is that of a few dictionary look-ups, whatever
        the number of classes and of other keys: long names are cut before they are looked at.
        """
        try:
            return self._read(extra_args, priority)
        except Exception as error:
            self._count("unreadable", type(error).__name__, "its SLOs, class and tenant are the defaults")
            return self._default

    def _read(self, extra_args: Mapping[str, object] | None, priority: int) -> RequestTerms:
        if type(priority) is not int or not -LARGEST_PRIORITY <= priority <= LARGEST_PRIORITY:
            priority = self._priority(priority)
        if not extra_args:
            return self._default._replace(priority=priority) if priority else self._default
        if not isinstance(extra_args, Mapping):
            self._count("invalid_extra_args", extra_args, "give an object")
            return self._default._replace(priority=priority) if priority else self._default
        name = self._name(extra_args, CLASS_KEY)
        terms = self._default if not name else self._terms.get(name)
        if terms is None:
            if self._terms:
                self._count("unknown_class", name, self._known)
            terms = RequestTerms(class_name=name)
        return RequestTerms(
            self._seconds(extra_args, TTFT_KEY) or terms.ttft_slo_seconds,
            self._seconds(extra_args, TBT_KEY) or terms.tbt_slo_seconds,
            self._seconds(extra_args, TTLT_KEY) or terms.ttlt_slo_seconds,
            priority or terms.priority,
            terms.weight,
            terms.class_name,
            self._name(extra_args, TENANT_KEY),
        )

    def _seconds(self, extra_args: Mapping[str, object], key: str) -> float:
        """Returns an SLO in seconds; 0 where there is none that can be used."""
        given = extra_args.get(key)
        if given is None:
            return 0.0
        try:
            value = _milliseconds(given)
            if value == 0:
                return 0.0
            if SHORTEST_SLO_MS <= value <= LONGEST_SLO_MS:
                return value / 1000.0
            limit = SHORTEST_SLO_MS if value < SHORTEST_SLO_MS else LONGEST_SLO_MS
        except Exception:
            self._count(f"invalid_{key}", given, "give milliseconds above 0; the default is used")
            return 0.0
        self._count(f"clamped_{key}", given, f"taken as {limit:.0f}")
        return limit / 1000.0

    def _name(self, extra_args: Mapping[str, object], key: str) -> str:
        """Returns a name that can be sent; empty where there is none that can be used."""
        given = extra_args.get(key)
        if given is None:
            return ""
        try:
            text = str(given) if type(given) is int and abs(given) < 2**63 else given
            if not isinstance(text, str):
                raise TypeError
            cleaned = clean_name(text)
            if cleaned == text:
                return cleaned
        except Exception:
            self._count(f"invalid_{key}", given, "give a text; none is used")
            return ""
        self._count(f"cleaned_{key}", given, f"taken as {shown(cleaned)}")
        return cleaned

    def _priority(self, value: object) -> int:
        """Returns a priority that is no plain 32-bit number as one."""
        if isinstance(value, bool) or not isinstance(value, int):
            self._count("invalid_priority", value, "give a whole number; 0 is used")
            return 0
        if -LARGEST_PRIORITY <= value <= LARGEST_PRIORITY:
            return int(value)  # of a subclass, as enumerations have
        self._count("clamped_priority", value, f"taken as the nearest of -{LARGEST_PRIORITY}..{LARGEST_PRIORITY}")
        return LARGEST_PRIORITY if value > 0 else -LARGEST_PRIORITY

    def _count(self, kind: str, value: object, remedy: str) -> None:
        count = self.counters.get(kind, 0)
        self.counters[kind] = count + 1
        if count == 0:
            with contextlib.suppress(Exception):
                self._log(f"a request brought {kind.replace('_', ' ', 1)}: {shown(value)}; {remedy} (said once)")


def _milliseconds(value: object) -> float | int:
    """Returns a number that is not negative, as it is: a huge whole number has no float. Raises ValueError."""
    number: object = float(value) if isinstance(value, str) and len(value) <= 64 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:  # NaN is refused, too
        raise ValueError
    return number
