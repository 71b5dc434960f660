"""The stand-in for an engine, around vLLM's own schedulers: it has to work before it can test anything else."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM: see docs/vllm.md")

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from tests.vllm.engine_checks import check_end, check_queues, free_blocks, running_ids, waiting_ids
from tests.vllm.scheduler_objects import EngineLoop, Setup, grammar_ready, make_request, make_scheduler, vllm_version

pytestmark = pytest.mark.vllm

both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def start(setup: Setup) -> EngineLoop:
    return EngineLoop(make_scheduler(setup), asynchronous=setup.asynchronous)


def test_which_vllm_this_is(record_testsuite_property: Callable[[str, object], None]) -> None:
    """For `test_version_matrix`, which reads it in the report."""
    record_testsuite_property("vllm_version", vllm_version())
    assert inspect.getfile(Scheduler).startswith(str(Path(vllm.__file__).parent))


@both
def test_one_request_runs_to_its_end(asynchronous: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    loop = start(setup)
    loop.add(make_request("a", 300, 5))
    loop.run_out()
    tokens = [batch["a"] for batch in loop.batches if batch]
    assert tokens == [256, 44, 1, 1, 1, 1]
    check_end(loop, setup)


@both
def test_many_requests_in_little_memory_are_preempted_and_lose_nothing(asynchronous: bool) -> None:
    setup = Setup(asynchronous=asynchronous, blocks=40, max_sequences=8, reserve_full_prompt=False)
    loop = start(setup)
    chance = random.Random(1)
    loop.add(*(make_request(f"r{n}", chance.randint(1, 200), chance.randint(20, 60)) for n in range(12)))
    for _ in loop.run():
        check_queues(loop.scheduler)
    assert loop.preemptions > 0
    check_end(loop, setup)


@both
def test_aborts_between_and_during_iterations(asynchronous: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    loop = start(setup)
    loop.add(*(make_request(f"r{n}", 100, 10) for n in range(6)))
    loop.abort("r5")
    for number, _ in enumerate(loop.run()):
        check_queues(loop.scheduler)
        if number == 3:
            loop.abort("r0")
            loop.abort_while_running("r1")
    assert loop.aborted == {"r0", "r1", "r5"}
    check_end(loop, setup)


def test_shared_prefixes_are_found_in_the_cache() -> None:
    setup = Setup()
    loop = start(setup)
    loop.add(make_request("a", 200, 3, shared_tokens=160))
    loop.run_out()
    loop.add(make_request("b", 200, 3, shared_tokens=160))
    assert loop.step() == {"b": 40}
    loop.run_out()
    check_end(loop, setup)

    loop = start(replace(setup, prefix_caching=False))
    loop.add(make_request("a", 200, 3, shared_tokens=160))
    loop.run_out()
    loop.add(make_request("b", 200, 3, shared_tokens=160))
    assert loop.step() == {"b": 200}


def test_priorities_order_the_waiting_requests() -> None:
    loop = start(Setup(policy="priority", max_sequences=1))
    loop.add(make_request("late", 10, 1, priority=5), make_request("urgent", 10, 1, priority=-1))
    assert loop.step() == {"urgent": 10}
    assert loop.step() == {"late": 10}


def test_reserve_and_watermark_hold_admissions_back() -> None:
    fits_in_part = [make_request("big", 400, 1), make_request("next", 10, 1)]
    loop = start(Setup(blocks=20, max_tokens=64))
    loop.add(*fits_in_part)
    assert loop.step() == {}  # 25 blocks are more than 19
    assert waiting_ids(loop.scheduler) == ["big", "next"]

    loop = start(Setup(blocks=20, max_tokens=64, reserve_full_prompt=False))
    loop.add(*fits_in_part)
    assert loop.step() == {"big": 64}

    full = Setup(blocks=20, max_tokens=512, watermark=0.5)
    loop = start(full)
    loop.add(make_request("first", 100, 5), make_request("second", 100, 5))
    assert loop.step() == {"first": 100}  # a second one would leave less than half of the blocks
    assert free_blocks(loop.scheduler) == 19 - 7
    loop.run_out()
    check_end(loop, full)


def test_a_structured_request_waits_for_its_grammar() -> None:
    setup = Setup()
    loop = start(setup)
    structured = make_request("s", 20, 3, structured=True)
    loop.add(structured, make_request("a", 20, 3))
    assert loop.step() == {"a": 20}
    grammar_ready(structured)
    assert loop.step() == {"a": 1, "s": 20}
    assert running_ids(loop.scheduler) == ["a", "s"]
    loop.run_out()
    check_end(loop, setup)


def test_statistics_can_be_recorded() -> None:
    setup = Setup(log_stats=True)
    loop = start(setup)
    loop.add(make_request("a", 20, 3))
    loop.run_out()
    check_end(loop, setup)
