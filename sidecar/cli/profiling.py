"""``slidingserve profile``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sidecar.cli.failing import fail, quiet_grpc

if TYPE_CHECKING:
    from evaluation.engines.profiling import Profiled, Progress, Told

_LINE_SECONDS = 15.0
_INTERRUPTED = 130


def profile(options: dict[str, Any]) -> None:
    """Measures with progress on stderr; prints the model's errors, or says how to go on."""
    quiet_grpc()
    from evaluation.engines.closed_load import LoadFailed
    from evaluation.engines.profile_samples import SamplesError, TooFewSamples
    from evaluation.engines.profiling import ProfilingFailed, profile
    from evaluation.engines.tiny_model import TokenizersMissing
    from evaluation.engines.vllm_process import VllmFailed, VllmMissing
    from evaluation.sidecar_process import SidecarFailed
    from predictor.files import ModelError

    request = _request(options)
    try:
        with _interruptible(), _telling() as told:
            result = profile(request, told)
    except KeyboardInterrupt:
        kept = request.samples_file
        again = f"the samples so far are in {kept}; the same command goes on from there" if kept.exists() else ""
        typer.echo(f"slidingserve: interrupted{'; ' + again if again else ', nothing was measured yet'}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except TooFewSamples as error:
        fail(f"{error}; they are in {request.samples_file}: the same command goes on from there, give more --minutes")
    except (
        *(ProfilingFailed, SamplesError, LoadFailed, SidecarFailed, VllmMissing, VllmFailed),
        *(TokenizersMissing, ModelError),
    ) as error:
        fail(str(error))
    _show(result)


def _request(options: dict[str, Any]) -> Any:
    from evaluation.engines.profiling import ProfileRequest
    from sidecar.config import DEFAULT_SOCKET, check_address

    if options["engine"] != "vllm":
        fail(f"--engine {options['engine']}: give vllm, no other engine has an adapter yet")
    url, target, model = options["url"] or "", options["target"], options["model"]
    if url and model is not None:
        fail(f"--model {model} and --url {url}: an engine that runs has its model; leave out one of the two")
    if target is not None and not url:
        fail(f"--target {target}: give the --url of the engine that looks for its sidecar there")
    target = target or DEFAULT_SOCKET
    try:
        check_address(target)
    except ValueError as error:
        fail(f"--target {target!r}: {error}")
    model = model or "tiny"
    ranks = options["tensor_parallel"]
    name = options["out"] or Path("engine" if url else f"{Path(model).name}-tp{ranks}")
    out = name.with_name(name.name.removesuffix(".json"))
    return ProfileRequest(
        out=out,
        model=model,
        arguments=tuple(options["arguments"] or ()),
        url=url.rstrip("/"),
        target=target,
        minutes=options["minutes"],
        tensor_parallel=ranks,
        hardware=options["hardware"] or "",
        seed=options["seed"],
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets a polite end unwind the command as Ctrl-C does, so that no engine is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _telling() -> Iterator[Told]:
    """Shows on stderr what happens: one line that changes where that is a terminal, a line now and then elsewhere."""
    from evaluation.engines.profiling import Told

    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        with console.status("starting") as status:
            yield Told(
                lambda line: console.print(line, markup=False, highlight=False),
                lambda progress: status.update(progress_line(progress)),
            )
        return
    yield Told(lambda line: typer.echo(line, err=True), _Occasionally().show)


class _Occasionally:
    def __init__(self) -> None:
        self._next = 0.0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next or not progress.seconds_left:
            self._next = now + _LINE_SECONDS
            typer.echo(progress_line(progress), err=True)


def progress_line(progress: Progress) -> str:
    """Returns how far it is, in one line."""
    error = "not known yet" if progress.mape_percent is None else f"{progress.mape_percent:.1f} %"
    covered = f"{progress.coverage.filled} of {progress.coverage.cells} kinds of batches covered"
    return f"{progress.samples} samples, {covered}, held-out error {error}, {progress.seconds_left / 60.0:.1f} min left"


def _show(result: Profiled) -> None:
    from rich.console import Console
    from rich.table import Table

    fit = result.fit
    table = Table(
        title=fit.model.version,
        caption="on a fifth of the samples, which it was not fitted to; mixed_small: mixed, at most 128 tokens",
    )
    table.add_column("scenario")
    for heading in ("iterations", "MAE ms", "RMSE ms", "R2", "MAPE %"):
        table.add_column(heading, justify="right")
    for row in fit.errors:
        figures = (f"{row.mae_ms:.3f}", f"{row.rmse_ms:.3f}", f"{row.r2:.4f}", f"{row.mape_percent:.2f}")
        table.add_row(row.scenario, str(row.count), *figures)
    Console().print(table)
    typer.echo(
        f"{fit.samples} samples, {fit.outliers} outliers left out; with those held out the error is "
        f"{fit.raw_mape_percent:.2f} %"
    )
    if result.coverage is not None and result.coverage.filled < result.coverage.cells:
        missing = result.coverage.cells - result.coverage.filled
        typer.echo(f"{missing} of {result.coverage.cells} kinds of batches are rare; the same command adds to them")
    typer.echo(f"wrote {result.file}; use it with: slidingserve serve --policy slidingserve:model={result.file}")
