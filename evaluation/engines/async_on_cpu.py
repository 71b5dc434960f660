"""The adapter with async scheduling on a CPU, where vLLM turns that off: to measure and test what GPUs do by default.

vLLM's engine core asks how many batches may be in flight only after the scheduler is made, and the workers take batches
in order, so the outputs are right. For measurements and tests; on a CPU nothing is gained by it.
"""

from __future__ import annotations

from typing import Any

from engine_adapter.vllm import build_scheduler as build_advised


def build_scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """As `engine_adapter.vllm.build_scheduler`, with async scheduling."""
    vllm_config.scheduler_config.async_scheduling = True
    return build_advised(vllm_config=vllm_config, **kwargs)
