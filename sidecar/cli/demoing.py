"""``slidingserve demo``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import fail, quiet_grpc

app = typer.Typer(help="Try it on a real engine, on one machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Try it on a real engine, on one machine."""


@app.command()
def vllm(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="name or name:key=value,key=value; repeat to compare. Default: slidingserve.", show_default=False
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s. Default: as much as this machine bears.", show_default=False)
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="How many requests. Default: about 32 s of them.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and prompts.")] = 0,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="Ranks of the engine. Default: 2 on CPUs, 1 on GPUs. 1 is steadier where there are only two cores.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON (- = stdout, without the table).")
    ] = None,
) -> None:
    """Compare vLLM's own policy with the sidecar's: a real vLLM, a tiny model, mixed requests with SLOs."""
    quiet_grpc()
    from evaluation.engines.demo import DEFAULT_POLICIES, DemoRequest, run_demo
    from evaluation.engines.demo_screen import render, to_json
    from evaluation.engines.http_load import LoadClientMissing
    from evaluation.engines.measured_iterations import TooFewIterations
    from evaluation.engines.stage import StageFailed
    from evaluation.engines.vllm_process import VllmFailed, VllmMissing
    from evaluation.sidecar_process import SidecarFailed
    from evaluation.workloads import WorkloadError
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError

    check_writable(json_file)
    request = DemoRequest(tuple(policy or DEFAULT_POLICIES), rate, requests, seed, tensor_parallel)
    try:
        with _leaving_in_order():
            result = run_demo(request, _Told())
    except (
        *(StageFailed, VllmMissing, VllmFailed, SidecarFailed, LoadClientMissing, TooFewIterations),
        *(WorkloadError, PolicySpecError, PolicyParameterError, UnknownPolicyError, UnknownProfileError),
    ) as error:
        fail(str(error))
    deliver(to_json(result), render(result), json_file)


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Lets the signals that end a command unwind it, so that no engine is left behind."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the command in order, so that no engine is left behind."""
    sys.exit(128 + number)


class _Told:
    """Writes each line to stderr, after the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, line: str) -> None:
        typer.echo(f"[{time.monotonic() - self._started:4.0f} s] {line}", err=True)
