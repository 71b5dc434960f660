"""Goodput by vLLM's own client: ``python -m evaluation.engines.goodput`` runs ``vllm bench serve`` again and again.

One server (the demonstration's: tiny model, CPU ranks, adapter) meets the same requests at several rates, by turns with
vLLM's own policy (the sidecar is switched off) and with the sidecar's. Runs of one rate and number are pairs: same
prompts, same arrivals. SLOs are the same for all requests, for ``--goodput`` knows no others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.engines.demo_load import CHUNK_TOKENS, demo_rate, seconds_of
from evaluation.engines.intervals import mean_interval
from evaluation.engines.stage import OWN_POLICY, Stage
from evaluation.engines.tiny_model import NAME, random_texts
from evaluation.engines.vllm_process import VllmInstallation, find_vllm, vllm_environment
from predictor.model import LatencyModel

REQUESTS = 100
RATE_STEPS = (0.8, 1.0, 1.25)
"""Multiples of the demonstration's rate."""
_DOCUMENT_SHARE = 0.1
_CHAT_PROMPT, _CHAT_OUTPUT = (20, 150), (20, 60)
_DOCUMENT_PROMPT, _DOCUMENT_OUTPUT = (2500, 3600), (8, 20)
_RUN_SECONDS = 600


@dataclass(frozen=True, slots=True)
class GoodputSlos:
    """SLOs of all requests, milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class GoodputRun:
    """One run of ``vllm bench serve``.

    Attributes:
        policy: the sidecar's, or `OWN_POLICY`.
        rate: requests/s.
        number: runs of one rate and number are a pair.
        goodput: requests/s that met both SLOs, as vLLM's client counts.
        attained: share of the requests that did.
    """

    policy: str
    rate: float
    number: int
    goodput: float
    attained: float


def goodput_slos(model: LatencyModel) -> GoodputSlos:
    """Returns SLOs in proportion to what iterations take here: six full chunks, then a third of one per token."""
    full, decodes = seconds_of(model, CHUNK_TOKENS, 0), seconds_of(model, 0, 0)
    return GoodputSlos(round(1e3 * (0.05 + 6 * full), 1), round(1e3 * max(full / 3, 2.0 * decodes), 1))


def write_prompts(model: Path, folder: Path, requests: int, seed: int) -> Path:
    """Writes a data set of vLLM's ``custom`` form: chats, and one in ten a document."""
    draw = np.random.default_rng([seed, 3])
    is_document = draw.random(requests) < _DOCUMENT_SHARE
    prompts = np.where(is_document, draw.integers(*_DOCUMENT_PROMPT, requests), draw.integers(*_CHAT_PROMPT, requests))
    outputs = np.where(is_document, draw.integers(*_DOCUMENT_OUTPUT, requests), draw.integers(*_CHAT_OUTPUT, requests))
    path = folder / f"prompts-{seed}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for text, tokens in zip(random_texts(model, prompts.tolist(), seed), outputs.tolist(), strict=True):
            file.write(json.dumps({"prompt": text, "output_tokens": tokens}) + "\n")
    return path


def run_client(
    installation: VllmInstallation,
    url: str,
    model: Path,
    prompts: Path,
    rate: float,
    requests: int,
    seed: int,
    slos: GoodputSlos,
    folder: Path,
) -> dict[str, Any]:
    """Returns what ``vllm bench serve`` has written. Raises RuntimeError with its last words if it fails."""
    command = [
        *(installation.python, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"),
        *("--base-url", url, "--endpoint", "/v1/completions", "--model", NAME, "--tokenizer", str(model)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--num-prompts", str(requests), "--request-rate", f"{rate:g}", "--seed", str(seed)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "bench.json"),
        *("--goodput", f"ttft:{slos.ttft_ms}", f"tpot:{slos.tpot_ms}"),
    ]
    done = subprocess.run(  # noqa: S603
        command,
        env=vllm_environment(installation, folder),
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vllm bench serve ended with status {done.returncode}: {done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    return document


def compare(
    *, policy: str, rates: Sequence[float] | None, runs: int, requests: int, seed: int, slos: GoodputSlos | None = None
) -> tuple[GoodputSlos, list[GoodputRun]]:
    """Runs all pairs, own policy and ``policy`` by turns; a run takes requests / rate seconds and ten more."""
    installation = find_vllm()
    results: list[GoodputRun] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slidingserve-goodput-")))
        stage = Stage(folder, installation, _tell)
        stage.start(stack)
        model = stage.warm_up(seed)
        slos = slos or goodput_slos(model)
        rates = rates or [float(f"{step * demo_rate(model):.2g}") for step in RATE_STEPS]
        defaults = (
            *("--default-ttft-seconds", str(slos.ttft_ms / 1e3), "--default-tbt-seconds", str(slos.tpot_ms / 1e3)),
        )
        arms = {
            OWN_POLICY: ("--mode", "off"),
            policy: ("--policy", policy, "--profile", str(stage.model_file), *defaults),
        }
        for number in range(runs):
            prompts = write_prompts(stage.model, folder, requests, seed + number)
            for rate in rates:
                for name in arms if number % 2 == 0 else reversed(arms):
                    with stage.sidecar(*arms[name]):
                        document = run_client(
                            installation, stage.url, stage.model, prompts, rate, requests, seed + number, slos, folder
                        )
                    goodput = float(document["request_goodput"])
                    attained = goodput * float(document["duration"]) / requests
                    results.append(GoodputRun(name, rate, number, goodput, attained))
                    _tell(f"{name}, {rate:g} requests/s, run {number + 1}: {100 * attained:.1f} % met both SLOs")
    return slos, results


def table(slos: GoodputSlos, results: Sequence[GoodputRun], policy: str) -> list[str]:
    """Returns a line for each rate: what both attained, and the gain with a 95 % bootstrap interval over the pairs."""
    lines = [f"ttft {slos.ttft_ms:g} ms, tpot {slos.tpot_ms:g} ms; share of requests that met both, and goodput"]
    draw = np.random.default_rng(0)
    for rate in sorted({result.rate for result in results}):
        arms = {
            name: sorted((r for r in results if r.rate == rate and r.policy == name), key=lambda r: r.number)
            for name in (OWN_POLICY, policy)
        }
        own, ours = (np.array([100 * r.attained for r in arms[name]]) for name in (OWN_POLICY, policy))
        goodputs = [np.mean([r.goodput for r in arms[name]]) for name in (OWN_POLICY, policy)]
        gain = ours - own
        low, high = mean_interval(gain, draw)
        lines.append(
            f"{rate:6.2f} requests/s, {len(gain)} pairs: {OWN_POLICY} {own.mean():.1f} % ({goodputs[0]:.2f}/s), "
            f"{policy} {ours.mean():.1f} % ({goodputs[1]:.2f}/s), gain {gain.mean():+.1f} points "
            f"(95 % interval {low:+.1f} to {high:+.1f})"
        )
    return lines


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.engines.goodput", description=__doc__)
    parser.add_argument("--policy", default="slidingserve", help="the sidecar's policy")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s; default: 0.8, 1 and 1.25 of the demo's")
    parser.add_argument("--runs", type=int, default=5, help="pairs at each rate")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of each run")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--ttft-ms", type=float, help="SLO of all requests; default: by the engine's latency model")
    parser.add_argument("--tpot-ms", type=float, help="the same, after the first token; give both or none")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    options = parser.parse_args(arguments)
    if (options.ttft_ms is None) != (options.tpot_ms is None):
        parser.error("give both --ttft-ms and --tpot-ms, or none")
    slos, results = compare(
        policy=options.policy,
        rates=options.rates,
        runs=options.runs,
        requests=options.requests,
        seed=options.seed,
        slos=None if options.ttft_ms is None else GoodputSlos(options.ttft_ms, options.tpot_ms),
    )
    if options.json:
        document = {"slos": asdict(slos), "runs": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(slos, results, options.policy)))  # noqa: T201 - its purpose


if __name__ == "__main__":
    main()
