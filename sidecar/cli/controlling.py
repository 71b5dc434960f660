"""``slidingserve mode``, ``sessions`` and ``shadow``: what an operator asks of a sidecar, and of its journals."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sidecar.cli.delivering import check_writable, deliver
from sidecar.cli.failing import fail, quiet_grpc

if TYPE_CHECKING:
    from rich.table import Table

    from slidingserve.control.v1 import control_pb2 as pb

ANSWER_SECONDS = 5.0
MODES = ("off", "shadow", "active")
LISTEN_VARIABLE = "SLIDINGSERVE_LISTEN"


def set_mode(mode: str, address: str | None, session: str | None) -> None:
    """Switches one session or all, and says what has changed."""
    if mode not in MODES:
        fail(f"mode {mode!r}: give one of {', '.join(MODES)}")
    if session == "":
        fail("--session '': give the name of a session, or leave it out for all")
    address = _address(address)
    quiet_grpc()
    from slidingserve.control.v1 import control_pb2 as pb
    from slidingserve.scheduler.v1 import scheduler_pb2

    wanted = scheduler_pb2.Mode.Value(f"MODE_{mode.upper()}")
    request = pb.SetModeRequest(mode=wanted, session=session or "")
    answer: pb.SetModeResponse = _ask(address, lambda stub: stub.SetMode(request, timeout=ANSWER_SECONDS))
    for entry in answer.sessions:
        old, new = _mode(entry.old_mode), _mode(entry.new_mode)
        typer.echo(f"session {entry.session}: {f'{old} -> {new}' if old != new else f'is {new} already'}")
    if session is None:
        typer.echo(f"{'no session is open; ' if not answer.sessions else ''}sessions that open from now on: {mode}")


def sessions(address: str | None, as_json: bool) -> None:
    """Prints the open sessions, one a row."""
    address = _address(address)
    quiet_grpc()
    from slidingserve.control.v1 import control_pb2 as pb

    request = pb.ListSessionsRequest()
    answer: pb.ListSessionsResponse = _ask(address, lambda stub: stub.ListSessions(request, timeout=ANSWER_SECONDS))
    if as_json:
        typer.echo(json.dumps({"schema": 1, "sessions": [_document(entry) for entry in answer.sessions]}, indent=2))
    elif not answer.sessions:
        typer.echo(f"no session is open at {address}")
    else:
        typer.echo(_text(_table(answer.sessions)))


def shadow(journals: list[Path], policies: list[str], model: str | None, file: Path | None) -> None:
    """Prints what the sessions of journals met and what they would have under other policies."""
    check_writable(file)
    quiet_grpc()
    from evaluation.inprocess import DecisionRefused
    from evaluation.shadow import shadow_report
    from evaluation.shadow_reading import ShadowError
    from evaluation.shadow_screen import render, to_json
    from predictor.files import ModelError
    from sidecar.journal import JournalError
    from sidecar.policies.registry import PolicyParameterError, PolicySpecError, UnknownPolicyError, UnknownProfileError
    from sidecar.warming import PolicyCannotDecide

    try:
        report = shadow_report(journals, policies, model)
    except (
        *(JournalError, ShadowError, ModelError, DecisionRefused, PolicyCannotDecide),
        *(PolicySpecError, PolicyParameterError, UnknownPolicyError, UnknownProfileError),
    ) as error:
        fail(str(error))
    deliver(to_json(report), render(report), file)


def _address(given: str | None) -> str:
    """Returns where to ask: the flag, the variable that `serve` reads too, or its default."""
    from sidecar.config import DEFAULT_SOCKET, check_address

    variable = os.environ.get(LISTEN_VARIABLE, "")
    address, source = (given, "--address") if given is not None else (variable, LISTEN_VARIABLE)
    if not address and given is None:
        return DEFAULT_SOCKET
    try:
        return check_address(address)
    except ValueError as error:
        fail(f"{source} {address!r}: {error}")


def _ask(address: str, call: Callable[[Any], Any]) -> Any:
    """Returns the sidecar's answer; ends the command with one line if there is none."""
    import grpc

    from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub

    with grpc.insecure_channel(address) as channel:
        try:
            return call(ControlServiceStub(channel))
        except grpc.RpcError as error:
            fail(_complaint(address, error.code(), error.details() or ""))


def _complaint(address: str, code: Any, details: str) -> str:
    """Returns what went wrong, with the remedy."""
    import grpc

    if code is grpc.StatusCode.UNAVAILABLE:
        return f"no sidecar listens at {address}; start `slidingserve serve`, or give the address of its --listen"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} has no control service; give the address of --listen, and a sidecar of this release"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the sidecar at {address} did not answer within {ANSWER_SECONDS:g} s; try again, or restart it"
    return details or f"the sidecar at {address} failed ({code.name})"


def _mode(number: int) -> str:
    from slidingserve.scheduler.v1 import scheduler_pb2

    return scheduler_pb2.Mode.Name(number).removeprefix("MODE_").lower()  # type: ignore[arg-type]


def _document(status: pb.SessionStatus) -> dict[str, Any]:
    """Returns a session as JSON values, every field there, numbers as numbers."""
    engine = status.engine
    return {
        "session": status.session,
        "engine": {field.name: getattr(engine, field.name) for field in engine.DESCRIPTOR.fields},
        "policy": status.policy,
        "policy_version": status.policy_version,
        "model_version": status.model_version,
        "mode": _mode(status.mode),
        "open_seconds": round(status.open_seconds, 3),
        "answered_steps": status.answered_steps,
        "last_step": status.last_step,
        "live_requests": status.live_requests,
        "running_requests": status.running_requests,
        "waiting_requests": status.waiting_requests,
        "guarded_rows": status.guarded_rows,
        "decision_paths": dict(sorted(status.decision_paths.items())),
    }


def _table(entries: Any) -> Table:
    """Returns the sessions as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    headings = ("session", "engine", "mode", "policy", "model", "open", "steps", "live", "run", "wait", "cut", "paths")
    numbers = {"open", "steps", "live", "run", "wait", "cut"}
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=True)
    for status in entries:
        engine = status.engine
        cells = (
            status.session,
            " ".join(filter(None, (engine.name, engine.version, engine.instance, engine.model))) or "-",
            _mode(status.mode),
            status.policy_version,
            status.model_version or "-",
            _duration(status.open_seconds),
            f"{status.answered_steps}",
            f"{status.live_requests}",
            f"{status.running_requests}",
            f"{status.waiting_requests}",
            f"{status.guarded_rows}",
            " ".join(f"{path}:{count}" for path, count in sorted(status.decision_paths.items())) or "-",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _text(table: Table) -> str:
    """Returns a table as plain text, as wide as it is: a row that is cut helps nobody."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=1000, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())


def _duration(seconds: float) -> str:
    """Returns seconds as people say them: 12s, 3m05s, 2h07m."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
