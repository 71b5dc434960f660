"""The commands and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from sidecar.cli import demoing, predicting, profiles, reproducing
from sidecar.cli.options import ComparedPolicies, Data, Jobs, ProfileName, Requests, Seeds, Violations, Workloads

app = typer.Typer(
    name="slidingserve",
    help="Decides, every iteration, how many tokens each request of an LLM engine gets, so that latency SLOs are met.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(profiles.app, name="profiles")
app.add_typer(predicting.app, name="predictor")
app.add_typer(demoing.app, name="demo")
app.add_typer(reproducing.app, name="reproduce")

Config = Annotated[Path | None, typer.Option("--config", help="TOML file; or set SLIDINGSERVE_CONFIG.")]
Listen = Annotated[str | None, typer.Option(help="Where engines connect: unix:/path or host:port.")]
HealthListen = Annotated[str | None, typer.Option(help="Second address for health checks only, host:port.")]
Policy = Annotated[str | None, typer.Option(help="Default policy: name or name:key=value,key=value.")]
Profile = Annotated[str | None, typer.Option(help="Default hardware profile for the predictor.")]
ServedMode = Annotated[str | None, typer.Option(help="off, shadow or active, whatever engines ask for.")]
DefaultTtft = Annotated[float | None, typer.Option(help="TTFT SLO where nobody brings one, seconds; 0: none.")]
DefaultTbt = Annotated[float | None, typer.Option(help="TBT SLO where nobody brings one, seconds; 0: none.")]
MaxSessions = Annotated[int | None, typer.Option(help="Most engines at once.")]
MaxMessage = Annotated[int | None, typer.Option(help="Largest message, bytes.")]
Drain = Annotated[float | None, typer.Option(help="Longest wait for engines after SIGTERM, seconds.")]
JournalDir = Annotated[Path | None, typer.Option(help="Folder for journals of sessions.")]
LogFormat = Annotated[str | None, typer.Option(help="console or json.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]


@app.command()
def serve(
    config: Config = None,
    listen: Listen = None,
    health_listen: HealthListen = None,
    policy: Policy = None,
    profile: Profile = None,
    mode: ServedMode = None,
    default_ttft_seconds: DefaultTtft = None,
    default_tbt_seconds: DefaultTbt = None,
    max_sessions: MaxSessions = None,
    max_message_bytes: MaxMessage = None,
    drain_seconds: Drain = None,
    journal_dir: JournalDir = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Serve engines: the sidecar. Flags win over SLIDINGSERVE_* variables, those over the file."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    from sidecar.cli import serving

    serving.serve(flags, config)


def _with_options_of(command: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes ``**flags`` the options of another."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
        function.__annotations__ = get_type_hints(command, include_extras=True)
        return function

    return decorate


@app.command("check-config")
@_with_options_of(serve)
def check_config(config: Path | None = None, **flags: object) -> None:
    """Check the settings that `serve` would use with these flags, and show where each is from."""
    from sidecar.cli import serving

    serving.check_config(flags, config)


@app.command()
def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="name or name:key=value,key=value; repeat to compare. Default: vllm and slidingserve."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="name or name:key=value,key=value. Names: sharegpt, arxiv-v1, arxiv-v2, mixed-v1, mixed-v2, "
            "transient, diurnal, bursty, azure-conv, azure-code, mooncake, servegen-m-small, trace=PATH. Keys: slos "
            "(relative, absolute, qoserve), floor_ms, ttft_ms, tbt_ms; arrivals (poisson, gamma, switching), cv, "
            "period_s, low, high; of recorded ones: part (all, first-half, second-half)."
        ),
    ] = "mixed-v1",
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests from a file instead (Azure, BurstGPT, Mooncake or our CSV; .gz too)."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Mean requests/s. Default: 2, as recorded for a trace, the mean of low and high of a switching load."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="How many requests. Default: 300 of a workload, all of a trace.")
    ] = None,
    profile: ProfileName = "rtx3090-tp2",
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.")] = 0,
    floor_ms: Annotated[
        float,
        typer.Option(
            help="Added to each relative TTFT SLO of a --workload that does not say floor_ms itself: what tokenizer, "
            "HTTP and network take, ms."
        ),
    ] = 200.0,
    ttft_ms: Annotated[float | None, typer.Option(help="TTFT SLO for every request instead, ms.")] = None,
    tbt_ms: Annotated[float | None, typer.Option(help="TBT SLO for every request instead, ms.")] = None,
    transport: Annotated[
        str, typer.Option(help="grpc: a sidecar process on a Unix socket. inprocess: the same core, no wire.")
    ] = "grpc",
    data: Data = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON (- = stdout, without the table).")
    ] = None,
) -> None:
    """Simulate an engine with a sidecar and show which SLOs are met."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import simulating

    simulating.simulate(options)


@app.command()
def goodput(
    policy: ComparedPolicies = None,
    workload: Workloads = ["mixed-v1"],  # noqa: B006 - typer copies it
    profile: Annotated[
        list[str], typer.Option(help="Hardware profile: a name from `slidingserve profiles list` or a file; repeat.")
    ] = ["rtx3090-tp2"],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for the results; one that has some goes on from there.")] = Path(
        "goodput-results"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="600 requests, one seed and two caps, not 3000, three and ten.")
    ] = False,
    cap: Annotated[
        list[int] | None, typer.Option(help="Only this cap of an iteration's tokens; repeat.", show_default=False)
    ] = None,
    requests: Requests = None,
    seeds: Seeds = None,
    violations: Violations = 1.0,
    jobs: Jobs = 0,
    shard: Annotated[
        str | None, typer.Option(metavar="K/N", help="Only the K-th of N parts of the work.", show_default=False)
    ] = None,
    data: Data = None,
) -> None:
    """Find the highest rate at which each policy, with its best cap, keeps its promises."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import goodputting

    goodputting.goodput(options)


@app.command()
def tune(
    trace: Annotated[
        Path | None,
        typer.Option(help="Your traffic (Azure, BurstGPT, Mooncake or our CSV; .gz too).", show_default=False),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Traffic by name instead: name or name:key=value,key=value.", show_default=False),
    ] = None,
    profile: ProfileName = "rtx3090-tp2",
    ttft_ms: Annotated[float | None, typer.Option(help="TTFT SLO for every request, ms.", show_default=False)] = None,
    tbt_ms: Annotated[float | None, typer.Option(help="TBT SLO for every request, ms.", show_default=False)] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Candidate: name or name:key=value; repeat. Default: vllm, sarathi-edf, qoserve, slidingserve and "
            "slidingserve+relegation."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Most requests of each half. Default: 10,000 of a trace.", show_default=False),
    ] = None,
    violations: Violations = 1.0,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="About when to be done, leaving settings out for it; 0: no limit.")
    ] = 0.0,
    out: Annotated[Path, typer.Option(help="The sidecar's settings file to write.")] = Path("sidecar.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace that file if it is there.")] = False,
    results: Annotated[Path, typer.Option(help="Folder for the runs; one that has some goes on from there.")] = Path(
        "tune-results"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the answer as JSON (- = stdout, without the words).")
    ] = None,
    jobs: Jobs = 0,
    data: Data = None,
) -> None:
    """Find the best policy and settings for your traffic, and the rate that can be promised with them."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import tuning

    tuning.tune(options)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder that `slidingserve goodput` or `reproduce` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for index.html and figures/*.png. Default: RESULTS/report.", show_default=False),
    ] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Write each figure as PNG too.")] = True,
) -> None:
    """Write one self-contained page of figures and tables of results."""
    from sidecar.cli import reporting

    reporting.report(results, out, png)


@app.command()
def bounds(
    policy: ComparedPolicies = None,
    profile: ProfileName = "rtx3090-tp2",
    instances: Annotated[int, typer.Option(min=1, help="Small instances that are solved exactly.")] = 100,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Bound the goodput of this workload too; repeat.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of that workload.")] = 600,
    data: Data = None,
) -> None:
    """Show how far policies are from a clairvoyant optimum, and which goodput no policy can exceed."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import bounding

    bounding.bounds(options)


@app.command()
def bench(
    policy: Annotated[str, typer.Option(help="name or name:key=value,key=value.")] = "slidingserve",
    profile: ProfileName = "h100-tp1",
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: seconds instead of a minute.")] = False,
    only: Annotated[str | None, typer.Option(help="One part: roundtrip, core, codec or engine.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures as JSON (- = stdout, without the tables).")
    ] = None,
) -> None:
    """Measure what a decision costs on this machine: round trip, decision core, codec, iterations."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import benching

    benching.bench(options)


@app.command()
def profile(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="For an engine of its own, after --.")
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm.")] = "vllm",
    model: Annotated[
        str | None,
        typer.Option(help="Model of an own engine: tiny, a folder or a name. Default: tiny.", show_default=False),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Profile the vLLM that runs here, http://host:port, instead.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Where that engine looks for its sidecar. Default: the sidecar's default socket.", show_default=False
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, max=1440.0, help="Most time to measure; 0: fit again to what is there.")
    ] = 5.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME", help="Write NAME.json and NAME.samples.csv. Default: MODEL-tpRANKS.", show_default=False
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of an own engine.")] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(help="What the engine runs on, for the record. Default: this machine.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of batches, lengths and prompts.")] = 0,
) -> None:
    """Measure a real engine's iterations, in batches of all kinds, and fit a latency model to them."""
    options: dict[str, Any] = dict(locals())
    from sidecar.cli import profiling

    profiling.profile(options)


Address = Annotated[
    str | None,
    typer.Option(
        help="Where the sidecar listens. Default: $SLIDINGSERVE_LISTEN, or the sidecar's default socket.",
        show_default=False,
    ),
]


@app.command()
def mode(
    mode: Annotated[str, typer.Argument(metavar="off|shadow|active", help="How far engines are to obey.")],
    address: Address = None,
    session: Annotated[
        str | None,
        typer.Option(help="One session, as `slidingserve sessions` names it. Default: all, and those to come."),
    ] = None,
) -> None:
    """Switch a running sidecar: off (engines on their own), shadow (decide, not obeyed) or active."""
    from sidecar.cli import controlling

    controlling.set_mode(mode, address, session)


@app.command()
def sessions(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not the table.")] = False,
) -> None:
    """Show the open sessions of a running sidecar."""
    from sidecar.cli import controlling

    controlling.sessions(address, as_json)


@app.command()
def shadow(
    journals: Annotated[list[Path], typer.Argument(metavar="JOURNAL...", help="Files of `serve --journal-dir`.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Forecast this policy too: name or name:key=value,key=value; repeat.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Latency model for iteration times: a built-in name or a .json file. Default: the session's.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON (- = stdout, without the table).")
    ] = None,
) -> None:
    """Report from journals which SLOs were met, and which would have been under other policies."""
    from sidecar.cli import controlling

    controlling.shadow(journals, policy or [], model, json_file)


@app.command()
def doctor(
    vllm: Annotated[bool, typer.Option("--vllm", help="Look at vLLM and the adapter in it.")] = False,
    additional_config: Annotated[
        str | None, typer.Option(help="The JSON that vLLM gets as --additional-config.", show_default=False)
    ] = None,
) -> None:
    """Check that engine, adapter, settings, socket and sidecar fit together, and say what to do."""
    from sidecar.cli import doctoring

    doctoring.doctor(vllm=vllm, additional_config=additional_config)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Explain the parameters of this policy.")] = None,
) -> None:
    """List the installed policies and their parameters, or explain those of one."""
    from sidecar.cli import listing

    listing.policies(name)


@app.command()
def version() -> None:
    """Show the version."""
    from slidingserve import __version__

    typer.echo(f"slidingserve {__version__}")
