"""``slidingserve simulate``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import typer

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import evaluation_errors, fail, quiet_grpc

_LOOKED_AT = 300
"""Requests of which it is asked beforehand whether their SLOs can be kept."""


def simulate(options: dict[str, Any]) -> None:
    """Runs the simulation with progress on stderr; prints the table, or JSON."""
    quiet_grpc()
    from evaluation.results import to_json
    from evaluation.screen import render
    from evaluation.simulate import simulate as run

    file: Path | None = options["json_file"]
    check_writable(file)
    try:
        request = _request(options)
        _say_if_infeasible(request)
        with _Progress() as progress:
            results = run(request, progress.update)
    except evaluation_errors() as error:
        fail(str(error))
    deliver(to_json(results), render(results), file)


def _request(options: dict[str, Any]) -> Any:
    from evaluation.simulate import DEFAULT_POLICIES, SimulationRequest, Transport

    known = get_args(Transport)
    if options["transport"] not in known:
        fail(f"--transport {options['transport']}: give one of {', '.join(known)}")
    trace = options["trace"]
    return SimulationRequest(
        policies=tuple(options["policy"] or DEFAULT_POLICIES),
        workload=options["workload"],
        trace=trace,
        rate=options["rate"],
        requests=options["requests"],
        profile=options["profile"],
        seed=options["seed"],
        floor_seconds=options["floor_ms"] / 1e3,
        ttft_seconds=None if options["ttft_ms"] is None else options["ttft_ms"] / 1e3,
        tbt_seconds=None if options["tbt_ms"] is None else options["tbt_ms"] / 1e3,
        transport=options["transport"],
        data=options["data"],
    )


def _say_if_infeasible(request: Any) -> None:
    """Says on stderr why SLOs cannot be kept, before a run shows that they are not."""
    from engine_adapter.simulated.profiles import load_profile
    from engine_adapter.simulated.timing import ProfileTimer
    from evaluation.simulate import engine_limits, make_workload
    from evaluation.workloads import InfeasibleWorkload, check_feasible

    profile = load_profile(request.profile)
    few = request.requests if request.requests is not None and request.requests < _LOOKED_AT else _LOOKED_AT
    workload = make_workload(replace(request, requests=few), profile)
    try:
        check_feasible(workload, ProfileTimer(profile), profile=profile.name, limits=engine_limits(profile))
    except InfeasibleWorkload as error:
        typer.echo(f"slidingserve: note: {error}", err=True)


class _Progress:
    """A bar on stderr where there is a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._policy = ""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} requests"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, policy: str, done: int, total: int) -> None:
        """Shows how far the run of a policy is."""
        if self._bar is None:
            return
        if policy != self._policy:
            self._policy = policy
            self._task = self._bar.add_task(policy, total=total)
        self._bar.update(self._task, completed=done)
