"""Names of workloads: everything about one but its rate, how many requests and the seed, as a value and as text.

The text has the grammar of policies, ``name`` or ``name:key=value,key=value``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from evaluation.workloads.arrivals import GENERATED, Arrivals, Gamma, Poisson, Recorded, Switching
from evaluation.workloads.checks import MAX_FLOOR_SECONDS, WorkloadError, check_number, check_slo_overrides
from evaluation.workloads.classes import MIXES
from evaluation.workloads.recorded import Part
from evaluation.workloads.slos import SloRule
from sidecar.policies.registry import PolicySpecError, parse_spec

USUAL_RATE = 2.0
TRACE_PREFIX = "trace="
TRACE_FILES = {
    "azure-conv": "azure_llm_2023/conv.csv",
    "azure-code": "azure_llm_2023/code.csv",
    "mooncake": "mooncake/conversation.csv",
    "servegen-m-small": "servegen/composed_1h_m-small.csv",
}
"""The recorded workloads, and their files in the data folder."""

_ARRIVAL_KEYS = {"cv": "cv", "period_s": "period_seconds", "low": "low", "high": "high"}
"""Keys of arrival processes, and their fields."""

_SLO_KEYS = ("slos", "floor_ms", "ttft_ms", "tbt_ms")
_GENERATED_KEYS = (*_SLO_KEYS, "arrivals", *_ARRIVAL_KEYS)
_RECORDED_KEYS = ("slos", "ttft_ms", "tbt_ms", "part")
_STEADY = Poisson()
_FORM = "write name or name:key=value,key=value"
_TAIL = re.compile(r"[A-Za-z_]+=[^,:]*(,[A-Za-z_]+=[^,:]*)*")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload without rate, number of requests and seed; ``str`` gives the shortest text that means it.

    Attributes:
        name: one of `known_workloads`, or ``trace=PATH``.
        slos: the rule of the SLOs, see `evaluation.workloads.slos`.
        floor_ms: added to relative TTFT SLOs: what tokenizer, HTTP and network take.
        ttft_ms, tbt_ms: SLOs for every request instead of the rule's.
        arrivals: how requests arrive.
        part: of a trace: all, or one half of its requests.

    Raises:
        WorkloadError: unknown, out of range, or values that do not go together.
    """

    name: str
    slos: SloRule = "relative"
    floor_ms: float = 0.0
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    arrivals: Arrivals = _STEADY
    part: Part = "all"

    def __post_init__(self) -> None:
        """Raises WorkloadError unless the values fit together."""
        if self.name not in _MIX_OF and not self.is_recorded:
            raise WorkloadError(f"unknown workload {self.name!r}; choose one of {', '.join(known_workloads())}")
        if self.is_recorded is not isinstance(self.arrivals, Recorded):
            raise WorkloadError(f"workload {self.name!r} cannot have {self.arrivals.kind} arrivals; leave them out")
        if self.is_recorded and self.slos == "relative":
            raise WorkloadError(f"slos=relative: requests of {self.name} have no factor; choose absolute or qoserve")
        if not self.is_recorded and self.part != "all":
            raise WorkloadError(f"part={self.part}: only a trace has parts, {self.name} is drawn; leave the part out")
        check_number("floor", self.floor_ms / 1e3, 0.0, MAX_FLOOR_SECONDS, "s")
        check_slo_overrides(self.ttft_seconds, self.tbt_seconds)
        if self.floor_ms and not self.takes_floor:
            why = "slos=relative" if self.slos != "relative" else "no ttft_ms"
            raise WorkloadError(f"floor_ms={_number(self.floor_ms)} needs {why}, or has no effect; leave it out")
        if self.slos == "qoserve" and (self.ttft_ms is not None or self.tbt_ms is not None):
            raise WorkloadError("slos=qoserve says every SLO; leave out ttft_ms and tbt_ms")

    @property
    def is_recorded(self) -> bool:
        """Whether the requests are those of a trace."""
        return self.name in TRACE_FILES or self.name.startswith(TRACE_PREFIX)

    @property
    def mix(self) -> str:
        """The name in ``MIXES`` of what requests are drawn from."""
        return _MIX_OF[self.name]

    @property
    def takes_floor(self) -> bool:
        """Whether a floor has an effect."""
        return self.slos == "relative" and self.ttft_ms is None

    @property
    def ttft_seconds(self) -> float | None:
        """The TTFT SLO of every request, where it is given."""
        return None if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tbt_seconds(self) -> float | None:
        """The TBT SLO of every request, where it is given."""
        return None if self.tbt_ms is None else self.tbt_ms / 1e3

    @property
    def usual_rate(self) -> float | None:
        """Requests/s where none are asked for: of a switching load such that low and high are rates; None: recorded."""
        if isinstance(self.arrivals, Recorded):
            return None
        return self.arrivals.mean_rate if isinstance(self.arrivals, Switching) else USUAL_RATE

    def trace_file(self, data: Path | None) -> Path:
        """Returns the file of a recorded workload.

        Raises:
            WorkloadError: it is in the data folder, and there is none or it is not in it.
        """
        if self.name.startswith(TRACE_PREFIX):
            return Path(self.name.removeprefix(TRACE_PREFIX)).expanduser()
        relative = TRACE_FILES[self.name]
        remedy = f"give --data FOLDER or set SLIDINGSERVE_DATA to the folder that holds {relative}"
        if data is None:
            raise WorkloadError(f"workload {self.name!r} is recorded traffic; {remedy}, or use {TRACE_PREFIX}PATH")
        if not (data / relative).is_file():
            raise WorkloadError(f"workload {self.name!r}: {data / relative} is not there; {remedy}")
        return data / relative

    def __str__(self) -> str:
        """The canonical text: `parse_workload` makes an equal value of it."""
        preset = _preset(self.name)
        said = [f"slos={self.slos}"] if self.slos != preset.slos else []
        for key in ("floor_ms", "ttft_ms", "tbt_ms"):
            value = getattr(self, key)
            if value != getattr(preset, key):
                said.append(f"{key}={_number(value)}")
        usual = preset.arrivals
        if self.arrivals.kind != usual.kind:
            said.append(f"arrivals={self.arrivals.kind}")
            usual = type(self.arrivals)()
        for key, field in _ARRIVAL_KEYS.items():
            if hasattr(usual, field) and getattr(self.arrivals, field) != getattr(usual, field):
                said.append(f"{key}={_number(getattr(self.arrivals, field))}")
        ambiguous = self.name.startswith(TRACE_PREFIX) and _split(self.name)[1]
        if self.part != preset.part or (ambiguous and not said):
            said.append(f"part={self.part}")
        return self.name + (":" + ",".join(said) if said else "")


_MIX_OF = {**{name: name for name in MIXES}, **dict.fromkeys(("transient", "diurnal", "bursty"), "mixed-v1")}
_PRESETS = {
    **{name: WorkloadSpec(name) for name in MIXES},
    "transient": WorkloadSpec("transient", arrivals=Switching(120.0, 1.0, 2.5)),
    "diurnal": WorkloadSpec("diurnal", arrivals=Switching(900.0, 2.0, 5.0)),
    "bursty": WorkloadSpec("bursty", arrivals=Gamma(5.0)),
}


def known_workloads() -> tuple[str, ...]:
    """Returns the names of all workloads, for lists and messages."""
    return (*_MIX_OF, *TRACE_FILES, f"{TRACE_PREFIX}PATH")


def parse_workload(
    text: str, *, floor_ms: float = 0.0, ttft_ms: float | None = None, tbt_ms: float | None = None
) -> WorkloadSpec:
    """Reads ``name`` or ``name:key=value,key=value``.

    ``floor_ms``, ``ttft_ms`` and ``tbt_ms`` hold where the text does not say them; the floor is dropped where it would
    have no effect. Raises WorkloadError, which lists the known names or keys.
    """
    name, texts = _split(text)
    preset = _preset(name)
    keys = _RECORDED_KEYS if preset.is_recorded else _GENERATED_KEYS
    for key in texts:
        if key not in keys:
            raise WorkloadError(f"workload {text!r}: unknown key {key!r}; {name} has {', '.join(keys)}")
    given: dict[str, Any] = {"ttft_ms": ttft_ms, "tbt_ms": tbt_ms}
    given |= {key: _float(text, key, texts[key]) for key in ("floor_ms", "ttft_ms", "tbt_ms") if key in texts}
    for key, kind in (("slos", SloRule), ("part", Part)):
        if key in texts:
            given[key] = _choice(text, key, texts[key], get_args(kind))
    given["arrivals"] = _arrivals(text, preset.arrivals, texts)
    spec = replace(preset, **given)
    return replace(spec, floor_ms=floor_ms) if "floor_ms" not in texts and spec.takes_floor else spec


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Splits name and keys. Of a path only what looks like keys belongs not to the name, so it may hold colons."""
    if text.startswith(TRACE_PREFIX):
        path, _, tail = text.rpartition(":")
        if not _TAIL.fullmatch(tail) or path == "":
            path, tail = text, ""
        return path, parse_spec(f"trace:{tail}")[1]
    try:
        name, texts = parse_spec(text.strip())
    except PolicySpecError:
        raise WorkloadError(f"workload {text!r}: {_FORM}") from None
    return name.strip(), texts


def _preset(name: str) -> WorkloadSpec:
    if name == TRACE_PREFIX:
        raise WorkloadError(f"workload {name!r} names no file; write {TRACE_PREFIX}PATH")
    if name in TRACE_FILES or name.startswith(TRACE_PREFIX):
        return WorkloadSpec(name, slos="absolute", arrivals=Recorded())
    return _PRESETS[name] if name in _PRESETS else WorkloadSpec(name)


def _arrivals(text: str, usual: Arrivals, texts: Mapping[str, str]) -> Arrivals:
    """Returns the arrival process: the usual one, or another kind with its own defaults, and what is said of it."""
    if "arrivals" in texts:
        kind = _choice(text, "arrivals", texts["arrivals"], tuple(GENERATED))
        usual = usual if kind == usual.kind else GENERATED[kind]()
    values: dict[str, Any] = {}
    for key, field in _ARRIVAL_KEYS.items():
        if key not in texts:
            continue
        if not hasattr(usual, field):
            wanted = next(kind for kind, process in GENERATED.items() if hasattr(process(), field))
            raise WorkloadError(f"workload {text!r}: {key} needs arrivals={wanted}, these are {usual.kind}")
        values[field] = _float(text, key, texts[key])
    return replace(usual, **values)


def _choice(text: str, key: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise WorkloadError(f"workload {text!r}: {key}={value}: give one of {', '.join(choices)}")
    return value


def _float(text: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise WorkloadError(f"workload {text!r}: {key}={value}: give a number") from None


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
