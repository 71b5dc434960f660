"""Runs vLLM offline on two ranks, in a process of its own: ``python -m tests.vllm.offline_engine SPEC.json OUT.json``.

The spec: ``model`` (folder), ``scheduler`` (dotted path; empty: vLLM's own), ``target`` (the sidecar's address),
``prompts`` (token ids), ``max_tokens``, ``phases``: for each the arguments of the sidecar that decides, or null for
none. The answer: for each phase the tokens of each prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SESSION_SECONDS = 120.0


def main(spec: dict[str, Any]) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams

    adapter = {"slidingserve": {"target": spec["target"], "deadline_ms": 2000.0}}
    llm = LLM(
        model=spec["model"],
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=2,
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        scheduler_cls=spec["scheduler"] or None,
        additional_config=adapter if spec["scheduler"] else {},
        seed=0,
    )
    sampling = SamplingParams(max_tokens=spec["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]
    results = []
    for arguments in spec["phases"]:
        with _sidecar(arguments, spec["target"]):
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        results.append([list(output.outputs[0].token_ids) for output in outputs])
    return results


@contextmanager
def _sidecar(arguments: list[str] | None, target: str) -> Iterator[None]:
    """Runs a sidecar at the address that the engine knows, and waits until the engine has found it."""
    if arguments is None:
        yield
        return
    from evaluation.sidecar_process import SidecarProcess

    with SidecarProcess(arguments, target) as sidecar:
        sidecar.await_session(SESSION_SECONDS)
        yield


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
