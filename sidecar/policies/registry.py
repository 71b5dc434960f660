"""Policies by name, and their parameters from text.

Policies of this project are listed in `BUILT_IN`; a package elsewhere adds its own through the entry point group
``slidingserve.policies`` (value: a module that calls `register` when it is imported) or by calling `register` itself.
"""

from __future__ import annotations

import importlib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from sidecar.policies.base import Policy, PolicyContext, PolicyFactory

BUILT_IN = {
    "explore": "sidecar.policies.explore",
    "orca": "sidecar.policies.orca",
    "qoserve": "sidecar.policies.qoserve",
    "sarathi": "sidecar.policies.sarathi",
    "sarathi-edf": "sidecar.policies.sarathi_edf",
    "sarathi-srpf": "sidecar.policies.sarathi_srpf",
    "slidingserve": "sidecar.policies.slidingserve",
    "slidingserve+relegation": "sidecar.policies.slidingserve_relegation",
    "vllm": "sidecar.policies.vllm",
}
ENTRY_POINT_GROUP = "slidingserve.policies"


class UnknownPolicyError(LookupError):
    """No policy of that name is installed."""


class UnknownProfileError(LookupError):
    """A policy needs a hardware profile or model that is not there; raised by factories."""


class PolicyParameterError(ValueError):
    """A parameter that the policy does not have, or a value that it does not take.

    Attributes:
        name: the parameter.
        value: its text.
        remedy: what to do.
    """

    def __init__(self, policy: str, name: str, value: str, remedy: str) -> None:
        super().__init__(f"policy {policy!r}: parameter {name!r} = {value!r}: {remedy}")
        self.name, self.value, self.remedy = name, value, remedy


@dataclass(frozen=True, slots=True)
class Registration:
    """A policy's name, its parameters (a frozen dataclass that checks itself) and what builds it."""

    name: str
    parameters: type
    factory: PolicyFactory
    summary: str


_REGISTERED: dict[str, Registration] = {}


def register(name: str, parameters: type, factory: PolicyFactory, summary: str = "") -> None:
    """Makes a policy available under ``name``.

    Args:
        name: as users write it.
        parameters: a dataclass of int, float, bool and str fields with defaults; its ``__post_init__`` raises
            `ValueError` with arguments (field, remedy) for a value out of range. Its docstring's section "Attributes"
            explains them to users; a field whose default is None may have one for each mode in a class variable
            ``presets`` (mode to field to value).
        factory: called with an instance of ``parameters`` and the `PolicyContext` for each session.
        summary: one line for lists.

    Raises:
        ValueError: the name is taken by another factory.
    """
    known = _REGISTERED.get(name)
    if known is not None and known.factory is not factory:
        raise ValueError(f"policy name {name!r} is taken; register under another name")
    _REGISTERED[name] = Registration(name, parameters, factory, summary)


def registrations() -> list[Registration]:
    """Returns all installed policies, sorted by name."""
    for module in BUILT_IN.values():
        importlib.import_module(module)
    broken_packages()  # one that fails takes no other along
    return [_REGISTERED[name] for name in sorted(_REGISTERED)]


def broken_packages() -> dict[str, str]:
    """Imports what other packages name; returns the policies that cannot be loaded, and why."""
    broken: dict[str, str] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:
            broken[entry.name] = f"{entry.value} cannot be imported: {error!r}"
    return broken


def find(name: str) -> Registration:
    """Returns one policy; imports only its module if it is one of ours.

    Raises:
        UnknownPolicyError: names the policies that are installed.
    """
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    broken = {} if name in _REGISTERED else broken_packages()
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in broken:
        raise UnknownPolicyError(f"policy {name!r}: {broken[name]}")
    known = ", ".join(entry.name for entry in registrations())
    raise UnknownPolicyError(f"unknown policy {name!r}; use one of: {known}")


def build(name: str, parameters: Mapping[str, str], context: PolicyContext) -> Policy:
    """Builds a policy from text parameters.

    Raises:
        UnknownPolicyError: see `find`.
        PolicyParameterError: a parameter is unknown, not of its type, or out of range.
    """
    registration = find(name)
    return registration.factory(parse_parameters(name, registration.parameters, parameters), context)


class PolicySpecError(ValueError):
    """A text that is not ``name`` or ``name:key=value,key=value``."""


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Splits ``name`` or ``name:key=value,key=value`` into the name and its parameters.

    Raises:
        PolicySpecError: the text has another form.
    """
    name, _, rest = text.partition(":")
    parameters: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise PolicySpecError(f"policy {text!r}: {part!r} is not key=value; write name:key=value,key=value")
        parameters[key.strip()] = value.strip()
    if not name:
        raise PolicySpecError(f"policy {text!r}: the name is missing; write name:key=value,key=value")
    return name, parameters


def parse_parameters(policy: str, cls: type, texts: Mapping[str, str]) -> Any:
    """Turns ``{"name": "text"}`` into an instance of the parameters dataclass ``cls``."""
    hints = typing.get_type_hints(cls)
    known = {entry.name for entry in fields(cls)}
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise PolicyParameterError(policy, name, text, f"unknown parameter; it has: {listed}")
        values[name] = _parse(policy, name, text, hints[name])
    try:
        return cls(**values)
    except ValueError as error:
        name, remedy = error.args if len(error.args) == 2 else ("", str(error))
        raise PolicyParameterError(policy, name, texts.get(name, ""), remedy) from error


def _parse(policy: str, name: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise PolicyParameterError(policy, name, text, "give true or false")
    if kind is str:
        return text
    try:
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError(text)
        return value
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise PolicyParameterError(policy, name, text, f"give {wanted}") from None
