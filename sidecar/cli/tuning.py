"""``slidingserve tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import evaluation_errors, fail, quiet_grpc
from sidecar.cli.options import once, share_of


def tune(options: dict[str, Any]) -> None:
    """Chooses with progress on stderr; writes the settings file, prints the answer in words, or as JSON."""
    quiet_grpc()
    from evaluation.tuning.answer import to_json
    from evaluation.tuning.settings import SettingsFileError, check_free, write
    from evaluation.tuning.tune import tune as run
    from evaluation.tuning.words import render
    from sidecar.cli.progress import SweepProgress

    out: Path = options["out"]
    json_file: Path | None = options["json_file"]
    check_writable(json_file)
    try:
        check_free(out, options["force"])
        request = _request(options)
        with SweepProgress() as progress:
            answer = run(request, progress.update)
        write(answer, out, options["force"])
    except evaluation_errors(SettingsFileError) as error:
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
    text = workload if trace is None else f"trace={trace.expanduser().resolve()}"
    return TuneRequest(
        spec=parse_workload(text, ttft_ms=options["ttft_ms"], tbt_ms=options["tbt_ms"]),
        profile=options["profile"],
        results=options["results"],
        policies=once(options["policy"] or CANDIDATES),
        requests=options["requests"],
        limit=share_of(options["violations"]),
        minutes=options["minutes"],
        jobs=options["jobs"],
        data=options["data"],
    )
