"""``slidingserve tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import fail, quiet_grpc


def tune(options: dict[str, Any]) -> None:
    """Chooses with progress on stderr; writes the settings file, prints the answer in words, or as JSON."""
    quiet_grpc()
    from engine_adapter.simulated.profiles import ProfileError
    from evaluation.goodput.store import StoreError
    from evaluation.inprocess import DecisionRefused
    from evaluation.tuning.answer import to_json
    from evaluation.tuning.settings import SettingsFileError, check_free, write
    from evaluation.tuning.tune import tune as run
    from evaluation.tuning.words import render
    from evaluation.workloads import WorkloadError
    from evaluation.workloads.tracefiles import TraceError
    from sidecar.cli.progress import SweepProgress
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError

    out: Path = options["out"]
    json_file: Path | None = options["json_file"]
    check_writable(json_file)
    try:
        check_free(out, options["force"])
        request = _request(options)
        with SweepProgress() as progress:
            answer = run(request, progress.update)
        write(answer, out, options["force"])
    except (
        *(ProfileError, WorkloadError, TraceError, StoreError, SettingsFileError, DecisionRefused),
        *(PolicySpecError, PolicyParameterError, UnknownPolicyError, UnknownProfileError),
    ) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted; every finished run is in {options['results']}, the same command goes on from there")
    check = f"Settings are in {out}; `slidingserve check-config --config {out}` shows them in full."
    deliver(to_json(answer), f"{render(answer)}\n{check}", json_file)


def _request(options: dict[str, Any]) -> Any:
    from evaluation.tuning.tune import CANDIDATES, TuneRequest
    from evaluation.workloads import parse_workload

    trace, workload = options["trace"], options["workload"]
    if (trace is None) == (workload is None):
        fail("give either --trace FILE or --workload NAME")
    for name in ("ttft_ms", "tbt_ms"):
        value = options[name]
        if value is not None and not value > 0:
            fail(f"--{name.replace('_', '-')} {value:g}: give a time above 0 ms")
    if not 0.0 < options["violations"] < 100.0:
        fail(f"--violations {options['violations']:g}: give a percentage above 0 and below 100")
    text = workload if trace is None else f"trace={trace.expanduser().resolve()}"
    return TuneRequest(
        spec=parse_workload(text, ttft_ms=options["ttft_ms"], tbt_ms=options["tbt_ms"]),
        profile=options["profile"],
        results=options["results"],
        policies=tuple(dict.fromkeys(options["policy"] or CANDIDATES)),
        requests=options["requests"],
        limit=options["violations"] / 100.0,
        minutes=options["minutes"],
        jobs=options["jobs"],
        data=options["data"],
    )
