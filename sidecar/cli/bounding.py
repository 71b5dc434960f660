"""``slidingserve bounds``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from sidecar.cli.failing import evaluation_errors, fail
from sidecar.cli.options import COMPARED_POLICIES, once


def bounds(options: dict[str, Any]) -> None:
    """Prints how far policies are from the clairvoyant optimum, and which goodput nobody can exceed."""
    from engine_adapter.simulated.profiles import load_profile
    from evaluation.bounds.comparison import compare, render
    from sidecar.cli.progress import SweepProgress

    instances: int = options["instances"]
    policies = once(options["policy"] or COMPARED_POLICIES)
    try:
        profile = load_profile(options["profile"])
        with SweepProgress() as progress:

            def told(done: int) -> None:
                progress.update(done / instances, "small instances")

            comparison = compare(policies, profile, range(instances), progress=told)
        typer.echo(render(comparison) + "\n")
        for workload in options["workload"] or ():
            typer.echo(_goodput_bound(options["profile"], workload, options["requests"], options["data"]))
    except evaluation_errors() as error:
        fail(str(error))


def _goodput_bound(profile: str, workload: str, requests: int, data: Path | None) -> str:
    from engine_adapter.simulated.timing import ProfileTimer
    from evaluation.bounds.workload import bound_goodput
    from evaluation.goodput.runner import base_workload, hardware
    from evaluation.simulate import engine_limits

    base = base_workload(profile, workload, 0, requests, data)
    known = hardware(profile)
    bound = bound_goodput(base.at_rate, ProfileTimer(known), engine_limits(known))
    return f"{workload}: no policy has a goodput of {bound.at_most:.3g} requests/s ({requests} requests, seed 0)"
