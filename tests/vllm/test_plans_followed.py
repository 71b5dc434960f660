"""vLLM's own schedulers follow a plan to the token, and what becomes of a plan that they cannot follow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM: see docs/vllm.md")

from vllm.v1.core.sched.interface import PauseState

from slidingserve.contract import values
from slidingserve.contract.values import IterationState, Step
from tests.vllm.engine_checks import check_end, check_queues, free_blocks, running_ids, waiting_ids
from tests.vllm.scheduler_objects import EngineLoop, Setup, grammar_ready, make_request
from tests.vllm.sources import FunctionSource, Source, WantedPlan, advised_loop, is_advised

pytestmark = pytest.mark.vllm

ways = pytest.mark.parametrize(
    ("asynchronous", "prefetch"), [(False, False), (False, True), (True, False)], ids=["sync", "ahead", "async"]
)


def prescribed(plans: Sequence[WantedPlan]) -> FunctionSource:
    """Decides by a list, and not at all when that is used up."""
    left = iter(plans)
    return FunctionSource(lambda source, iteration: next(left, None))


def end(loop: EngineLoop, setup: Setup, source: Source) -> None:
    for _ in loop.run():
        check_queues(loop.scheduler)
    check_end(loop, setup)
    assert is_advised(source)


@ways
def test_a_prescribed_plan_is_honoured_step_by_step(asynchronous: bool, prefetch: bool) -> None:
    plans = [
        [("r3", 100), ("r0", 37)],
        [("r0", 63), ("r3", 200), ("r5", 50)],
        [("r5", 250), ("r1", 128), ("r2", 1)],  # r0 and r3 held while they prefill
        [("r3", 1000), ("r0", 5), ("r1", 7), ("r2", 300), ("r4", 11)],
        [("r3", 1)],
        [("r0", 295), ("r1", 365)],  # r3 held while it decodes
        [("r3", 1), ("r0", 1), ("r2", 199), ("r4", 389), ("r5", 200)],
        [("r0", 1)],
        [("r5", 1), ("r0", 1), ("r4", 1), ("r1", 1)],
    ]
    setup = Setup(asynchronous=asynchronous, max_tokens=1024)
    source = prescribed(plans)
    loop = advised_loop(setup, source, prefetch=prefetch)
    prompts = {"r0": 400, "r1": 500, "r2": 500, "r3": 400, "r4": 400, "r5": 500}
    loop.add(*(make_request(name, tokens, 20) for name, tokens in prompts.items()))
    wanted = [dict(plan) for plan in plans]
    wanted[3]["r3"] = 100  # all that it lacks
    assert [loop.step() for _ in plans] == wanted
    end(loop, setup, source)


@ways
def test_two_partial_chunks_in_one_iteration_and_their_order(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    source = prescribed([[("c", 17), ("a", 33)], [("b", 3), ("a", 5)]])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(*(make_request(name, 100, 3) for name in "abc"))
    assert list(loop.step().items()) == [("c", 17), ("a", 33)]
    assert running_ids(loop.scheduler) == ["c", "a"]
    # Running requests come first in vLLM, whatever the plan's order.
    assert list(loop.step().items()) == [("a", 5), ("b", 3)]
    assert waiting_ids(loop.scheduler) == []
    end(loop, setup, source)


@ways
def test_hidden_requests_keep_their_places(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, max_sequences=3)
    source = prescribed([[("c", 10)], [("e", 10), ("c", 10)]])
    loop = advised_loop(setup, source, prefetch=prefetch, cap_fallback=False)
    loop.add(*(make_request(name, 50, 3) for name in "abcdef"))
    loop.step()
    assert waiting_ids(loop.scheduler) == ["a", "b", "d", "e", "f"]
    loop.step()
    assert waiting_ids(loop.scheduler) == ["a", "b", "d", "f"]
    # Nobody decides: first come, first served; the third slot goes to the first in the queue.
    assert loop.step() == {"c": 30, "e": 40, "a": 50}
    end(loop, setup, source)


@ways
def test_without_an_answer_a_batch_is_no_larger_than_the_plans_before(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    source = prescribed([[("a", 20)], [("a", 10), ("b", 35)]])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(*(make_request(name, 100, 3) for name in "abc"))
    batches = [loop.step() for _ in range(4)]
    assert batches[2] == {"a": 45}
    assert batches[3] == {"a": 25, "b": 20}
    end(loop, setup, source)


@ways
def test_a_cap_counts_what_follows_the_cached_prefix(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, max_tokens=1024)
    caps = {"first": 1000, "second": 30}
    source = FunctionSource(lambda source, _: [(name, caps[name]) for name in source.handles])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(make_request("first", 500, 20, shared_tokens=400))
    assert loop.step() == {"first": 500}
    assert loop.step() == {"first": 1}
    loop.add(make_request("second", 500, 2, shared_tokens=400))
    assert loop.step() == {"first": 1, "second": 30}
    assert loop.requests["second"].num_computed_tokens == 430
    told = [m.arrived for m in source.messages if isinstance(m, Step) and m.arrived is not None]
    assert told[-1].cached_prefix_tokens.tolist() == [400]
    assert loop.step() == {"first": 1, "second": 30}
    end(loop, setup, source)


def fill_memory(loop: EngineLoop) -> None:
    """Three requests that hold all nine blocks; the next token of any of them needs one more."""
    loop.add(*(make_request(name, 47, 8) for name in "abc"))
    assert loop.step() == {"a": 47, "b": 47, "c": 47}
    assert loop.step() == {"a": 1, "b": 1, "c": 1}
    assert free_blocks(loop.scheduler) == 0


@ways
def test_the_tail_of_the_plans_order_is_preempted_and_resumes(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, blocks=10)
    everyone = [("a", 47), ("b", 47), ("c", 47)]
    plans = [everyone, everyone, [("c", 1), ("a", 1), ("b", 1)], [("a", 1)], [("a", 1)], [("a", 1), ("c", 1)]]
    source = prescribed(plans)
    loop = advised_loop(setup, source, prefetch=prefetch)
    fill_memory(loop)
    assert loop.step() == {"c": 1, "a": 1}  # vLLM alone would have taken c
    assert loop.preemptions == 1
    assert running_ids(loop.scheduler) == ["c", "a"]
    assert waiting_ids(loop.scheduler) == ["b"]
    assert loop.step() == {"a": 1}
    applied = next(m.applied for m in reversed(source.messages) if isinstance(m, Step) and m.applied is not None)
    assert applied.preempted_handles.tolist() == [source.handles["b"]]
    end(loop, setup, source)


@ways
def test_named_victims_are_preempted_first(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, blocks=10)
    everyone = [("a", 47), ("b", 47), ("c", 47)]
    plans = iter([everyone, everyone, [("b", 1)]])
    source = FunctionSource(
        lambda source, _: next(plans, None), victims=lambda source: ["a"] if source.asked == 3 else []
    )
    loop = advised_loop(setup, source, prefetch=prefetch)
    fill_memory(loop)
    assert loop.step() == {"b": 1}
    assert waiting_ids(loop.scheduler) == ["a"]  # c stands behind it
    end(loop, setup, source)


@ways
def test_the_preempted_one_is_planned_like_a_prefill(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, blocks=11, prefix_caching=False)

    def decide(source: FunctionSource, _: IterationState) -> WantedPlan:
        if source.asked <= 2:
            return [("d", 1), ("a", 47), ("b", 47), ("c", 47)]
        if source.asked == 3:
            return [("c", 1), ("a", 1), ("d", 1), ("b", 1)]
        return [("d", 1), *((name, 1) for name in ("a", "c") if name in source.handles), ("b", 20)]

    source = FunctionSource(decide)
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(make_request("d", 1, 14), *(make_request(name, 47, 8) for name in "abc"))
    chunks = [batch["b"] for batch in loop.run() if "b" in batch]
    assert loop.preemptions == 1
    # 47 of the prompt, one generated; then all 47 again and the 2 generated; then the other tokens of 8.
    assert chunks == [47, 1, 20, 20, 9, *[1] * 5]
    check_end(loop, setup)
    assert is_advised(source)


@ways
def test_admissions_behind_one_that_does_not_fit_are_dropped_and_reported(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, blocks=20)
    plans = [[("a", 160)], [("a", 1), ("big", 100), ("small", 10)], [("a", 1), ("small", 10)]]
    source = prescribed(plans)
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(make_request("a", 160, 30), make_request("big", 200, 2), make_request("small", 10, 2))
    assert loop.step() == {"a": 160}
    assert loop.step() == {"a": 1}
    assert waiting_ids(loop.scheduler) == ["big", "small"]
    assert loop.step() == {"a": 1, "small": 10}
    exact = [m.applied_exactly for m in source.messages if isinstance(m, Step)]
    assert exact[:3] == [False, True, False]
    applied = source.messages[2]
    assert isinstance(applied, Step)
    assert applied.applied is not None
    assert applied.applied.handles.tolist() == [source.handles["a"]]
    end(loop, setup, source)


@ways
def test_a_plan_comes_before_priorities(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, policy="priority", max_sequences=2)
    source = prescribed([[("late", 20)], [("late", 20)]])
    loop = advised_loop(setup, source, prefetch=prefetch, cap_fallback=False)
    loop.add(
        make_request("normal", 50, 3, priority=5),
        make_request("late", 50, 3, priority=9),
        make_request("urgent", 50, 3, priority=0),
    )
    assert loop.step() == {"late": 20}
    assert loop.step() == {"late": 20}
    assert loop.step() == {"late": 10, "urgent": 50}  # vLLM alone goes by priority again
    end(loop, setup, source)


@ways
def test_preemption_under_a_plan_goes_by_its_order_and_not_by_priority(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous, policy="priority", blocks=10)
    everyone = [("a", 47), ("b", 47), ("c", 47)]
    source = prescribed([everyone, everyone, [("c", 1), ("a", 1), ("b", 1)]])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(*(make_request(name, 47, 8, priority=rank) for name, rank in (("a", 1), ("b", 0), ("c", 2))))
    loop.step()
    loop.step()
    assert loop.step() == {"c": 1, "a": 1}
    assert waiting_ids(loop.scheduler) == ["b"]
    end(loop, setup, source)


@ways
def test_paused_altogether_nobody_is_asked_and_nothing_runs(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    source = FunctionSource(lambda source, _: [(name, 30) for name in source.handles])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(*(make_request(name, 100, 5) for name in "abc"))
    assert loop.step() == {"a": 30, "b": 30, "c": 30}
    asked, scheduled = source.asked, len(loop.batches)
    loop.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    loop.abort("c")  # so that vLLM schedules all the same, to tell the workers
    assert [loop.step() for _ in range(4)] == [{}] * 4
    assert len(loop.batches) > scheduled
    assert source.asked == asked
    loop.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert loop.step() == {"a": 30, "b": 30}
    end(loop, setup, source)


@ways
def test_paused_for_new_requests_the_running_ones_are_planned(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    source = FunctionSource(lambda source, _: [(name, 30) for name in source.handles])
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(make_request("a", 100, 5))
    assert loop.step() == {"a": 30}
    loop.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    loop.add(make_request("b", 100, 5))
    assert loop.step() == {"a": 30}
    assert loop.step() == {"a": 30}
    assert waiting_ids(loop.scheduler) == ["b"]
    assert source.messages[-1].iteration.pause_state is values.PauseState.PAUSED_NEW
    loop.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert loop.step()["a"] == 10
    assert loop.step()["b"] == 30
    end(loop, setup, source)


@ways
def test_a_request_without_its_grammar_is_not_told_until_it_can_run(asynchronous: bool, prefetch: bool) -> None:
    setup = Setup(asynchronous=asynchronous)
    source = FunctionSource(lambda source, _: [(name, 30) for name in source.handles])
    loop = advised_loop(setup, source, prefetch=prefetch)
    structured = make_request("s", 60, 5, structured=True)
    loop.add(structured, make_request("a", 100, 9))
    assert loop.step() == {"a": 30}
    assert set(source.handles) == {"a"}
    grammar_ready(structured)
    assert [loop.step().get("s", 0) for _ in range(4)].count(30) == 2
    assert set(source.handles) == {"a", "s"}
    end(loop, setup, source)


def test_an_iteration_in_which_all_texts_are_at_their_end_costs_no_plan() -> None:
    """Async only: the last token is being sampled, so there is nothing to schedule, whatever the plan says."""
    setup = Setup(asynchronous=True)
    caps = {"first": 100, "second": 30}
    source = FunctionSource(lambda source, _: [(name, caps[name]) for name in source.handles])
    loop = advised_loop(setup, source)
    loop.add(make_request("first", 100, 3))
    loop.run_out()
    assert loop.batches[-1] == {}
    loop.add(make_request("second", 100, 3))
    assert loop.step() == {"second": 30}
