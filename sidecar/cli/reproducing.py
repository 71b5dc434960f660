"""``slidingserve reproduce``: the paper's tables on our simulated hardware, each beside the published figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import evaluation_errors, fail, quiet_grpc
from sidecar.cli.options import Data, Jobs, Requests, Seeds, Workloads, effort_of, once, positive

if TYPE_CHECKING:
    from evaluation.reproduce.result import Reproduced
    from evaluation.reproduce.runs import Say, Setup

app = typer.Typer(
    help="Repeat the paper's tables, ours beside the published figures, and say in words which claims hold.",
    no_args_is_help=True,
)

QUICK_REQUESTS, FULL_REQUESTS = 600, 3000
QUICK_SEEDS, FULL_SEEDS = 3, 5
"""Seeds of tables of violations, whose intervals are over the seeds."""

Profiles = Annotated[
    list[str], typer.Option("--profile", help="A name from `slidingserve profiles list` or a file; repeat.")
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder for the results; runs that are in it are not made again. With the same folder for all of these "
        "commands, the others use the best caps that `reproduce goodput` has found."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer requests and seeds, and two caps.")]
Cap = Annotated[int, typer.Option(min=1, help="Most tokens of an iteration where no best cap is known.")]
Caps = Annotated[list[int] | None, typer.Option("--cap", help="Only this cap; repeat.", show_default=False)]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write the results as JSON (- = stdout, without the tables).")
]

_PROFILE = "rtx3090-tp2"  # the paper's
_RESULTS = Path("reproduce-results")


@app.command()
def goodput(
    profile: Profiles = [_PROFILE],  # noqa: B006 - typer copies it
    out: Out = _RESULTS,
    quick: Quick = False,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this one of the paper's five; repeat.", show_default=False)
    ] = None,
    floor_ms: Annotated[
        list[float], typer.Option(help="Added to the TTFT SLOs; 0 is the paper taken literally; repeat.")
    ] = [0.0],  # noqa: B006
    cap: Caps = None,
    requests: Requests = None,
    seeds: Seeds = None,
    jobs: Jobs = 0,
    json_file: Json = None,
) -> None:
    """Figure 4: goodput of EDF, QoServe and SlidingServe on five workloads, each with its best cap."""

    def run(report: Any, say: Say) -> Reproduced:
        from evaluation.reproduce.goodput import GoodputRequest, reproduce_goodput
        from evaluation.reproduce.paper import WORKLOADS

        for name in workload or ():
            if name not in WORKLOADS:
                fail(f"--workload {name!r}: the paper has {', '.join(WORKLOADS)}")
        request = GoodputRequest(
            profiles=once(profile),
            folder=out,
            effort=effort_of(quick, requests, seeds, cap),
            floors_ms=once(floor_ms),
            workloads=once(workload or WORKLOADS),
            jobs=jobs,
        )
        return reproduce_goodput(request, report, say)

    _reproduce(run, out, json_file)


@app.command()
def overload(
    profile: Profiles = [_PROFILE],  # noqa: B006
    out: Out = _RESULTS,
    quick: Quick = False,
    workload: Workloads = ["mixed-v1"],  # noqa: B006
    factor: Annotated[
        list[float] | None,
        typer.Option(
            help="Multiple of SlidingServe's goodput; repeat. Default: 0.5, 0.75, 1, 1.25, 1.5, 2 and 2.5.",
            show_default=False,
        ),
    ] = None,
    cap: Cap = 256,
    requests: Requests = None,
    seeds: Seeds = None,
    jobs: Jobs = 0,
    data: Data = None,
    json_file: Json = None,
) -> None:
    """Figure 5: requests that miss a deadline at 0.5 to 2.5 times SlidingServe's goodput."""

    def run(report: Any, say: Say) -> Reproduced:
        from evaluation.reproduce.overload import FACTORS, reproduce_overload

        for number in factor or ():
            if not number > 0:
                fail(f"--factor {number:g}: give a multiple above 0")
        setup = _setup(profile, out, quick, requests, seeds, cap, jobs, data)
        return reproduce_overload(setup, once(workload), once(factor or FACTORS), report, say)

    _reproduce(run, out, json_file)


@app.command()
def transient(
    profile: Profiles = [_PROFILE],  # noqa: B006
    out: Out = _RESULTS,
    quick: Quick = False,
    minutes: Annotated[float | None, typer.Option(help="How long. Default: 20, quick 8.", show_default=False)] = None,
    cap: Cap = 256,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests of a run where the goodput has to be found first.", show_default=False),
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 0,
    json_file: Json = None,
) -> None:
    """Figure 6: requests that miss a deadline under a load that switches every two minutes."""

    def run(report: Any, say: Say) -> Reproduced:
        from evaluation.reproduce.paper import TRANSIENT
        from evaluation.reproduce.transient import reproduce_transient

        length = (8.0 if quick else TRANSIENT.minutes) if minutes is None else minutes
        setup = _setup(profile, out, quick, requests, seeds, cap, jobs)
        return reproduce_transient(setup, length, report, say)

    _reproduce(run, out, json_file)


@app.command()
def ablation(
    profile: Profiles = [_PROFILE],  # noqa: B006
    out: Out = _RESULTS,
    quick: Quick = False,
    cap: Caps = None,
    requests: Requests = None,
    seeds: Seeds = None,
    jobs: Jobs = 0,
    json_file: Json = None,
) -> None:
    """Table 4: what SlidingChunker, MLPS and BatchConstructor are worth, one on the other, on mixed-v1."""

    def run(report: Any, say: Say) -> Reproduced:
        from evaluation.reproduce.ablation import AblationRequest, reproduce_ablation

        effort = effort_of(quick, requests, seeds, cap)
        of_violations = seeds or (QUICK_SEEDS if quick else FULL_SEEDS)
        return reproduce_ablation(AblationRequest(once(profile), out, effort, of_violations, jobs=jobs), report, say)

    _reproduce(run, out, json_file)


@app.command()
def overhead(
    profile: Profiles = [_PROFILE],  # noqa: B006
    out: Out = _RESULTS,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="name or name:key=value; repeat. Default: sarathi-edf, qoserve and slidingserve.", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each run.")] = 300,
    json_file: Json = None,
) -> None:
    """Time of each component of a decision, in one process and over a socket, as a share of the iteration."""

    def run(report: Any, say: Say) -> Reproduced:
        from evaluation.reproduce.overhead import reproduce_overhead
        from evaluation.reproduce.paper import POLICIES
        from evaluation.reproduce.runs import Setup

        return reproduce_overhead(Setup(once(profile), out, requests, 1), once(policy or POLICIES), report)

    _reproduce(run, out, json_file)


def _setup(
    profiles: list[str],
    out: Path,
    quick: bool,
    requests: int | None,
    seeds: int | None,
    cap: int,
    jobs: int,
    data: Path | None = None,
) -> Setup:
    from evaluation.reproduce.runs import Setup

    usual = (QUICK_REQUESTS, QUICK_SEEDS) if quick else (FULL_REQUESTS, FULL_SEEDS)
    return Setup(
        profiles=once(profiles),
        folder=out,
        requests=usual[0] if requests is None else positive("requests", requests),
        seeds=usual[1] if seeds is None else positive("seeds", seeds),
        cap=cap,
        jobs=jobs,
        data=data,
    )


def _reproduce(run: Callable[..., Reproduced], out: Path, json_file: Path | None) -> None:
    """Runs with progress on stderr; prints the tables and the words, or JSON."""
    quiet_grpc()
    from evaluation.reproduce.result import render, to_json, write
    from sidecar.cli.progress import SweepProgress

    check_writable(json_file)
    try:
        with SweepProgress() as progress:
            found = run(progress.update, lambda text: typer.echo(f"slidingserve: {text}", err=True))
        file = write(found, out)
    except evaluation_errors() as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted; every finished run is in {out}, the same command goes on from there")
    deliver(to_json(found), f"{render(found)}\nAll of it is in {file}.", json_file)
