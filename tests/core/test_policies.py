"""Policies from outside: a good one runs, and no allocation leaves the limits, whatever a policy says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import DecisionRefused, InProcessSource
from sidecar.policies import registry
from sidecar.policies.base import Iteration, Plan, PolicyContext
from sidecar.queues import Queues
from sidecar.session.machine import Session
from slidingserve.contract.values import BatchAllocation, EngineLimits, OpenSession, PauseState, Snapshot
from tests.core.toy_policies import NoParameters, ToyPolicy, install, toys
from tests.strategies import (
    LIMITS,
    LinearTimer,
    assert_within_limits,
    batch,
    columns,
    decide,
    feed,
    ints,
    opened,
    random_feed,
    run_to_end,
    snapshot,
    step,
)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toys():
        yield


@st.composite
def states(draw: st.DrawFn) -> tuple[EngineLimits, Snapshot]:
    """A full state, its KV blocks in use at random; waiting requests may hope for cached tokens."""
    limits = EngineLimits(
        draw(st.integers(1, 40)), draw(st.integers(1, 6)), kv_blocks=60, kv_block_tokens=draw(st.integers(1, 8))
    )
    running = draw(st.integers(0, 6))
    count = draw(st.integers(running, 9))
    rows = []
    for position in range(count):
        prompt, output = draw(st.integers(1, 40)), draw(st.integers(0, 9))
        computed = draw(st.integers(0, prompt + output - 1)) if position < running or draw(st.booleans()) else 0
        rows.append((position * 3 + 1, prompt, computed, output))
    full = snapshot(
        rows,
        running,
        draw(st.integers(0, 12)),
        pause_state=draw(st.sampled_from(PauseState)),
    )
    drafts = ints(*(draw(st.integers(0, 4)) for _ in rows))
    return limits, full._replace(requests=full.requests._replace(speculative_tokens=drafts))


slots = st.one_of(st.integers(0, 9), st.sampled_from([-1, 255, 256, 2**62, -(2**62)]))
entries = st.lists(st.tuples(slots, st.sampled_from([-(2**63), -1, 0, 1, 3, 10, 2**63 - 1])), max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(states(), entries, st.lists(slots, max_size=12), st.lists(slots, max_size=4))
def test_no_allocation_leaves_the_limits(
    state: tuple[EngineLimits, Snapshot], plan_entries: list[tuple[int, int]], victims: list[int], demoted: list[int]
) -> None:
    limits, full = state

    def nonsense(queues: Queues, iteration: Iteration, plan: Plan) -> None:
        for entry in plan_entries:
            plan.entries[plan.count] = entry
            plan.count += 1
        plan.victims[: len(victims)], plan.victim_count = victims, len(victims)
        plan.demoted[: len(demoted)], plan.demoted_count = demoted, len(demoted)

    session = Session("nonsense", build_policy=lambda name, parameters, context: ToyPolicy("nonsense/1", nonsense))
    session.handle(OpenSession(limits))
    allocation = decide(session, full)
    assert_within_limits(allocation, full, limits)
    waiting = full.requests.handles[full.running_count :]
    if full.iteration.pause_state is not PauseState.RUNNING:
        assert not np.isin(allocation.handles, waiting).any()
    if full.iteration.pause_state is PauseState.PAUSED_ALL:
        assert len(allocation.handles) == len(allocation.preempted_handles) == 0
    else:
        untouched = batch(allocation) == [(1 + 3 * slot, tokens) for slot, tokens in plan_entries]
        untouched &= allocation.preempted_handles.tolist() == [1 + 3 * slot for slot in victims]
        assert (session.guarded == 0) == untouched, "what the guard changes is counted, nothing else"
    assert set(allocation.demoted_handles.tolist()) <= set(full.requests.handles.tolist())


@pytest.mark.parametrize("count", [-1, 257, 10**9, 2**62])
def test_counts_beyond_the_plan_reach_no_foreign_memory(count: int) -> None:
    def lies(queues: Queues, iteration: Iteration, plan: Plan) -> None:
        plan.entries[:] = (-1, 0)
        plan.victims[:] = -1
        plan.demoted[:] = -1
        plan.count = plan.victim_count = plan.demoted_count = count

    install("lies", lies)
    session = opened(policy="lies")
    allocation = decide(session, step(0, arrived=columns([1, 2], [9, 9])))
    assert len(allocation.handles) == len(allocation.preempted_handles) == len(allocation.demoted_handles) == 0
    decide(session, step(1))


def test_what_a_plan_forgot_does_not_come_back() -> None:
    """The plan's buffers are used again; the rows of an earlier plan are not part of the next."""

    def once(queues: Queues, iteration: Iteration, plan: Plan) -> None:
        assert (plan.count, plan.victim_count, plan.demoted_count, plan.path) == (0, 0, 0, "")
        if iteration.now_seconds == 0.0:
            plan.entries[0], plan.count, plan.path = (0, 5), 1, "once"
            plan.demoted[0], plan.demoted_count = 1, 1

    install("once", once)
    session = opened(policy="once")
    allocation = decide(session, step(0, arrived=columns([1, 2], [9, 9])))
    assert (batch(allocation), allocation.decision_path) == ([(1, 5)], "once")
    assert allocation.demoted_handles.tolist() == [2]
    later = decide(session, step(1, now=1.0, free=38))
    assert (batch(later), later.demoted_handles.tolist(), later.decision_path) == ([], [], "")


def test_answers_are_not_views_of_buffers() -> None:
    session = opened(policy="shortest")
    first = decide(session, step(0, arrived=columns([1, 2], [9, 3])))
    kept = batch(first)
    decide(session, step(1, free=36, finished_handles=ints(1)))
    assert batch(first) == kept == [(2, 3), (1, 9)]


def test_well_behaved_policy_from_outside_runs_a_simulation() -> None:
    limits = EngineLimits(40, 4, 30, 4)
    requests = random_feed(5, 60, prompt=40, output=12, gap_seconds=0.01)
    source = InProcessSource()
    answer = source.open(OpenSession(limits, policy="shortest"))
    assert (answer.policy, answer.policy_version) == ("shortest", "shortest/1")
    engine = SimulatedEngine(requests, limits, LinearTimer(), source)
    run_to_end(engine)
    outcome = engine.outcome()
    assert outcome.finished.all()
    assert (outcome.output_tokens == requests.output_tokens).all()
    assert outcome.preemptions > 0
    by_itself = SimulatedEngine(requests, limits, LinearTimer()).run()
    assert outcome.first_token_seconds.tolist() != by_itself.first_token_seconds.tolist()


def test_shortest_prompt_is_admitted_first() -> None:
    limits = EngineLimits(10, 1, 30, 4)
    source = InProcessSource()
    source.open(OpenSession(limits, policy="shortest"))
    outcome = SimulatedEngine(feed([(0.0, 9, 2), (0.0, 3, 2), (0.0, 6, 2)]), limits, LinearTimer(), source).run()
    assert np.argsort(outcome.first_token_seconds).tolist() == [1, 2, 0]


def test_policy_that_raises_is_loud_in_process() -> None:
    def broken(queues: Queues, iteration: Iteration, plan: Plan) -> None:
        raise KeyError("slack")

    install("broken", broken)
    source = InProcessSource()
    source.open(OpenSession(LIMITS, policy="broken"))
    with pytest.raises(DecisionRefused, match=r"broken/1.*slack"):
        SimulatedEngine(feed([(0.0, 9, 2)]), LIMITS, LinearTimer(), source).run()


def test_policy_sees_the_facts_of_its_iteration() -> None:
    seen = []

    def look(queues: Queues, iteration: Iteration, plan: Plan) -> None:
        seen.append(iteration)

    install("look", look)
    session = opened(policy="look")
    facts = {
        "last_iteration_seconds": 0.25,
        "last_iteration_censored": True,
        "pause_state": PauseState.PAUSED_NEW,
        "pipeline_depth": 2,
    }
    decide(session, step(0, now=3.0, free=17, iteration=facts))
    assert seen == [Iteration(3.0, 17, 0.25, True, False, 2)]


def test_each_session_has_its_own_policy() -> None:
    built = []

    def build(parameters: Any, context: PolicyContext) -> ToyPolicy:
        built.append(context)
        return ToyPolicy("own/1", lambda queues, iteration, plan: None)

    registry.register("own", NoParameters, build)
    other = EngineLimits(9, 9, 9, 9)
    opened(policy="own", profile="h100")
    opened(other, policy="own")
    assert built == [PolicyContext(LIMITS, "h100"), PolicyContext(other, "")]


def test_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="taken"):
        install("shortest", lambda queues, iteration, plan: None)
    assert isinstance(decide(opened(policy="shortest"), step(0)), BatchAllocation)
