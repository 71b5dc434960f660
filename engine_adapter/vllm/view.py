"""What the adapter reads of a vLLM scheduler. Every name of vLLM's that is read, and not obeyed, is read here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from slidingserve.contract.values import EngineInfo, EngineLimits, PauseState

_PAUSE_STATES = {"PAUSED_NEW": PauseState.PAUSED_NEW, "PAUSED_ALL": PauseState.PAUSED_ALL}


class SchedulerView:
    """A read-only look at a scheduler of vLLM 0.28 to 0.33, sync or async.

    Attributes:
        is_async: iterations are scheduled while others run.
        speculative_tokens: draft tokens that each decode carries.
        holds_back: whether a waiting request that could run may cease to (all LoRA slots are taken).
    """

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self._scheduler = scheduler
        self.is_async = is_async
        # A block of tokens costs one block in each group of layers (hybrid models have several).
        self._groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
        self._block_pool = scheduler.kv_cache_manager.block_pool
        self._caches_prefixes = bool(scheduler.cache_config.enable_prefix_caching)
        self._delays_removal = scheduler.connector is not None
        lora = scheduler.lora_config
        self._most_loras = lora.max_loras if lora is not None else 0
        self.holds_back = self._most_loras > 0
        # Until 0.30 requests that were skipped stand in a queue of their own; later ones keep requests that hold KV
        # blocks while they wait in one.
        self._side_queue = "skipped_waiting" if hasattr(scheduler, "skipped_waiting") else "kv_holding_waiting"
        self.speculative_tokens = int(getattr(scheduler, "num_spec_tokens", 0) or 0)

    @property
    def running(self) -> list[Any]:
        """Requests that hold KV blocks, in the engine's order."""
        running: list[Any] = self._scheduler.running
        return running

    @property
    def requests(self) -> dict[str, Any]:
        """All requests by id."""
        requests: dict[str, Any] = self._scheduler.requests
        return requests

    @property
    def free_blocks(self) -> int:
        """KV blocks that are free, or cached and free to be used again."""
        return int(self._block_pool.get_num_free_blocks()) // self._groups

    @property
    def pause_state(self) -> PauseState:
        """Whether the engine takes work."""
        return _PAUSE_STATES.get(self._scheduler._pause_state.name, PauseState.RUNNING)

    def waiting(self) -> Iterator[Any]:
        """Requests that wait, in the engine's order. Linear (n log n under vLLM's priority policy)."""
        return chain(getattr(self._scheduler, self._side_queue), self._scheduler.waiting)

    def finished(self, candidates: dict[str, Any]) -> list[str]:
        """Returns the ids among ``candidates`` whose requests are gone. Linear in them."""
        requests = self._scheduler.requests
        gone = list(candidates.keys() - requests.keys())
        if self._delays_removal:  # a connector that still sends blocks keeps the request
            gone += [name for name in candidates if name in requests and requests[name].is_finished()]
        return gone

    def is_foreign(self, request: Any) -> bool:
        """Says whether the sidecar is not told of this request, because the contract cannot describe what it does.

        Streaming sessions grow their prompts; requests whose KV comes from elsewhere load it when vLLM sees them.
        """
        return bool(getattr(request, "resumable", False) or request.kv_transfer_params)

    def is_held(self, request: Any) -> bool:
        """Says whether vLLM would not run this waiting request whatever the plan: its grammar or LoRA is not there."""
        return bool(self._scheduler._is_blocked_waiting_status(request.status)) or (
            self._most_loras > 0 and self._lacks_lora(request)
        )

    def waits(self, request: Any) -> bool:
        """Says whether the request stands in a queue that a plan hides."""
        if request.status.name.startswith(("RUNNING", "FINISHED")):
            return False
        return self._side_queue == "skipped_waiting" or request.num_computed_tokens == 0

    def cached_prefix_tokens(self, request: Any) -> int:
        """Returns the leading tokens that vLLM would find in its prefix cache now. Linear in the hit's blocks."""
        if not self._caches_prefixes or self._delays_removal:
            return 0
        hit = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        return max(0, min(int(hit[1]), int(request.num_prompt_tokens) - 1))

    def limits(self) -> EngineLimits:
        """Returns what an iteration may hold."""
        scheduler = self._scheduler
        blocks = int(scheduler.cache_config.num_gpu_blocks) - 1  # one is vLLM's null block
        return EngineLimits(
            max_tokens_per_iteration=int(scheduler.max_num_scheduled_tokens),
            max_sequences=int(scheduler.max_num_running_reqs),
            kv_blocks=max(1, blocks // self._groups),
            kv_block_tokens=int(scheduler.block_size),
            max_model_tokens=int(scheduler.max_model_len),
        )

    def engine_info(self, instance: str) -> EngineInfo:
        """Describes the engine for traces and journals."""
        import vllm

        config = self._scheduler.vllm_config
        parallel = config.parallel_config
        return EngineInfo(
            name="vllm",
            version=str(vllm.__version__),
            instance=instance,
            model=str(config.model_config.served_model_name or config.model_config.model),
            tensor_parallel=int(parallel.tensor_parallel_size),
            pipeline_parallel=int(parallel.pipeline_parallel_size),
            data_parallel_rank=int(getattr(parallel, "data_parallel_rank", 0) or 0),
        )

    def _lacks_lora(self, request: Any) -> bool:
        if request.lora_request is None:
            return False
        loaded = {r.lora_request.lora_int_id for r in self._scheduler.running if r.lora_request is not None}
        return len(loaded) >= self._most_loras and request.lora_request.lora_int_id not in loaded
