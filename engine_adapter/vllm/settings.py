"""Settings of the adapter inside vLLM, from ``--additional-config`` and the environment.

``load_settings`` reads them, ``describe`` lists them for documents and commands.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine_adapter.vllm import parsing
from engine_adapter.vllm.parsing import LONGEST_NAME, Refused, clean_name

SECTION = "slidingserve"
"""Key of ``--additional-config`` that holds the adapter's settings."""
ENVIRONMENT_PREFIX = "SLIDINGSERVE_VLLM_"
"""What the names of environment variables begin with; the rest is the key in capitals."""
SHORTEST_SLO_MS = 1.0
"""Smallest SLO, in milliseconds."""
LONGEST_SLO_MS = 86_400_000.0
"""Largest SLO, in milliseconds: one day."""
LARGEST_PRIORITY = 2**31 - 1
"""Largest priority, positive or negative: the contract sends 32 bits."""

Mode = Literal["off", "shadow", "active"]
Prefetch = bool | Literal["auto"]


class SettingsError(ValueError):
    """A setting that cannot be used; names the key, its value, where that came from, and what to give instead."""

    def __init__(self, key: str, value: object, source: str, remedy: str) -> None:
        super().__init__(f"{key} = {parsing.shown(value)} (from {source}): {remedy}")
        self.key = key
        self.value = value
        self.source = source
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What the requests of one class get where they bring nothing of their own. Seconds; 0: nothing set."""

    name: str
    ttft_slo_seconds: float = 0.0
    """Arrival to first token."""
    tbt_slo_seconds: float = 0.0
    """Between tokens."""
    ttlt_slo_seconds: float = 0.0
    """Arrival to last token."""
    weight: float = 1.0
    """Relative worth of meeting a request's SLO, positive."""
    priority: int = 0
    """vLLM's priority, smaller is more important; used for requests whose own is 0."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What `load_settings` read and checked; made by hand, nothing is checked. Seconds."""

    target: str = "unix:/tmp/slidingserve.sock"
    """Where the sidecar listens: ``unix:/path/of.sock`` or ``host:port``."""
    mode: Mode = "active"
    """``off``: vLLM alone. ``shadow``: ask and compare, but let vLLM decide. ``active``: obey."""
    policy: str = ""
    """Policy by name; empty: the sidecar's default."""
    policy_parameters: Mapping[str, str] = field(default_factory=dict)
    """Settings of that policy, as text, by name."""
    profile: str = ""
    """Hardware profile or latency model; empty: the sidecar's default."""
    ttft_slo_seconds: float = 0.0
    """Arrival to first token, for requests that bring none; 0: the sidecar's default."""
    tbt_slo_seconds: float = 0.0
    """Between tokens, for requests that bring none; 0: the sidecar's default."""
    ttlt_slo_seconds: float = 0.0
    """Arrival to last token, for requests that bring none; 0: the sidecar's default, which may be none."""
    classes: Mapping[str, RequestClass] = field(default_factory=dict)
    """Classes by name."""
    default_class: str = ""
    """Class of requests that name none; empty: no class."""
    instance: str = ""
    """Name shown to the sidecar; `load_settings` fills in host name and process."""
    deadline_seconds: float = 0.0
    """Longest wait for one decision; 0: chosen from how long iterations take."""
    prefetch: Prefetch = "auto"
    """Whether to ask for the next iteration while the current one runs."""
    cap_fallback: bool = True
    """Whether an iteration without an answer is capped at the size of recent good plans."""
    starvation_seconds: float = 1.0
    """A running request that no plan has served for so long is served whatever the plan says."""
    waiting_starvation_seconds: float = 30.0
    """The same for a waiting request."""
    warmup_iterations: int = 10
    """First iterations whose durations are not reported, for kernels are compiled in them."""
    report_seconds: float = 60.0
    """Time between the lines in the log that say how it goes; 0: never."""


class SettingRow(NamedTuple):
    """One setting, for tables."""

    key: str
    """Key below ``slidingserve`` in ``--additional-config``."""
    variable: str
    """Environment variable."""
    default: str
    """Default, as one would write it."""
    explanation: str
    """What it does."""


def describe() -> tuple[SettingRow, ...]:
    """Returns all settings, in the order in which documents list them."""
    return tuple(SettingRow(s.key, _variable(s.key), s.default, s.explanation) for s in _SETTINGS)


def load_settings(additional_config: Mapping[str, Any] | None, environment: Mapping[str, str]) -> AdapterSettings:
    """Reads the adapter's settings.

    ``additional_config`` is vLLM's; its ``slidingserve`` wins over ``environment`` (``SLIDINGSERVE_VLLM_<KEY>``), and
    that over the defaults. A key that is null and a variable that is empty count as not given. Variables that are no
    settings are left alone, for Kubernetes makes some of its own (see `stray_variables`).

    Raises:
        SettingsError: a value that cannot be used, or a key of the section that is no setting.
    """
    section = _section(additional_config)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in _SETTINGS:
        variable = _variable(setting.key)
        value, source = section.get(setting.key), _SECTION_SOURCE
        if value is None:
            value, source = environment.get(variable) or None, f"environment variable {variable}"
        if value is None:
            continue
        sources[setting.key] = source
        try:
            values.update(setting.parse(value))
        except Refused as refused:
            raise SettingsError(setting.key + refused.path, refused.value, source, refused.remedy) from None
    settings = AdapterSettings(**{**values, "instance": values.get("instance") or _own_name()})
    if settings.default_class and settings.default_class not in settings.classes:
        remedy = f"no such class (there are: {parsing.listed(settings.classes)}); define it in classes"
        raise SettingsError("default_class", settings.default_class, sources["default_class"], remedy)
    return settings


def stray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that look like settings and are none, with the nearest setting ("": none is near).

    Those that Kubernetes makes for a service named ``slidingserve-vllm...`` are not among them.
    """
    keys = [setting.key for setting in _SETTINGS]
    strays = {}
    for name in sorted(environment):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name.startswith(ENVIRONMENT_PREFIX) and key not in keys and not _KUBERNETES.search(name):
            near = parsing.nearest(key, keys)
            strays[name] = _variable(near) if near else ""
    return strays


class _Setting(NamedTuple):
    """One setting: from its key to fields of `AdapterSettings`. ``parse`` raises `Refused`."""

    key: str
    parse: Callable[[object], dict[str, Any]]
    default: str
    explanation: str


_SECTION_SOURCE = f"--additional-config, section {SECTION!r}"
_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)$")


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _own_name() -> str:
    process = f"-{os.getpid()}"
    return clean_name(socket.gethostname())[: LONGEST_NAME - len(process)] + process


def _section(additional_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    # vLLM allows other objects than mappings, for other platforms; those hold nothing of ours.
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise SettingsError(SECTION, section, "--additional-config", 'give an object, as in {"slidingserve": {...}}')
    try:
        parsing.only(section, [setting.key for setting in _SETTINGS])
    except Refused as refused:
        raise SettingsError(refused.path[1:], refused.value, _SECTION_SOURCE, refused.remedy) from None
    return section


def _into(field_name: str, read: Callable[[object], Any]) -> Callable[[object], dict[str, Any]]:
    """Returns a ``parse`` that fills one field of `AdapterSettings`."""
    return lambda value: {field_name: read(value)}


def _prefetch(value: object) -> Prefetch:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parsing.switch(value)
    except Refused:
        raise Refused(value, "give auto, true or false") from None


def _target(value: object) -> str:
    from engine_adapter.client.settings import ClientSettings  # only who opens sessions needs grpcio

    text = parsing.text(value)
    try:
        ClientSettings(target=text)
    except ValueError:
        raise Refused(value, "give unix:/path/of.sock or host:port") from None
    if text.startswith("unix:") and len(os.fsencode(text.removeprefix("unix:").removeprefix("//"))) > 107:
        raise Refused(value, "give a shorter path: the kernel takes 107 bytes")
    return text


def _policy(value: object) -> dict[str, Any]:
    """Splits ``name`` or ``name:key=value,key=value``, the form that the sidecar's ``--policy`` has."""
    whole = parsing.text(value)
    name, _, rest = whole.partition(":")
    parameters = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not key.strip() or not equals:
            raise Refused(value, f"{part!r} is not key=value; give name:key=value,key=value")
        parameters[key.strip()] = text.strip()
    if whole and not name.strip():
        raise Refused(value, "the name is missing; give name:key=value,key=value")
    return {"policy": name.strip(), "policy_parameters": parameters}


def _classes(value: object) -> dict[str, RequestClass]:
    example = 'give an object, as in {"chat": {"ttft_slo_ms": 500, "tbt_slo_ms": 50}}'
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except (ValueError, RecursionError):
            raise Refused(value, f"this is not JSON; {example}") from None
    if not isinstance(given, Mapping):
        raise Refused(value, example)
    return {name: _class(name, terms) for name, terms in given.items()}


def _class(name: object, terms: object) -> RequestClass:
    if not isinstance(name, str) or not name or clean_name(name) != name:
        raise Refused(name, f"give each class a name of 1 to {LONGEST_NAME} printable characters")
    if not isinstance(terms, Mapping):
        raise Refused(terms, 'give an object, as in {"ttft_slo_ms": 500}', f".{name}")
    values: dict[str, Any] = {}
    try:
        parsing.only(terms, _CLASS_KEYS)
    except Refused as refused:
        raise Refused(refused.value, refused.remedy, f".{name}{refused.path}") from None
    for key, (field_name, read) in _CLASS_KEYS.items():
        if terms.get(key) is not None:
            try:
                values[field_name] = read(terms[key])
            except Refused as refused:
                raise Refused(refused.value, refused.remedy, f".{name}.{key}") from None
    return RequestClass(name, **values)


_slo = parsing.milliseconds(SHORTEST_SLO_MS, LONGEST_SLO_MS)
_deadline = parsing.milliseconds(0.1, 10_000.0)
_long_seconds = parsing.number(0.01, 86_400.0, "seconds from 0.01 to 86400")
_report = parsing.number(0.1, 86_400.0, "seconds from 0.1 to 86400, or 0", or_zero=True)
_weight = parsing.number(1e-6, 1e6, "a weight from 1e-6 to 1e6")
_CLASS_KEYS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "ttft_slo_ms": ("ttft_slo_seconds", _slo),
    "tbt_slo_ms": ("tbt_slo_seconds", _slo),
    "ttlt_slo_ms": ("ttlt_slo_seconds", _slo),
    "weight": ("weight", _weight),
    "priority": ("priority", parsing.whole(-LARGEST_PRIORITY, LARGEST_PRIORITY)),
}
# fmt: off
_SETTINGS = (
    _Setting("target", _into("target", _target), "unix:/tmp/slidingserve.sock",
             "Where the sidecar listens: `unix:/path/of.sock` or `host:port`."),
    _Setting("mode", _into("mode", parsing.one_of("off", "shadow", "active")), "active",
             "`active`: the sidecar decides. `shadow`: it is asked and compared, vLLM decides. `off`: vLLM alone."),
    _Setting("policy", _policy, "",
             "Policy with its parameters, `name` or `name:key=value,key=value`; empty: the sidecar's default."),
    _Setting("profile", _into("profile", parsing.text), "",
             "Hardware profile or latency model; empty: the sidecar's default."),
    _Setting("ttft_slo_ms", _into("ttft_slo_seconds", _slo), "0",
             "Arrival to first token, for requests that bring none; 0: the sidecar's default."),
    _Setting("tbt_slo_ms", _into("tbt_slo_seconds", _slo), "0",
             "Between tokens, for requests that bring none; 0: the sidecar's default."),
    _Setting("ttlt_slo_ms", _into("ttlt_slo_seconds", _slo), "0",
             "Arrival to last token, for requests that bring none; 0: the sidecar's default."),
    _Setting("classes", _into("classes", _classes), "{}",
             "Classes of requests by name, each with any of `ttft_slo_ms`, `tbt_slo_ms`, `ttlt_slo_ms`, `weight` (1), "
             "`priority` (0); in the environment as JSON."),
    _Setting("default_class", _into("default_class", parsing.name), "",
             "Class of requests that name none; empty: no class."),
    _Setting("instance", _into("instance", parsing.name), "",
             "Name of this engine in the sidecar's logs and journals; empty: host name and process."),
    _Setting("deadline_ms", _into("deadline_seconds", _deadline), "0",
             "Longest wait for one decision; 0: chosen from how long iterations take."),
    _Setting("prefetch", _into("prefetch", _prefetch), "auto",
             "Whether to ask for the next iteration while the current one runs: `auto`, `true` or `false`."),
    _Setting("cap_fallback", _into("cap_fallback", parsing.switch), "true",
             "Whether an iteration without an answer is capped at the size of recent good plans."),
    _Setting("starvation_seconds", _into("starvation_seconds", _long_seconds), "1",
             "A running request that no plan has served for so long is served whatever the plan says."),
    _Setting("waiting_starvation_seconds", _into("waiting_starvation_seconds", _long_seconds), "30",
             "The same for a waiting request."),
    _Setting("warmup_iterations", _into("warmup_iterations", parsing.whole(0, 1_000_000)), "10",
             "First iterations whose durations are not reported, for kernels are compiled in them."),
    _Setting("report_seconds", _into("report_seconds", _report), "60",
             "Time between the lines in vLLM's log that say how it goes; 0: never."),
)
# fmt: on
