"""What a user gets to read when something goes wrong."""

from __future__ import annotations

import os
from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Ends the command with status 2 and one message on stderr."""
    typer.echo(f"slidingserve: {message}", err=True)
    raise typer.Exit(2)


def evaluation_errors(*further: type[Exception]) -> tuple[type[Exception], ...]:
    """Returns what simulations and sweeps raise for users to read, and what is added; imports what they need."""
    from engine_adapter.client import ClientError
    from engine_adapter.simulated.profiles import ProfileError
    from evaluation.goodput.store import StoreError
    from evaluation.inprocess import DecisionRefused
    from evaluation.sidecar_process import SidecarFailed
    from evaluation.simulate import NoDecision
    from evaluation.workloads import WorkloadError
    from evaluation.workloads.tracefiles import TraceError
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError
    from sidecar.warming import PolicyCannotDecide

    return (
        *(ProfileError, WorkloadError, TraceError, StoreError),
        *(PolicySpecError, PolicyParameterError, UnknownPolicyError, UnknownProfileError),
        *(ClientError, SidecarFailed, NoDecision, DecisionRefused, PolicyCannotDecide),
        *further,
    )


def quiet_grpc() -> None:
    """Keeps gRPC's own warnings off stderr unless the user wants them; to be called before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
