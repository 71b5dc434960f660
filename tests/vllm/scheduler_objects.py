"""vLLM's own scheduler objects without an engine: a model that is only a configuration, a runner that only counts.

What is vLLM's here is its configuration, its scheduler, its KV cache manager and its requests; the model runner and the
two loops of the engine core (`EngineCore.step`, `step_with_batch_queue`) are stood in for. So a scheduler can be driven
through thousands of iterations in seconds, and everything that it hands to the runner is checked on the way
(`counting_runner`; what has to hold between two iterations and at the end: `engine_checks`).

Works with vLLM 0.28 to 0.33.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tests.vllm.counting_runner import VOCABULARY, CountingRunner, token_at

BLOCK_TOKENS = 16
MODEL_TOKENS = 4096

SchedulerFactory: TypeAlias = Callable[..., Any]
"""Takes the keyword arguments that `EngineCore` gives a scheduler class; returns a scheduler."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a scheduler is configured with; tokens, requests, KV blocks.

    Attributes:
        asynchronous: whether the next batch is made while one runs (vLLM's default on GPUs).
        blocks: KV blocks of 16 tokens; vLLM keeps one of them for itself.
        max_tokens: most tokens in an iteration.
        max_sequences: most running requests.
        prefix_caching: whether prompts that begin alike share KV blocks.
        policy: "fcfs" or "priority".
        reserve_full_prompt: whether a prompt is only admitted when all of it fits (`scheduler_reserve_full_isl`).
        watermark: share of the blocks that admissions leave free.
        log_stats: whether vLLM records events and statistics.
        additional_config: what `--additional-config` brings.
    """

    asynchronous: bool = False
    blocks: int = 1000
    max_tokens: int = 256
    max_sequences: int = 16
    prefix_caching: bool = True
    policy: str = "fcfs"
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    log_stats: bool = False
    additional_config: Mapping[str, Any] = field(default_factory=dict)


@cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that holds the configuration of a small Qwen2 and nothing else; lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-model-")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MODEL_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    return folder


@cache
def _model_config() -> Any:
    return ModelConfig(
        model=_model_folder().name,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MODEL_TOKENS,
        seed=0,
    )


def make_config(setup: Setup) -> Any:
    """Returns a `VllmConfig` for the CPU."""
    scheduler = SchedulerConfig(
        max_num_seqs=setup.max_sequences,
        max_num_batched_tokens=setup.max_tokens,
        max_model_len=MODEL_TOKENS,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=setup.policy,
        scheduler_reserve_full_isl=setup.reserve_full_prompt,
        watermark=setup.watermark,
    )
    memory = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=setup.prefix_caching)
    config = VllmConfig(
        model_config=_model_config(),
        scheduler_config=scheduler,
        cache_config=memory,
        device_config=DeviceConfig("cpu"),
        additional_config=dict(setup.additional_config),
    )
    # vLLM switches it off on the CPU, where the workers could not make use of it.
    config.scheduler_config.async_scheduling = setup.asynchronous
    memory.num_gpu_blocks = setup.blocks
    return config


def make_scheduler(setup: Setup, build: SchedulerFactory | None = None) -> Any:
    """Returns a scheduler made as `EngineCore` does, by ``build`` or as vLLM's own class for the setup."""
    config = make_config(setup)
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(
        num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )
    init_none_hash(sha256)
    build = build or (AsyncScheduler if setup.asynchronous else Scheduler)
    return build(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=setup.log_stats,
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def make_request(
    request_id: str,
    prompt_tokens: int,
    max_tokens: int = 16,
    *,
    shared_tokens: int = 0,
    extra_args: dict[str, Any] | None = None,
    priority: int = 0,
    arrival_seconds: float | None = None,
    structured: bool = False,
) -> Any:
    """Returns a request as the engine core hands it to `add_request`.

    Args:
        request_id: its id; the tokens of prompt and output depend on nothing else.
        prompt_tokens: length of the prompt.
        max_tokens: tokens that it generates; nothing else ends it but the model's longest text.
        shared_tokens: how much of the prompt is the same in all requests.
        extra_args: what the body's `vllm_xargs` brings.
        priority: smaller is more urgent.
        arrival_seconds: on the clock of `time.time()`; None: now.
        structured: whether it waits for its grammar first; see `grammar_ready`.
    """
    shared = min(shared_tokens, prompt_tokens)
    prompt = [token_at("", position) for position in range(shared)]
    prompt += [token_at(request_id, position) for position in range(shared, prompt_tokens)]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=extra_args,
        structured_outputs=StructuredOutputsParams(regex="a*") if structured else None,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=arrival_seconds,
        priority=priority,
        block_hasher=_block_hasher(),
    )


@cache
def _block_hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


@StructuredOutputGrammar.register
class AnyText:
    """A grammar that accepts everything."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False


def grammar_ready(request: Any) -> None:
    """Gives a structured request its grammar, as the thread that compiles it does when it is done."""
    request.structured_output_request.grammar = AnyText()


class EngineLoop:
    """The engine core's loop around a scheduler; two batches at a time where scheduling is asynchronous.

    Args:
        scheduler: the scheduler.
        asynchronous: whether it is asynchronous.
        before_step: called at the start of each turn, to let time pass.

    Attributes:
        runner: the runner.
        requests: every request that was added, by id.
        outputs: the tokens that clients got, by request id.
        finished: ids of the requests that came to their end.
        aborted: ids of the aborted ones.
        batches: the tokens of every batch, by request id, in order; empty batches included.
        preemptions: how many requests were preempted.
    """

    def __init__(
        self, scheduler: Any, *, asynchronous: bool = False, before_step: Callable[[], object] = lambda: None
    ) -> None:
        self.scheduler = scheduler
        self.runner = CountingRunner()
        self.requests: dict[str, Any] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.aborted: set[str] = set()
        self.batches: list[dict[str, int]] = []
        self.preemptions = 0
        self._depth = 2 if asynchronous else 1
        self._before_step = before_step
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._aborts: list[str] = []

    @property
    def in_flight(self) -> int:
        """Batches that were launched and whose output the scheduler has not seen yet."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether the engine core would go on."""
        return bool(self._in_flight) or bool(self.scheduler.has_requests())

    def add(self, *requests: Any) -> None:
        """Hands requests to the scheduler."""
        for request in requests:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.scheduler.add_request(request)

    def abort(self, *request_ids: str) -> None:
        """Aborts requests now, as the engine core does between two iterations."""
        for request_id in request_ids:
            if request_id not in self.finished:
                self.aborted.add(request_id)
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def abort_while_running(self, *request_ids: str) -> None:
        """Aborts requests once the batch that runs is done, before its output is looked at."""
        self._aborts.extend(request_ids)

    def step(self) -> dict[str, int]:
        """One turn of the engine core's loop; returns the batch that was made: tokens by request id."""
        self._before_step()
        batch: dict[str, int] = {}
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            batch = dict(output.num_scheduled_tokens)
            self.batches.append(batch)
            self.preemptions += len(output.preempted_req_ids or ())
            self._in_flight.append((output, self.runner.execute(output)))
            if len(self._in_flight) < self._depth and (batch or self.scheduler.has_requests()):
                return batch
        if self._in_flight:
            self._finish_oldest()
        return batch

    def run(self, most_steps: int = 20_000) -> Iterator[dict[str, int]]:
        """Goes on until there is nothing left to do, yielding each batch; fails after ``most_steps``."""
        for _ in range(most_steps):
            if not self.has_work:
                return
            yield self.step()
        left = {name: request.status for name, request in self.scheduler.requests.items()}
        raise AssertionError(f"not done after {most_steps} steps; left: {left}")

    def run_out(self, most_steps: int = 20_000) -> None:
        """Goes on until there is nothing left to do; fails after ``most_steps``."""
        for _ in self.run(most_steps):
            pass

    def _finish_oldest(self) -> None:
        output, result = self._in_flight.popleft()
        self.abort(*self._aborts)
        self._aborts.clear()
        for of_client in self.scheduler.update_from_output(output, result).values():
            for of_request in of_client.outputs:
                self.outputs[of_request.request_id].extend(of_request.new_token_ids)
                if of_request.finish_reason is not None:
                    self.finished.add(of_request.request_id)


def vllm_version() -> str:
    """Returns the version of the vLLM that runs here, as "0.32.0"."""
    return str(vllm.__version__).split("+")[0]
