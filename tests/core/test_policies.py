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
from sidecar.policies.base import Plan, PolicyContext
from sidecar.queues import Queues
from sidecar.session.machine import Session
from slidingserve.contract.values import (
    BatchAllocation,
    EngineLimits,
    IterationState,
    OpenSession,
    PauseState,
    Snapshot,
)
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


def random_state(rng: np.random.Generator) -> tuple[EngineLimits, Snapshot]:
    """A full state, its KV blocks in use at random; waiting requests may hope for cached tokens."""
    limits = EngineLimits(
        int(rng.integers(1, 41)), int(rng.integers(1, 5)), kv_blocks=60, kv_block_tokens=int(rng.integers(1, 9))
    )
    running = int(rng.integers(0, limits.max_sequences + 2))
    rows = []
    for position in range(running + int(rng.integers(0, 5))):
        prompt, output = int(rng.integers(1, 41)), int(rng.integers(0, 10))
        computed = int(rng.integers(0, prompt + output)) if position < running or rng.random() < 0.3 else 0
        rows.append((position * 3 + 1, prompt, computed, output))
    pause = PauseState(int(rng.choice([0, 0, 0, 0, 1, 2])))
    full = snapshot(rows, running, int(rng.choice([0, 1, 2, 3, 5, 8, 50])), pause_state=pause)
    drafts = rng.integers(0, 5, len(rows))
    return limits, full._replace(requests=full.requests._replace(speculative_tokens=drafts))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_no_allocation_leaves_the_limits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits, full = random_state(rng)
    slots = np.array([*range(9)] * 3 + [9, -1, 255, 256, 2**62, -(2**62)])
    tokens = [1, 1, 2, 3, 10, 10, 2**63 - 1, 0, -1, -(2**63)]
    count = int(rng.integers(0, 20))
    plan_entries = list(zip(rng.choice(slots, count).tolist(), rng.choice(tokens, count).tolist(), strict=True))
    victims = rng.choice(slots, int(rng.integers(0, 4))).tolist()
    demoted = rng.choice(slots, int(rng.integers(0, 4))).tolist()

    def nonsense(queues: Queues, iteration: IterationState, plan: Plan) -> None:
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


def test_seats_and_blocks_of_victims_are_free_for_others_once() -> None:
    def swap(queues: Queues, iteration: IterationState, plan: Plan) -> None:
        plan.victims[:3], plan.victim_count = (1, 1, 5), 3
        for slot in (0, 1, 2, 3, 4):
            plan.entries[plan.count], plan.count = (slot, 8), plan.count + 1

    install("swap", swap)
    session = opened(EngineLimits(100, 2, 40, 4), policy="swap")
    rows = [(1, 9, 8, 0), (2, 9, 8, 0), (3, 8, 0, 0), (4, 8, 0, 0), (5, 8, 0, 0), (6, 8, 0, 0)]
    allocation = decide(session, snapshot(rows, running=2, free=1))
    assert allocation.preempted_handles.tolist() == [2]
    assert batch(allocation) == [(1, 1), (3, 8)], "two blocks and one seat came free, one block was"
    allocation = decide(session, snapshot(rows, running=2, free=0, epoch=2))
    assert batch(allocation) == [(1, 1), (3, 4)]
    allocation = decide(session, snapshot(rows, running=2, free=30, epoch=3))
    assert batch(allocation) == [(1, 1), (3, 8)]


@pytest.mark.parametrize("count", [-1, 257, 10**9, 2**62])
def test_counts_beyond_the_plan_reach_no_foreign_memory(count: int) -> None:
    def lies(queues: Queues, iteration: IterationState, plan: Plan) -> None:
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

    def once(queues: Queues, iteration: IterationState, plan: Plan) -> None:
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
    def broken(queues: Queues, iteration: IterationState, plan: Plan) -> None:
        raise KeyError("slack")

    install("broken", broken)
    source = InProcessSource()
    source.open(OpenSession(LIMITS, policy="broken"))
    with pytest.raises(DecisionRefused, match=r"broken/1.*slack"):
        SimulatedEngine(feed([(0.0, 9, 2)]), LIMITS, LinearTimer(), source).run()


def test_policy_sees_the_facts_of_its_iteration() -> None:
    seen = []

    def look(queues: Queues, iteration: IterationState, plan: Plan) -> None:
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
    assert seen == [IterationState(0, 0, 3.0, 17, 0.25, True, PauseState.PAUSED_NEW, 2)]
    assert not seen[0].may_admit


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
