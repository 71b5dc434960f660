"""What has to hold of a scheduler between two iterations, and when all its requests have ended."""

from __future__ import annotations

from typing import Any

from tests.vllm.counting_runner import token_at
from tests.vllm.scheduler_objects import MODEL_TOKENS, EngineLoop, Setup


def waiting_queues(scheduler: Any) -> list[Any]:
    """Returns the scheduler's queues of waiting requests; which there are depends on vLLM's version."""
    names = ("kv_holding_waiting", "skipped_waiting", "waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]


def running_ids(scheduler: Any) -> list[str]:
    """Returns the ids of the running requests, in order."""
    return [request.request_id for request in scheduler.running]


def waiting_ids(scheduler: Any) -> list[str]:
    """Returns the ids of the waiting requests, in order."""
    return [request.request_id for queue in waiting_queues(scheduler) for request in queue]


def free_blocks(scheduler: Any) -> int:
    """Returns the number of free KV blocks."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def expected_output(request: Any) -> list[int]:
    """Returns the tokens that a client has to get if nothing is lost, duplicated or reordered."""
    prompt = request.num_prompt_tokens
    count = min(request.max_tokens, MODEL_TOKENS - prompt)
    return [token_at(request.request_id, position) for position in range(prompt, prompt + count)]


def check_queues(scheduler: Any) -> None:
    """Asserts that every live request stands in one queue, once, and that the batch limits hold."""
    queued = running_ids(scheduler) + waiting_ids(scheduler)
    live = {name for name, request in scheduler.requests.items() if not request.is_finished()}
    assert len(queued) == len(set(queued)), f"a request stands in two places: {sorted(queued)}"
    assert set(queued) == live, f"lost: {live - set(queued)}, left over: {set(queued) - live}"
    assert len(scheduler.running) <= scheduler.max_num_running_reqs


def check_end(loop: EngineLoop, setup: Setup) -> None:
    """Asserts that all requests came to their end, each client got its text, and every KV block is free."""
    assert loop.finished | loop.aborted == set(loop.requests)
    assert not loop.scheduler.requests
    assert not running_ids(loop.scheduler)
    assert not waiting_ids(loop.scheduler)
    for name, request in loop.requests.items():
        expected = expected_output(request)
        got = loop.outputs[name]
        if name in loop.aborted:
            assert got == expected[: len(got)], f"{name}, aborted, got another text"
        else:
            assert got == expected, f"{name} got {len(got)} tokens of {len(expected)}, or others"
    # vLLM keeps one block for itself.
    assert free_blocks(loop.scheduler) == setup.blocks - 1, "KV blocks were not given back"
