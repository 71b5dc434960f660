"""``slidingserve profiles``: the hardware profiles of the simulated engine, and how they were fitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sidecar.cli.delivering import make_folders
from sidecar.cli.failing import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_adapter.simulated.profiles import HardwareProfile
    from evaluation.hardware.fit import ErrorRow

app = typer.Typer(help="Hardware profiles of the simulated engine: list, show, fit to measured kernel tables.")

DataOption = Annotated[
    Path | None,
    typer.Option("--data", envvar="SLIDINGSERVE_DATA", help="Folder of public kernel tables.", show_default=False),
]


@app.command("list")
def list_profiles() -> None:
    """Lists the built-in profiles."""
    from rich.console import Console
    from rich.table import Table

    from engine_adapter.simulated.profiles import load_profile, profile_names

    table = Table(title="Built-in profiles", caption="error: mean relative error of iteration times not fitted to")
    table.add_column("name", no_wrap=True)
    table.add_column("GPU")
    for heading in ("TP", "KV tokens", "parameters", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in profile_names():
        p = load_profile(name)
        errors = p.fit_errors or {}
        table.add_row(
            p.name,
            p.gpu,
            str(p.tensor_parallel),
            f"{p.kv_tokens:,}",
            str(p.parameters.count),
            f"{errors['all']['mape_percent']:.2f}" if "all" in errors else "-",
        )
    Console().print(table)


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A built-in profile, or the path of a .json file.")]) -> None:
    """Shows one profile: limits, errors of its fit, parameters."""
    from rich.console import Console
    from rich.table import Table

    from engine_adapter.simulated.profiles import FEATURES, ProfileError, load_profile

    try:
        profile = load_profile(name)
    except ProfileError as error:
        fail(str(error))
    console = Console()
    facts = Table(title=f"Profile {profile.name}", show_header=False)
    for label, value in (
        ("GPU", f"{profile.gpu}, tensor parallel {profile.tensor_parallel}"),
        ("model", profile.model),
        ("KV cache", f"{profile.kv_tokens:,} tokens in {profile.kv_blocks:,} blocks of {profile.kv_block_tokens}"),
        ("limits", f"{profile.max_tokens_per_iteration} tokens, {profile.max_sequences} sequences per iteration"),
        ("CPU time", f"{1e3 * profile.cpu_seconds_per_iteration:g} ms per iteration"),
        ("parameters", str(profile.parameters.count)),
        ("provenance", profile.provenance),
        ("digest", profile.digest),
    ):
        facts.add_row(label, value)
    console.print(facts)
    errors = Table("scenario", "error %", "MAE ms", "RMSE ms", "R2", title="Held-out error of the fit")
    for scenario, e in (profile.fit_errors or {}).items():
        errors.add_row(scenario, *(f"{e.get(m, 0.0):g}" for m in ("mape_percent", "mae_ms", "rmse_ms", "r2")))
    console.print(errors)
    staircase = Table("total tokens", "from ms", "to ms", title="Linear layers")
    edges = profile.parameters.token_edges
    for low, high, (start, end) in zip(edges[:-1], edges[1:], profile.parameters.segment_seconds, strict=True):
        staircase.add_row(f"{low + 1}-{high}", f"{1e3 * start:.3f}", f"{1e3 * end:.3f}")
    console.print(staircase)
    coefficients = Table("feature", "microseconds per unit", title="Attention and logits")
    for feature, seconds in zip(FEATURES, profile.parameters.feature_seconds, strict=True):
        if seconds > 0.0:
            coefficients.add_row(feature, f"{1e6 * seconds:.4g}")
    console.print(coefficients)


@app.command("fit")
def fit(
    name: Annotated[str | None, typer.Argument(help="The profile to fit.")] = None,
    data: DataOption = None,
    fit_all: Annotated[bool, typer.Option("--all", help="Fit every profile.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write NAME.json to.", show_default=False)] = None,
    write: Annotated[bool, typer.Option("--write", help="Replace the built-in profile.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn iterations.")] = 0,
) -> None:
    """Fits profiles to the measured kernel tables and prints their held-out error; writes nothing unless told to."""
    from engine_adapter.simulated import profiles
    from evaluation.hardware.catalog import HARDWARE, hardware
    from evaluation.hardware.fit import fit_profile
    from evaluation.hardware.tables import DataError, resolve_folder

    if fit_all == (name is not None):
        fail("give either the NAME of a profile or --all")
    try:
        folder = resolve_folder(data)
        entries = HARDWARE if name is None else (hardware(name),)
        targets = make_folders(out, Path(profiles.__file__).parent / "profiles" if write else None)
        for entry in entries:
            profile, errors = fit_profile(entry, folder, seed=seed)
            _report(profile, errors, targets)
    except DataError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: cannot be written ({error.strerror}); give another --out folder")
    except ImportError as error:
        fail(f"{error}: install the fitting tools with `pip install 'slidingserve[fit]'`")


@app.command("validate")
def validate(data: DataOption = None) -> None:
    """Replays real vLLM runs in the simulated engine and prints how far off it is."""
    from rich.console import Console
    from rich.table import Table

    from evaluation.hardware.tables import DataError, resolve_folder
    from evaluation.hardware.validate import RUNS, validate

    console = Console()
    try:
        folder = resolve_folder(data)
        for name in RUNS:
            tables, fitted = (validate(name, folder, timer) for timer in ("tables", "profile"))
            title = f"{name}: real vLLM 0.19 run, 300 requests"
            note = f"{tables.iterations} iterations and {tables.preemptions} preemptions with the tables"
            table = Table("", "real s", "tables s", "off %", "profile s", "off %", title=title, caption=note)
            for measured, profiled in zip(tables.measures, fitted.measures, strict=True):
                table.add_row(
                    measured.name,
                    f"{measured.real:.4g}",
                    f"{measured.simulated:.4g}",
                    f"{100 * measured.error:+.1f}",
                    f"{profiled.simulated:.4g}",
                    f"{100 * profiled.error:+.1f}",
                )
            console.print(table)
    except DataError as error:
        fail(str(error))
    except ImportError as error:
        fail(f"{error}: install the fitting tools with `pip install 'slidingserve[fit]'`")


def _report(profile: HardwareProfile, errors: Sequence[ErrorRow], targets: Sequence[Path]) -> None:
    """Prints the error table of one fit, and writes the profile."""
    from rich.console import Console
    from rich.table import Table

    from engine_adapter.simulated.profiles import write_profile

    console = Console()
    table = Table(title=f"{profile.name}: {profile.parameters.count} parameters, error on iterations not fitted to")
    table.add_column("scenario")
    for heading in ("iterations", "error %", "MAE ms", "RMSE ms", "R2"):
        table.add_column(heading, justify="right")
    for row in errors:
        table.add_row(
            row.scenario,
            str(row.count),
            f"{row.mape_percent:.2f}",
            f"{row.mae_ms:.3f}",
            f"{row.rmse_ms:.3f}",
            f"{row.r2:.5f}",
        )
    console.print(table)
    for folder in targets:
        path = folder / f"{profile.name}.json"
        write_profile(profile, path)
        console.print(f"wrote {path}")
