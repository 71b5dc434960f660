"""``slidingserve policies``."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields
from typing import Any

import typer

from sidecar.cli.failing import fail
from sidecar.policies.registry import Registration, UnknownPolicyError, broken_packages, find, registrations

_WIDTH = 100


def policies(name: str | None = None) -> None:
    """Prints each policy, what it is, and its parameters with their defaults; of one, what they mean as well."""
    if name is not None:
        try:
            _explain(find(name))
        except UnknownPolicyError as error:
            fail(str(error))
        return
    for entry in registrations():
        typer.echo(f"{entry.name}: {entry.summary}")
        for parameter in fields(entry.parameters):
            typer.echo(f"    {parameter.name} = {_default(entry, parameter.name, parameter.default)}")
    for broken, why in broken_packages().items():
        typer.echo(f"{broken}: {why}", err=True)


def _explain(entry: Registration) -> None:
    """Prints the policy's parameters with the texts of their class's docstring."""
    typer.echo(f"{entry.name}: {entry.summary}")
    texts = attribute_texts(inspect.getdoc(entry.parameters) or "")
    for parameter in fields(entry.parameters):
        typer.echo(f"\n    {parameter.name} = {_default(entry, parameter.name, parameter.default)}")
        text = texts.get(parameter.name, "")
        typer.echo(textwrap.fill(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8))


def attribute_texts(docstring: str) -> dict[str, str]:
    """Returns what a docstring says in its section "Attributes", by name."""
    _, _, section = docstring.partition("Attributes:\n")
    parts = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    texts = (" ".join(text.split()) for text in parts[1::2])
    return dict(zip(parts[::2], texts, strict=True))


def _default(entry: Registration, name: str, default: Any) -> str:
    """Returns a parameter's default, or for one that depends on the mode each mode's."""
    presets: dict[str, dict[str, Any]] = getattr(entry.parameters, "presets", {})
    if default is None and all(name in preset for preset in presets.values()) and presets:
        return ", ".join(f"{_text(preset[name])} in {mode}" for mode, preset in presets.items())
    return _text(default)


def _text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
