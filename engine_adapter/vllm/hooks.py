"""Whether this vLLM has what the adapter holds on to, looked up in its source before anything is built on it."""

from __future__ import annotations

import inspect
import re
from typing import Any

SUPPORTED = ((0, 28), (0, 33))
"""First and last minor version that the adapter is tested with."""

_HOOK = "_mamba_block_aligned_split"
_FLAG = "need_mamba_block_aligned_split"
_METHODS = ("schedule", "update_from_output", "add_request", "shutdown", _HOOK, "_is_blocked_waiting_status")
_ATTRIBUTES = ("running", "waiting", "requests", "policy", "max_num_scheduled_tokens", "max_num_running_reqs", _FLAG)
_REQUEST_ATTRIBUTES = (
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_prompt_tokens",
    "is_prefill_chunk",
    "arrival_time",
    "kv_transfer_params",
    "lora_request",
)


def missing_hooks(scheduler: Any = None, request: Any = None) -> list[str]:
    """Returns what is not where the adapter expects it, each as a phrase; empty: all is there.

    ``scheduler`` and ``request`` are classes to look at instead of vLLM's own.
    """
    if scheduler is None or request is None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request

        scheduler, request = scheduler or Scheduler, request or Request
    missing = [f"Scheduler.{name}()" for name in _METHODS if not callable(getattr(scheduler, name, None))]
    schedule, made = _source(scheduler, "schedule"), _source(scheduler, "__init__")
    calls, guards = schedule.count(f"self.{_HOOK}("), schedule.count(f"if self.{_FLAG}")
    if (calls, guards) != (2, 2):
        missing.append(f"two guarded calls of {_HOOK} in Scheduler.schedule() (found {calls}, {guards} guarded)")
    missing += [f"Scheduler.{name}" for name in _ATTRIBUTES if not re.search(rf"self\.{name}\b", made)]
    of_request = _source(request, "__init__")
    missing += [f"Request.{name}" for name in _REQUEST_ATTRIBUTES if not re.search(rf"self\.{name}\b", of_request)]
    return missing


def is_tested(version: str) -> bool:
    """Says whether the adapter is tested with this version of vLLM."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and SUPPORTED[0] <= (int(found[1]), int(found[2])) <= SUPPORTED[1]


def unsupported_settings(vllm_config: Any) -> list[str]:
    """Returns settings of vLLM's with which the adapter leaves it alone, each as a phrase with the remedy."""
    reasons = []
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        reasons.append("pipeline parallelism is not supported: use tensor parallelism")
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        reasons.append("chunked prefill is off, and plans consist of chunks: --enable-chunked-prefill")
    if vllm_config.model_config.runner_type == "pooling":
        reasons.append("pooling models have no tokens to promise")
    return reasons


def _source(owner: Any, method: str) -> str:
    try:
        return inspect.getsource(getattr(owner, method))
    except (AttributeError, OSError, TypeError):
        return ""
