"""What the adapter and its sidecar add to the iterations of a real vLLM: ``python -m evaluation.engines.overhead``.

One engine (two CPU ranks, random weights) generates the same tokens again and again, by turns with the sidecar switched
off and active under policy ``vllm``, whose batches are those of vLLM itself. So a pair of runs differs by what it costs
to ask and to obey, and both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.engines.intervals import mean_interval
from evaluation.engines.tiny_model import make_tiny_model
from evaluation.engines.vllm_process import cpu_variables, find_vllm, vllm_environment
from evaluation.sidecar_process import SidecarProcess

TOKENS_PER_REQUEST = 60
PROMPT_TOKENS = 24
_SESSION_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """Paired runs; an iteration is a token of each request.

    Attributes:
        off_ms, active_ms: mean iteration of each run, milliseconds.
    """

    off_ms: tuple[float, ...]
    active_ms: tuple[float, ...]

    def lines(self) -> list[str]:
        """Returns the figures as text: medians, the median difference, and the mean ratio with a bootstrap interval."""
        off, active = np.array(self.off_ms), np.array(self.active_ms)
        ratios = 100.0 * (active / off - 1.0)
        low, high = mean_interval(ratios, np.random.default_rng(0))
        return [
            f"{len(off)} pairs: iteration off {np.median(off):.3f} ms, active {np.median(active):.3f} ms (medians)",
            f"added: {np.median(active - off):.3f} ms (median of pairs)",
            f"added: {ratios.mean():.2f} % (mean of pairs; 95 % interval {low:.2f} to {high:.2f} %)",
        ]


def measure(*, pairs: int, requests: int, asynchronous: bool, prefetch: str, policy: str) -> Overhead:
    """Runs the engine in a process of its own; takes about half a minute and two seconds for each pair."""
    with tempfile.TemporaryDirectory(prefix="slidingserve-overhead-") as name:
        folder = Path(name)
        make_tiny_model(folder)
        question = {
            "folder": name,
            "pairs": pairs,
            "requests": requests,
            "prefetch": prefetch,
            "policy": policy,
            "scheduler": "evaluation.engines.async_on_cpu.build_scheduler"
            if asynchronous
            else "engine_adapter.vllm.build_scheduler",
        }
        variables = {
            **vllm_environment(find_vllm(), folder),
            **cpu_variables(2),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        }
        command = [find_vllm().python, "-m", "evaluation.engines.overhead", "--inside", json.dumps(question)]
        subprocess.run(command, check=True, env=variables, stdout=sys.stderr)  # noqa: S603
        document = json.loads((folder / "overhead.json").read_text(encoding="utf-8"))
        return Overhead(tuple(document["off_ms"]), tuple(document["active_ms"]))


def _inside(question: dict[str, Any]) -> None:
    """The process that holds the engine."""
    from vllm import LLM, SamplingParams

    folder = Path(question["folder"])
    target = f"unix:{folder}/s.sock"
    settings = {"target": target, "prefetch": question["prefetch"]}
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=2,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        scheduler_cls=question["scheduler"],
        additional_config={"slidingserve": settings},
    )
    draw = np.random.default_rng(0)
    prompts: Any = [
        {"prompt_token_ids": draw.integers(2, 4000, PROMPT_TOKENS).tolist()} for _ in range(question["requests"])
    ]
    sampling = SamplingParams(max_tokens=TOKENS_PER_REQUEST, temperature=0.0, ignore_eos=True, detokenize=False)

    def iteration_ms() -> float:
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return 1e3 * (time.perf_counter() - started) / TOKENS_PER_REQUEST

    times: dict[str, list[float]] = {"off": [], "active": []}
    with SidecarProcess(("--policy", question["policy"], "--profile", "rtx3090-tp2"), target) as sidecar:
        sidecar.await_session(_SESSION_SECONDS)
        for mode in ("active", "off", "active"):
            _switch(target, mode)
            iteration_ms()
        for pair in range(question["pairs"]):
            for mode in ("off", "active") if pair % 2 else ("active", "off"):
                _switch(target, mode)
                times[mode].append(iteration_ms())
    document = asdict(Overhead(tuple(times["off"]), tuple(times["active"])))
    (folder / "overhead.json").write_text(json.dumps(document), encoding="utf-8")


def _switch(target: str, mode: str) -> None:
    import grpc

    from slidingserve.control.v1 import control_pb2
    from slidingserve.control.v1.control_pb2_grpc import ControlServiceStub
    from slidingserve.scheduler.v1 import scheduler_pb2

    with grpc.insecure_channel(target) as channel:
        wanted = control_pb2.SetModeRequest(mode=scheduler_pb2.Mode.Value(f"MODE_{mode.upper()}"))
        ControlServiceStub(channel).SetMode(wanted, timeout=5.0)
    if mode == "active":
        time.sleep(1.1)  # an adapter that is off asks once a second whether it still is


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.engines.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of runs")
    parser.add_argument("--requests", type=int, default=16, help="requests that decode together")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="with async scheduling, as on GPUs")
    parser.add_argument("--prefetch", default="auto", choices=("auto", "true", "false"), help="ask ahead")
    parser.add_argument("--policy", default="vllm", help="the sidecar's policy")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _inside(json.loads(options.inside))
        return
    result = measure(
        pairs=options.pairs,
        requests=options.requests,
        asynchronous=options.asynchronous,
        prefetch=options.prefetch,
        policy=options.policy,
    )
    print("\n".join(result.lines()))  # noqa: T201 - its purpose


if __name__ == "__main__":
    main()
