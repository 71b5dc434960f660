"""A real engine to try policies on: one vLLM with a tiny model and the adapter, and a sidecar that changes.

During the warm-up the sidecar records what iterations hold and how long they take, which gives this machine's latency
model. Then it is switched ``off``, so that vLLM decides by itself, or on with a policy.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import grpc

from evaluation.engines.demo_load import CHUNK_TOKENS, slo_headers, warm_up_workload
from evaluation.engines.http_load import RequestRecord, random_prompts, send_load
from evaluation.engines.measured_iterations import fit_measured_model, measured_iterations
from evaluation.engines.tiny_model import FIRST_WORD_TOKEN, NAME, VOCABULARY
from evaluation.engines.vllm_process import VllmInstallation, VllmServer, allowed_cpus, vllm_environment
from evaluation.sidecar_process import SidecarProcess
from evaluation.workloads import Workload
from predictor.files import write_model
from predictor.model import LatencyModel
from slidingserve.control.v1 import control_pb2
from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub

OWN_POLICY = "vLLM's own"
PROFILE = "this-machine"
MOST_RANKS = 2
"""The tiny model has two KV heads."""

# A sidecar listens once its policy is compiled: seconds from the cache, a minute without it on a busy machine.
_CONNECT_SECONDS = 240.0
_LIMIT_SECONDS = 180.0
# Ten times what is usual: engine, sidecar and load share the cores of one machine, and may have to wait for each other.
_DEADLINE_MS = 30
_WARM_UP_REQUESTS, _WARM_UP_RATE = 40, 4.0
_SMALL_CHUNKS = "vllm:max_tokens=192"
_SERVER = (
    *("--served-model-name", NAME, "--load-format", "dummy", "--enforce-eager"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "64"),
    "--no-enable-prefix-caching",  # every policy gets the same prompts
    *("--scheduler-cls", "engine_adapter.vllm.build_scheduler"),
    *("--middleware", "engine_adapter.vllm.middleware.SLOHeaders"),
)

Tell: TypeAlias = Callable[[str], None]
"""Told in a line what happens next."""


class StageFailed(RuntimeError):
    """The engine and its sidecar did not come together, or what they ran gave no result; says why."""


class Stage:
    """The server, and the sidecar of the moment.

    Args:
        folder: for model, sockets and journals.
        installation: which vLLM.
        tell: told in a line what happens next.
        tensor_parallel: ranks; None: two on CPUs, where there are as many, and one on GPUs.

    Raises:
        StageFailed: there are fewer CPUs than ranks.

    Attributes:
        model_file: latency model of this engine, once it has been warmed up.
        tensor_parallel: ranks.
        measured: iterations that the latency model was fitted to.
    """

    def __init__(
        self, folder: Path, installation: VllmInstallation, tell: Tell, tensor_parallel: int | None = None
    ) -> None:
        self._folder, self._installation, self.tell = folder, installation, tell
        self._address = f"unix:{folder}/scheduler.sock"
        self.model_file = folder / "model.json"
        cpus = len(allowed_cpus())
        usual = 2 if installation.on_cpu and cpus > 1 else 1
        self.tensor_parallel = usual if tensor_parallel is None else tensor_parallel
        if installation.on_cpu and self.tensor_parallel > cpus:
            raise StageFailed(f"{self.tensor_parallel} ranks on {cpus} CPUs; give one: each takes a CPU of its own")
        self.measured = 0
        self._sidecars = 0

    @property
    def url(self) -> str:
        """Of the server."""
        return self._server.url

    @property
    def model(self) -> Path:
        """Folder of the model."""
        return self._folder / "model"

    def start(self, stack: ExitStack) -> None:
        """Makes the model and starts the server, whose adapter looks for a sidecar from then on."""
        model = self.model
        model.mkdir()
        self._make_model(model)
        settings = {"target": self._address, "mode": "active", "deadline_ms": _DEADLINE_MS, "report_seconds": 10}
        on_cpu = self._installation.on_cpu
        # A CPU without instructions for bfloat16 takes ten times as long with it.
        dtype = "float32" if on_cpu else "bfloat16"
        ranks = "1 rank" if self.tensor_parallel == 1 else f"{self.tensor_parallel} ranks"
        where = f"{ranks} on {'CPUs' if on_cpu else 'GPUs'}"
        self.tell(f"starting vLLM {self._installation.version} with a tiny random model on {where}, usually 20 to 60 s")
        self._server = stack.enter_context(
            VllmServer(
                model,
                (*_SERVER, "--dtype", dtype, "--additional-config", json.dumps({"slidingserve": settings})),
                tensor_parallel=self.tensor_parallel,
                installation=self._installation,
            )
        )

    def _make_model(self, folder: Path) -> None:
        """Makes the model in vLLM's Python, which has the package that it takes."""
        made = subprocess.run(  # noqa: S603
            [self._installation.python, "-P", "-m", "evaluation.engines.tiny_model", str(folder)],
            capture_output=True,
            text=True,
            env=vllm_environment(self._installation, self._folder),
        )
        if made.returncode:
            raise StageFailed(
                f"the tiny model could not be made in {self._installation.python}:\n{made.stderr.strip()}"
            )

    def warm_up(self, seed: int) -> LatencyModel:
        """Serves requests of all sizes, in small chunks and in large ones; returns the latency model of the engine."""
        self.tell("warming up: kernels are compiled on first use, and iterations are measured; about 40 s")
        journals = []
        for number, policy in enumerate((_SMALL_CHUNKS, "vllm")):
            workload = warm_up_workload(_WARM_UP_REQUESTS, _WARM_UP_RATE, seed + number)
            with self.sidecar("--policy", policy) as journal_folder:
                self.send(workload, seed + number)
            journals += sorted(journal_folder.glob("*.journal"))
        measured = measured_iterations(journals)
        self.measured = len(measured)
        said = f"The demonstration's tiny model on vLLM {self._installation.version}."
        return write_model(fit_measured_model(measured, PROFILE, said), self.model_file)

    def send(self, workload: Workload, seed: int) -> list[RequestRecord]:
        """Sends a workload with its SLOs as headers and waits for all; raises `VllmFailed` if the server has ended."""
        prompts = random_prompts(workload, FIRST_WORD_TOKEN, VOCABULARY, seed)
        limit = float(workload.arrival_seconds[-1]) + _LIMIT_SECONDS
        records = send_load(self._server.url, NAME, workload, prompts, slo_headers(workload), limit_seconds=limit)
        self._server.check()
        return records

    @contextmanager
    def sidecar(self, *arguments: str) -> Iterator[Path]:
        """Runs a sidecar that the engine has connected to; yields its folder of journals."""
        self._sidecars += 1
        journals = self._folder / f"journals-{self._sidecars}"
        with SidecarProcess((*arguments, "--journal-dir", str(journals)), self._address) as sidecar:
            self._wait_for_engine(sidecar)
            yield journals
            sidecar.check()

    def _wait_for_engine(self, sidecar: SidecarProcess) -> None:
        """Waits until the engine has opened a session; it tries again every few seconds at most."""
        end = time.monotonic() + _CONNECT_SECONDS
        with grpc.insecure_channel(self._address) as channel:
            control = ControlServiceStub(channel)
            while True:
                sidecar.check()
                self._server.check()
                try:
                    if control.ListSessions(control_pb2.ListSessionsRequest(), timeout=2.0).sessions:
                        return
                except grpc.RpcError:
                    pass  # it is not listening yet
                if time.monotonic() > end:
                    raise StageFailed(
                        f"vLLM did not connect to the sidecar within {_CONNECT_SECONDS:g} s; the sidecar said:\n"
                        f"{sidecar.log.strip()}\nvLLM said:\n{self._server.last_words}"
                    )
                time.sleep(0.1)
