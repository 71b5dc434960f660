"""Decodes always get their token; where KV blocks lack, victims come from the tail; and every allocation fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictor.model import LatencyModel
from sidecar.policies.slidingserve.parameters import MODES
from sidecar.session.machine import Session
from slidingserve.contract.values import BatchAllocation, EngineLimits, PauseState, Snapshot
from tests.slidingserve.scenes import (
    Held,
    Request,
    Scene,
    State,
    decoding,
    linear,
    make_policy,
    prompt,
    session_with,
    state_of,
    states,
)
from tests.strategies import (
    Row,
    assert_within_limits,
    batch,
    decide,
    engine_rows,
    ints,
    mirror_rows,
    snapshot,
    step,
)

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FAST, SLOW = linear(0.001, 20e-6), linear(0.010, 1e-3)
models = st.sampled_from([FAST, SLOW])
modes = st.sampled_from(MODES)


def session_for(model: LatencyModel, limits: EngineLimits, **parameters: Any) -> Session:
    return session_with(lambda found: make_policy(model, found, **parameters), limits)


def is_decode(row: Row) -> bool:
    return row.running and row.output > 0 and row.prompt + row.output - row.computed == 1


def drafts_of(full: Snapshot) -> dict[int, int]:
    return dict(zip(full.requests.handles.tolist(), full.requests.speculative_tokens.tolist(), strict=True))


requests = st.lists(
    st.one_of(
        st.builds(
            decoding,
            slack=st.sampled_from([-1.0, 0.0, 0.001, 0.02, 0.05, 5.0]),
            context=st.integers(3, 5000),
            tbt=st.sampled_from([0.0, 0.001, 0.05]),
        ),
        st.builds(
            prompt,
            missing=st.integers(1, 5000),
            slack=st.sampled_from([-1.0, 0.0, 0.001, 0.02, 0.3, 10.0]),
            context=st.sampled_from([0, 0, 7, 3000]),
        ),
    ),
    max_size=25,
)


@SETTINGS
@given(requests, models, modes, st.sampled_from([0, 1, 8, 300, 4096]))
def test_every_decode_gets_its_token_whatever_the_prompts(
    rows: list[Request], model: LatencyModel, mode: str, max_tokens: int
) -> None:
    """Safe, late or lost, and however small B is."""
    decision = Scene(rows).decide(model, mode=mode, max_tokens=max_tokens)
    decodes = [place for place, row in enumerate(rows) if row.output]
    assert [decision.tokens.get(place) for place in decodes] == [1] * len(decodes)
    assert not decision.victims
    for place, tokens in decision.tokens.items():
        assert 1 <= tokens <= rows[place].prompt + rows[place].output - rows[place].computed


@SETTINGS
@given(requests, models, st.sampled_from([256, 1024, 4096]))
def test_robust_never_takes_longer_than_safe_decodes_can_wait(
    rows: list[Request], model: LatencyModel, max_tokens: int
) -> None:
    decision = Scene(rows).decide(model, max_tokens=max_tokens)
    alone = Scene([row for row in rows if row.output]).decide(model).predicted_seconds
    safe = [row.slack for row in rows if row.output and row.tbt and row.slack >= alone + 1e-9]
    assert decision.predicted_seconds <= min(safe, default=1e9) + 1e-9


@SETTINGS
@given(states(), models, modes)
def test_allocations_fit_and_decodes_are_served(state: State, model: LatencyModel, mode: str) -> None:
    session = session_for(model, state.limits, mode=mode)
    allocation = decide(session, state.full)
    assert_within_limits(allocation, state.full, state.limits)
    rows, drafts = engine_rows(state.full, state.limits), drafts_of(state.full)
    given_tokens, victims = dict(batch(allocation)), allocation.preempted_handles.tolist()
    served = [row for row in rows if is_decode(row) and row.handle not in victims]
    if sum(1 + drafts[row.handle] for row in served) <= state.limits.max_tokens_per_iteration:
        for row in served:
            assert given_tokens.get(row.handle) == 1 + drafts[row.handle]
    if victims or state.full.iteration.pause_state is PauseState.PAUSED_NEW:
        assert all(rows[handle].running for handle in given_tokens), "nobody is admitted"
    assert_victims_are_needed(rows, drafts, victims, state)


def assert_victims_are_needed(rows: list[Row], drafts: dict[int, int], victims: list[int], state: State) -> None:
    """They are the tail of the running queue, in order from its end, and with one fewer nothing would go on."""
    running = [row for row in rows if row.running]
    assert victims == [row.handle for row in running[::-1]][: len(victims)]
    block_tokens = state.limits.kv_block_tokens

    def lacks(row: Row, tokens: int) -> int:
        return max(0, -(-(row.computed + tokens) // block_tokens) - row.blocks)

    def works(count: int) -> bool:
        left = running[: len(running) - count]
        free = state.full.iteration.free_kv_blocks + sum(row.blocks for row in running[len(left) :])
        free -= sum(lacks(row, 1 + drafts[row.handle]) for row in left if is_decode(row))
        prompts = [row for row in left if not is_decode(row)]
        someone = len(prompts) < len(left) or any(lacks(row, 1) <= free for row in prompts)
        return free >= 0 and (someone or not left)

    assert works(len(victims))
    assert not any(works(count) for count in range(len(victims)))


@SETTINGS
@given(states(scarce=False), models)
def test_the_guard_has_nothing_to_do_where_nothing_is_scarce(state: State, model: LatencyModel) -> None:
    for mode in MODES:
        session = session_for(model, state.limits, mode=mode)
        decide(session, state.full)
        assert session.guarded == 0


def test_a_chunk_takes_no_more_kv_blocks_than_are_free() -> None:
    """7 tokens are missing, 2 blocks of one token are free."""
    limits = EngineLimits(max_tokens_per_iteration=500, max_sequences=6, kv_blocks=14, kv_block_tokens=1)
    session = session_for(FAST, limits)
    allocation = decide(session, snapshot([(0, 19, 12, 0)], running=1, free=2))
    assert batch(allocation) == [(0, 2)]
    assert allocation.predicted_seconds == pytest.approx(0.001 + 2 * 20e-6)
    assert session.guarded == 0


def test_a_prompt_without_kv_blocks_does_not_stand_in_the_way_of_one_with_some() -> None:
    """Prompt 0 is shorter and needs a new block, prompt 1 has room for 10 tokens in its last one; all blocks are held.

    As prompt 1 can go on nobody is preempted; but prompt 0 gets the budget, in every iteration, and cannot use it.
    """
    limits = EngineLimits(max_tokens_per_iteration=8, max_sequences=4, kv_blocks=6, kv_block_tokens=16)
    session = session_for(FAST, limits)
    for number in range(3):
        full = snapshot([(0, 40, 16, 0), (1, 200, 70, 0)], running=2, free=0, epoch=number + 1, number=number)
        allocation = decide(session, full)
        assert len(allocation.handles) or len(allocation.preempted_handles)


def drain(session: Session, allocation: BatchAllocation, outputs: dict[int, int], limits: EngineLimits) -> int:
    """Executes what the session says to the letter until every request has its tokens; returns the preemptions."""
    preempted = 0
    for number in range(1, 1000):
        preempted += len(allocation.preempted_handles)
        assert len(allocation.handles), f"nobody is given anything in step {number - 1}"
        done = [handle for handle, output in tokens_after(session, allocation).items() if output >= outputs[handle]]
        held = blocks_after(session, allocation, limits)
        free = limits.kv_blocks - sum(blocks for handle, blocks in held.items() if handle not in done)
        for handle in done:
            del outputs[handle]
        if not outputs:
            return preempted
        allocation = decide(session, step(number, now=0.01 * number, free=free, epoch=1, finished_handles=ints(*done)))
    raise AssertionError("they block each other")


def tokens_after(session: Session, allocation: BatchAllocation) -> dict[int, int]:
    """Output tokens of each request once the batch is executed."""
    given_tokens = dict(batch(allocation))
    return {
        row.handle: row.output + (row.computed + given_tokens.get(row.handle, 0) >= row.prompt + row.output)
        for row in mirror_rows(session)
        if row.handle not in allocation.preempted_handles
    }


def blocks_after(session: Session, allocation: BatchAllocation, limits: EngineLimits) -> dict[int, int]:
    """KV blocks that each running request holds once the batch is executed."""
    given_tokens = dict(batch(allocation))
    return {
        row.handle: -(-(row.computed + given_tokens.get(row.handle, 0)) // limits.kv_block_tokens)
        for row in mirror_rows(session)
        if row.handle not in allocation.preempted_handles and (row.running or row.handle in given_tokens)
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("computed", [(48, 48), (32, 64), (64, 32), (32, 32, 32), (16, 16, 16, 48)])
def test_half_computed_prompts_that_hold_all_kv_blocks_end(mode: str, computed: tuple[int, ...]) -> None:
    """80 tokens each in an engine that holds 96: none could go on, so the last gives way, and comes back later."""
    limits = EngineLimits(max_tokens_per_iteration=500, max_sequences=6, kv_blocks=6, kv_block_tokens=16)
    rows = [(handle, 80, tokens, 0) for handle, tokens in enumerate(computed)]
    session = session_for(FAST, limits, mode=mode, max_tokens=500)
    allocation = decide(session, snapshot(rows, running=len(rows), free=0))
    assert allocation.preempted_handles.tolist() == [len(rows) - 1]
    assert drain(session, allocation, dict.fromkeys(range(len(rows)), 5), limits) >= 1


def test_preempted_requests_deadline_counts_the_tokens_that_it_has() -> None:
    """All arrived 3 s ago with 1 s to the first token, 50 ms to each further one: the 61st is due 1 s from now."""
    limits = EngineLimits(max_tokens_per_iteration=4096, max_sequences=16, kv_blocks=1000, kv_block_tokens=16)
    waiting = [Held(100, 0, output, age=3.0, ttft=1.0, tbt=0.05) for output in (0, 20, 60)]
    state = state_of([], waiting, limits)
    allocation = decide(session_for(FAST, limits, max_tokens=4096), state.full)
    assert sorted(allocation.demoted_handles.tolist()) == [0, 1]
    assert batch(allocation)[0] == (2, 160), "its prompt and its output so far are computed anew"
    assert dict(batch(allocation)) == {0: 100, 1: 120, 2: 160}


def test_preempted_request_competes_by_its_own_slack() -> None:
    """It is due in 20 ms, so everything cannot be computed first; alone with what it needs it is in time."""
    limits = EngineLimits(max_tokens_per_iteration=4096, max_sequences=16, kv_blocks=1000, kv_block_tokens=16)
    state = state_of([], [Held(100, 0, 40, age=2.98, ttft=1.0, tbt=0.05), Held(4000, 0, 0)], limits)
    allocation = decide(session_for(FAST, limits, max_tokens=4096), state.full)
    assert (allocation.decision_path, batch(allocation)) == ("constructor", [(0, 140)])


@pytest.mark.parametrize("mode", MODES)
def test_drafts_come_with_their_decode(mode: str) -> None:
    """A decode computes its token and its drafts; the drafts of a prompt have to wait."""
    limits = EngineLimits(max_tokens_per_iteration=4096, max_sequences=16, kv_blocks=1000, kv_block_tokens=16)
    state = state_of([Held(50, 50, 1, drafts=3), Held(50, 20, 0, drafts=3), Held(50, 50, 1)], [], limits)
    session = session_for(FAST, limits, mode=mode, max_tokens=500)
    allocation = decide(session, state.full)
    assert dict(batch(allocation)) == {0: 4, 1: 30, 2: 1}
    assert allocation.predicted_seconds == pytest.approx(0.001 + 35 * 20e-6)
    assert session.guarded == 0


def test_drafts_that_lack_kv_blocks_cost_the_last_request_its_place() -> None:
    """The first decode with its drafts needs one block more; none is free."""
    limits = EngineLimits(max_tokens_per_iteration=64, max_sequences=4, kv_blocks=8, kv_block_tokens=4)
    state = state_of([Held(14, 14, 1, drafts=2), Held(15, 15, 1)], [], limits)
    allocation = decide(session_for(FAST, limits), state.full)
    assert allocation.preempted_handles.tolist() == [1]
    assert batch(allocation) == [(0, 3)]
