"""``slidingserve predictor``: the latency predictor's models, their errors, and how they are fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli.delivering import make_folders
from sidecar.cli.failing import fail

if TYPE_CHECKING:
    from rich.table import Table

    from engine_adapter.simulated.profiles import HardwareProfile
    from engine_adapter.simulated.timing import IterationTimer
    from evaluation.hardware.fit import ErrorRow
    from evaluation.hardware.latency_models import Comparison
    from predictor.model import LatencyModel

app = typer.Typer(help="Latency models of the predictor: list, show with a picture, fit.")

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Take the times from the kernel tables in this folder, not the profile.", show_default=False
    ),
]


_SMALL = "mixed_small: mixed, at most 128 tokens"


@app.command("list")
def list_models() -> None:
    """Lists the built-in models with their errors, and the paper's."""
    from rich.console import Console
    from rich.table import Table

    from evaluation.hardware.latency_models import PAPER_ERRORS
    from predictor.files import load_model, model_names

    table = Table(
        title="Built-in latency models",
        caption="errors on drawn iterations not fitted to; the paper's: Qwen2.5-7B, its runs",
        padding=(0, 1, 0, 0),
    )
    for heading in ("profile", "version"):
        table.add_column(heading, no_wrap=True)
    for heading in ("samples", "MAE ms", "RMSE ms", "R2", "MAPE %"):
        table.add_column(heading, justify="right", no_wrap=True)
    with _complaints():
        for name in model_names():
            model = load_model(name)
            e = model.errors.get("all", {})
            table.add_row(
                model.profile,
                f"{model.name}@{model.digest[:8]}",
                str(model.experts["global"].samples),
                *_figures(e.get("mae_ms"), e.get("rmse_ms"), e.get("r2"), e.get("mape_percent")),
            )
    table.add_section()
    for paper in PAPER_ERRORS:
        table.add_row(paper.gpu, "the paper", "-", *_figures(paper.mae_ms, paper.rmse_ms, paper.r2, None))
    Console().print(table)


@app.command("show")
def show(
    model: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A built-in model, or a .json file.")],
    png: Annotated[
        Path | None, typer.Option(help="Write the picture to this PNG file too.", show_default=False)
    ] = None,
    data: DataOption = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Compare with this hardware profile (name or file). Default: the model's.", show_default=False
        ),
    ] = None,
) -> None:
    """Shows one model: errors, weights, and a picture of predicted over measured iteration times."""
    from evaluation.hardware.latency_models import compare
    from evaluation.pictures import text_plot, write_png
    from predictor.files import load_model

    with _complaints():
        loaded = load_model(model)
        hardware_profile = _profile(profile or loaded.profile, loaded)
        timer, source = _times(hardware_profile, data)
        comparison = compare(loaded, hardware_profile, timer=timer)
        title = _title(loaded, comparison, source)
        measured, predicted = 1e3 * comparison.measured_seconds, 1e3 * comparison.predicted_seconds
        if png is not None:
            write_png(measured, predicted, comparison.scenarios, title, png)
        _show(loaded)
        typer.echo(text_plot(measured, predicted, title))
        if png is not None:
            typer.echo(f"wrote {png}")


@app.command("fit")
def fit(
    profile: Annotated[
        str | None, typer.Argument(help="Hardware profile: a built-in name or a .json file.", show_default=False)
    ] = None,
    fit_all: Annotated[bool, typer.Option("--all", help="Fit a model for every built-in profile.")] = False,
    data: DataOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write PROFILE.json to.", show_default=False)] = None,
    write: Annotated[bool, typer.Option("--write", help="Replace the built-in model.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the drawn iterations.")] = 0,
) -> None:
    """Fits models to a profile's iteration times and prints their held-out errors; writes nothing unless told to."""
    import predictor
    from engine_adapter.simulated.profiles import load_profile, profile_names
    from evaluation.hardware.latency_models import fit_model

    if fit_all == (profile is not None):
        fail("give either a PROFILE or --all")
    with _complaints():
        profiles = [load_profile(name) for name in (profile_names() if profile is None else (profile,))]
        timers = [_times(entry, data) for entry in profiles]
        targets = make_folders(out, Path(predictor.__file__).parent / "models" if write else None)
        for entry, (timer, source) in zip(profiles, timers, strict=True):
            fitted, errors = fit_model(entry, seed=seed, timer=timer, source=source)
            _report(fitted, errors, targets)


@contextmanager
def _complaints() -> Iterator[None]:
    """Ends the command with one message for everything that a user can put right."""
    from engine_adapter.simulated.profiles import ProfileError
    from evaluation.hardware.tables import DataError
    from predictor.files import ModelError

    try:
        yield
    except (ModelError, ProfileError, DataError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: cannot be written ({error.strerror}); give another file or folder")
    except ImportError as error:
        fail(f"{error}: install the fitting tools with `pip install 'slidingserve[fit]'`")


def _profile(name: str, model: LatencyModel) -> HardwareProfile:
    """Returns the profile to compare with; says what to do if it is the model's own and not built in."""
    from engine_adapter.simulated.profiles import ProfileError, load_profile

    try:
        return load_profile(name)
    except ProfileError as error:
        if name != model.profile:
            raise
        fail(f"model {model.version}: {error}, with --profile")


def _times(profile: HardwareProfile, data: Path | None) -> tuple[IterationTimer | None, str]:
    """Returns what measures iterations (None: the profile itself) and its name."""
    if data is None:
        return None, f"hardware profile {profile.name}"
    from evaluation.hardware.catalog import hardware
    from evaluation.hardware.tables import resolve_folder

    timer = hardware(profile.name).build_timer(resolve_folder(data))
    return timer, f"measured kernel tables of {profile.name}, kernels alone"


def _report(model: LatencyModel, errors: Sequence[ErrorRow], targets: Sequence[Path]) -> None:
    """Prints the error table of one fit, and writes the model."""
    from rich.console import Console
    from rich.table import Table

    from predictor.files import write_model

    console = Console()
    table = Table(title=model.version, caption=f"errors on iterations not fitted to; {_SMALL}")
    _error_columns(table)
    for e in errors:
        table.add_row(e.scenario, *_figures(e.mae_ms, e.rmse_ms, e.r2, e.mape_percent))
    console.print(table)
    for folder in targets:
        path = folder / f"{Path(model.profile).name}.json"
        write_model(model, path)
        typer.echo(f"wrote {path}")


def _show(model: LatencyModel) -> None:
    """Prints facts, errors and weights."""
    from rich.console import Console
    from rich.table import Table

    from evaluation.hardware.latency_models import PAPER_ERRORS
    from predictor.features import FEATURES
    from predictor.model import EXPERTS

    console = Console()
    facts = Table(title=f"Latency model {model.name}", show_header=False)
    facts.add_column()
    facts.add_column(overflow="fold")
    table_tokens = f"0 to {len(model.table_seconds) - 1} total tokens" if model.table_seconds else "none"
    for label, value in (
        ("version", model.version),
        ("profile", model.profile),
        ("table", table_tokens),
        ("provenance", model.provenance),
        ("digest", model.digest),
    ):
        facts.add_row(label, value)
    console.print(facts)
    errors = Table(title="Errors on iterations not fitted to", caption=f"{_SMALL}; the paper's: Qwen2.5-7B, its runs")
    _error_columns(errors)
    for scenario, e in model.errors.items():
        figures = _figures(e.get("mae_ms"), e.get("rmse_ms"), e.get("r2"), e.get("mape_percent"))
        errors.add_row(scenario, *figures)
    errors.add_section()
    for paper in PAPER_ERRORS:
        errors.add_row(f"paper, {paper.gpu}", *_figures(paper.mae_ms, paper.rmse_ms, paper.r2, None))
    console.print(errors)
    weights = Table("", title="Weights, microseconds per unit", caption="a scenario without an expert takes global")
    experts = [(name, model.experts[name]) for name in EXPERTS if name in model.experts]
    for name, _ in experts:
        weights.add_column(name, justify="right")
    weights.add_row("intercept", *(f"{1e6 * expert.intercept_seconds:.6g}" for _, expert in experts))
    for i, feature in enumerate(FEATURES):
        weights.add_row(f"x{i + 1} {feature}", *(f"{1e6 * expert.weights[i]:.6g}" for _, expert in experts))
    weights.add_row("samples", *(str(expert.samples) for _, expert in experts))
    console.print(weights)


def _title(model: LatencyModel, comparison: Comparison, source: str) -> str:
    """Returns what a picture says above itself: two lines."""
    e = next(row for row in comparison.errors if row.scenario == "all")
    return (
        f"{model.version} over {source}\n"
        f"{e.count} drawn iterations not fitted to: MAE {e.mae_ms:.3f} ms, RMSE {e.rmse_ms:.3f} ms, R2 {e.r2:.4f}"
    )


def _error_columns(table: Table) -> None:
    table.add_column("scenario")
    for heading in ("MAE ms", "RMSE ms", "R2", "MAPE %"):
        table.add_column(heading, justify="right")


def _figures(mae: float | None, rmse: float | None, r2: float | None, mape: float | None) -> list[str]:
    """Returns an error row's cells; - where a figure is missing."""
    digits = (3, 3, 4, 2)
    return ["-" if x is None else f"{x:.{d}f}" for x, d in zip((mae, rmse, r2, mape), digits, strict=True)]
