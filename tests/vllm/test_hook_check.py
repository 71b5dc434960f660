"""Whether the adapter sees that a vLLM is not as it expects: on classes made for it, and on vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm import hooks


class GoodRequest:
    def __init__(self) -> None:
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.num_prompt_tokens, self.is_prefill_chunk, self.arrival_time = 0, False, 0.0
        self.kv_transfer_params = self.lora_request = None


class GoodScheduler:
    def __init__(self) -> None:
        self.running, self.waiting, self.requests = [], [], {}  # type: ignore[var-annotated]
        self.policy = None
        self.max_num_scheduled_tokens = self.max_num_running_reqs = 1
        self.need_mamba_block_aligned_split = False

    def schedule(self) -> int:
        tokens = 1
        if self.need_mamba_block_aligned_split:
            tokens = self._mamba_block_aligned_split(None, tokens)
        if self.need_mamba_block_aligned_split:
            tokens = self._mamba_block_aligned_split(None, tokens)
        return tokens

    def _mamba_block_aligned_split(self, request: Any, tokens: int) -> int:
        return tokens

    def update_from_output(self) -> None: ...
    def add_request(self) -> None: ...
    def shutdown(self) -> None: ...
    def _is_blocked_waiting_status(self) -> None: ...


class UnguardedScheduler(GoodScheduler):
    def schedule(self) -> int:
        return self._mamba_block_aligned_split(None, 1) + self._mamba_block_aligned_split(None, 1)


class RenamedScheduler(GoodScheduler):
    add_request = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.active, self.waiting, self.requests = [], [], {}  # type: ignore[var-annotated]
        self.policy = None
        self.max_num_scheduled_tokens = self.max_num_running_reqs = 1
        self.need_mamba_block_aligned_split = False


def test_all_is_there() -> None:
    assert hooks.missing_hooks(GoodScheduler, GoodRequest) == []


@pytest.mark.parametrize(
    ("scheduler", "named"),
    [
        (UnguardedScheduler, "two guarded calls of _mamba_block_aligned_split in Scheduler.schedule() (found 2, 0 "),
        (RenamedScheduler, "Scheduler.add_request()"),
        (RenamedScheduler, "Scheduler.running"),
    ],
)
def test_what_is_missing_is_named(scheduler: Any, named: str) -> None:
    assert any(phrase.startswith(named) for phrase in hooks.missing_hooks(scheduler, GoodRequest))


def test_a_request_without_its_numbers_is_noticed() -> None:
    assert hooks.missing_hooks(GoodScheduler, object)[0].startswith("Request.")


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.28.0", True), ("0.33.1+cpu", True), ("0.27.1", False), ("0.34.0", False), ("1.30.0", False), ("dev", False)],
)
def test_which_versions_are_tested(version: str, tested: bool) -> None:
    assert hooks.is_tested(version) is tested


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"enable_chunked_prefill": False}, "chunked prefill"),
        ({"runner_type": "pooling"}, "pooling"),
        ({}, ""),
    ],
)
def test_settings_that_leave_vllm_alone(changed: dict[str, Any], named: str) -> None:
    values = {"pipeline_parallel_size": 1, "enable_chunked_prefill": True, "runner_type": "generate"} | changed
    part = SimpleNamespace(**values)
    config = SimpleNamespace(parallel_config=part, scheduler_config=part, model_config=part)
    assert [reason[: len(named)] for reason in hooks.unsupported_settings(config)] == [named] * bool(named)


@pytest.mark.vllm
def test_vllm_has_all_of_them() -> None:
    pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")
    assert hooks.missing_hooks() == []
