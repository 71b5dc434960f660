"""Options that several commands have, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sidecar.cli.failing import fail

if TYPE_CHECKING:
    from evaluation.goodput.caps import Effort

Value = TypeVar("Value")

COMPARED_POLICIES = ("vllm", "sarathi-edf", "qoserve", "slidingserve")
"""What is compared where nothing is asked for; `ComparedPolicies` says so to users."""

ComparedPolicies = Annotated[
    list[str] | None,
    typer.Option(help="name or name:key=value; repeat. Default: vllm, sarathi-edf, qoserve and slidingserve."),
]
Workloads = Annotated[
    list[str], typer.Option(help="name or name:key=value,key=value, as `simulate --workload`; repeat.")
]
ProfileName = Annotated[str, typer.Option(help="Hardware profile: a name from `slidingserve profiles list` or a file.")]
Data = Annotated[
    Path | None,
    typer.Option(envvar="SLIDINGSERVE_DATA", help="Folder of recorded traces, for the workloads that need it."),
]
Requests = Annotated[int | None, typer.Option(help="Requests of a run that counts.", show_default=False)]
Seeds = Annotated[int | None, typer.Option(help="Seeds of arrivals and lengths.", show_default=False)]
Violations = Annotated[float, typer.Option(help="Requests that may miss a deadline, percent.")]
Jobs = Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")]


def once(values: Iterable[Value]) -> tuple[Value, ...]:
    """Returns the values without doubles, in their order."""
    return tuple(dict.fromkeys(values))


def positive(name: str, value: int) -> int:
    """Returns the value of ``--name``; fails below 1."""
    if value < 1:
        fail(f"--{name} {value}: give 1 or more")
    return value


def share_of(violations: float) -> float:
    """Returns ``--violations`` as a share; fails outside of what a percentage can be."""
    if not 0.0 < violations < 100.0:
        fail(f"--violations {violations:g}: give a percentage above 0 and below 100")
    return violations / 100.0


def effort_of(quick: bool, requests: int | None, seeds: int | None, caps: list[int] | None) -> Effort:
    """Returns how much a sweep runs; fails for numbers below 1."""
    from evaluation.goodput.caps import full_effort, quick_effort

    given: dict[str, Any] = {}
    for name, value in (("requests", requests), ("seeds", seeds)):
        if value is not None:
            given[name] = positive(name, value)
    if caps:
        given["caps"] = tuple(sorted({positive("cap", cap) for cap in caps}))
    return quick_effort(**given) if quick else full_effort(**given)
