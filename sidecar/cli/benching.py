"""``slidingserve bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import fail, quiet_grpc


def bench(options: dict[str, Any]) -> None:
    """Runs the measurements with progress on stderr; prints the tables, or JSON."""
    quiet_grpc()
    from engine_adapter.client import ClientError
    from engine_adapter.simulated.profiles import ProfileError
    from evaluation.bench.report import render, to_json
    from evaluation.bench.run import run_bench
    from evaluation.bench.states import BenchFailed
    from evaluation.inprocess import DecisionRefused
    from evaluation.sidecar_process import SidecarFailed
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError

    file: Path | None = options["json_file"]
    check_writable(file)
    try:
        with _progress() as progress:
            result = run_bench(_request(options), progress)
    except (
        *(ProfileError, UnknownProfileError, PolicySpecError, PolicyParameterError, UnknownPolicyError),
        *(BenchFailed, ClientError, SidecarFailed, DecisionRefused),
    ) as error:
        fail(str(error))
    deliver(to_json(result), render(result).rstrip("\n"), file)


def _request(options: dict[str, Any]) -> Any:
    from evaluation.bench.run import FULL, QUICK, SECTIONS, BenchRequest, Section

    only = options["only"]
    if only is not None and only not in get_args(Section):
        fail(f"--only {only}: give one of {', '.join(SECTIONS)}")
    return BenchRequest(
        policy=options["policy"],
        profile=options["profile"],
        sections=SECTIONS if only is None else (only,),
        effort=QUICK if options["quick"] else FULL,
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is being measured, on stderr where that is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update
