"""A sidecar of one's own: a process on a Unix socket in a temporary folder, for simulations, benchmarks and tests.

It gets nothing from the user's settings: neither ``SLIDINGSERVE_*`` variables nor the file that one of them may name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class SidecarFailed(RuntimeError):
    """The sidecar process did not come up; holds what it said."""


class SidecarProcess:
    """`slidingserve serve` as a child process; use as a context manager.

    Args:
        arguments: further arguments for ``serve``, such as ``("--policy", "vllm")``.
        address: where it is to listen; empty: a Unix socket in a temporary folder.

    Attributes:
        address: where it listens.
        process: the child, to be stopped, killed or slowed by tests.
    """

    def __init__(self, arguments: Sequence[str] = (), address: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slidingserve-")
        self.address = address or f"unix:{self._folder.name}/scheduler.sock"
        self._arguments = tuple(arguments)
        self._log = Path(self._folder.name) / "sidecar.log"
        self.process = self._start()

    def __enter__(self) -> SidecarProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def check(self) -> None:
        """Raises `SidecarFailed` if the process has ended."""
        if self.process.poll() is not None:
            said = self.log.strip() or "nothing"
            raise SidecarFailed(f"the sidecar ended with status {self.process.returncode}; it said: {said}")

    def await_session(self, seconds: float) -> None:
        """Waits until an engine has opened a session. Raises `SidecarFailed` if none has within ``seconds``."""
        end = time.monotonic() + seconds
        while "session opened" not in self.log:
            self.check()
            if time.monotonic() > end:
                raise SidecarFailed(f"no engine opened a session within {seconds:g} s; it said: {self.log.strip()}")
            time.sleep(0.05)

    def restart(self) -> None:
        """Starts it again at the same address, after it was killed."""
        self.process.wait()
        self.process = self._start()

    def close(self) -> None:
        """Ends the process, politely first, and removes the folder."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the current folder may hold anything of the same name; the child finds what this process finds.
        command = [sys.executable, "-P", "-m", "sidecar", "serve", "--listen", self.address, "--drain-seconds", "1"]
        # What the user has set is meant for another sidecar.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SLIDINGSERVE_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with self._log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [*command, *self._arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
