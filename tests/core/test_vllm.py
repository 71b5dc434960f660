"""Policy `vllm`: worked examples of vLLM's order, and a plain-Python reference over random states."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.session.machine import Session
from slidingserve.contract.values import BatchAllocation, EngineLimits
from tests.strategies import batch, columns, decide, ints, mirror_rows, opened, snapshot, step

Rows = Sequence[tuple[int, int, int, int]]  # handle, prompt, computed, output

# Ten blocks of four tokens. A and B decode, C is in its prompt, D and E wait.
LIMITS = EngineLimits(max_tokens_per_iteration=100, max_sequences=8, kv_blocks=10, kv_block_tokens=4)
A, B, C, D, E = (1, 8, 8, 1), (2, 11, 12, 2), (3, 30, 20, 0), (4, 2, 0, 0), (5, 1, 0, 0)


def vllm(
    rows: Rows, running: int, free: int, limits: EngineLimits = LIMITS, **parameters: int | str
) -> tuple[Session, BatchAllocation]:
    """A session and its first decision, for the rows given."""
    texts = {name: str(value) for name, value in parameters.items()}
    session = opened(limits, policy="vllm", policy_parameters=texts)
    return session, decide(session, snapshot(rows, running, free))


def plan(rows: Rows, running: int, free: int, limits: EngineLimits = LIMITS, **parameters: int | str) -> object:
    """(batch, victims) for the rows given."""
    _, allocation = vllm(rows, running, free, limits, **parameters)
    return batch(allocation), allocation.preempted_handles.tolist()


def test_decodes_get_one_token_and_prompts_what_they_miss() -> None:
    assert plan([A, B, C, D, E], 3, 5) == ([(1, 1), (2, 1), (3, 10)], []), "D waits: no block is left"
    assert plan([A, B, C, D, E], 3, 6) == ([(1, 1), (2, 1), (3, 10), (4, 2)], [])
    assert plan([A, B, C, D, E], 3, 7) == ([(1, 1), (2, 1), (3, 10), (4, 2), (5, 1)], [])


def test_running_come_first_when_the_budget_is_small() -> None:
    assert plan([A, B, C, D], 3, 6, max_tokens=5) == ([(1, 1), (2, 1), (3, 3)], [])
    assert plan([A, B, C, D], 3, 6, max_tokens=2) == ([(1, 1), (2, 1)], [])
    assert plan([D, E, A], 0, 10, max_tokens=3) == ([(4, 2), (5, 1)], [])
    assert plan([C], 0, 10, max_tokens=7) == ([(3, 7)], []), "a prompt is cut into chunks"


def test_last_running_request_is_preempted_first() -> None:
    assert plan([A, B, C, D], 3, 0) == ([(1, 1), (2, 1)], [3])


def test_preemption_goes_on_until_the_block_fits() -> None:
    full = (6, 30, 28, 0)  # takes one block more for its last two tokens
    assert plan([full, (7, 8, 5, 0), (8, 5, 4, 0)], 3, 0) == ([(6, 2), (7, 3)], [8])
    long = (6, 40, 28, 0)  # takes three
    assert plan([long, (7, 5, 4, 0), (8, 5, 4, 0), (9, 5, 4, 0)], 4, 0) == ([(6, 12)], [9, 8, 7])


def test_request_that_is_last_itself_is_the_victim() -> None:
    assert plan([(7, 8, 7, 0), A], 2, 0) == ([(7, 1)], [1]), "the first fits into its block, the last does not"


def test_nobody_is_admitted_in_an_iteration_with_a_preemption() -> None:
    allocation = plan([A, B, C, D, E], 3, 0)
    assert allocation == ([(1, 1), (2, 1)], [3]), "five blocks came free, D and E would fit"


def test_victims_go_to_the_head_of_the_queue_and_start_anew() -> None:
    session, first = vllm([(6, 40, 28, 0), (7, 5, 4, 0), (8, 5, 4, 0), D], 3, 1)
    assert first.preempted_handles.tolist() == [8, 7]
    allocation = decide(session, step(1, free=0, epoch=1))
    rows = mirror_rows(session)
    assert [row.handle for row in rows] == [6, 7, 8, 4]
    assert [(row.running, row.computed, row.blocks) for row in rows[1:]] == [(False, 0, 0)] * 3
    assert batch(allocation) == []
    allocation = decide(session, step(2, free=10, epoch=1, finished_handles=ints(6)))
    assert batch(allocation) == [(7, 5), (8, 5), (4, 2)]


def test_recomputed_request_keeps_its_output() -> None:
    session, first = vllm([(6, 30, 28, 0), (7, 5, 7, 3)], 2, 0)
    assert first.preempted_handles.tolist() == [7]
    allocation = decide(session, step(1, free=2, epoch=1, finished_handles=ints(6)))
    assert batch(allocation) == [(7, 8)]
    decide(session, step(2, free=8, epoch=1))
    (row,) = mirror_rows(session)
    assert (row.computed, row.output) == (8, 4)


def test_seats_end_the_admission() -> None:
    assert plan([A, D, E], 1, 8, max_sequences=2) == ([(1, 1), (4, 2)], [])
    assert plan([A, B, D], 2, 4, max_sequences=1) == ([(1, 1), (2, 1)], []), "who runs keeps its seat"
    few = EngineLimits(100, 2, 10, 4)
    assert plan([A, D, E], 1, 8, few, max_sequences=50) == ([(1, 1), (4, 2)], []), "the engine's limit holds"


def test_first_that_does_not_fit_ends_the_admission() -> None:
    assert plan([(1, 20, 0, 0), E], 0, 4) == ([], [])


def test_whole_prompt_has_to_fit_unless_told_otherwise() -> None:
    row = [(1, 20, 0, 0)]
    assert plan(row, 0, 4, max_tokens=8) == ([], [])
    assert plan(row, 0, 4, max_tokens=8, reserve_full_prompt="false") == ([(1, 8)], [])
    assert plan(row, 0, 5, max_tokens=8) == ([(1, 8)], [])


def test_long_prompts_are_cut() -> None:
    assert plan([A, C, (4, 9, 0, 0)], 2, 8, long_prefill_tokens=4) == ([(1, 1), (3, 4), (4, 4)], [])


def reference(rows: Rows, running: int, free: int, limits: EngineLimits, longest: int, reserve: bool) -> object:
    """vLLM's rule once more, on lists."""
    size, budget = limits.kv_block_tokens, limits.max_tokens_per_iteration
    held = {row[0]: -(-row[2] // size) for row in rows[:running]}
    todo, chosen, victims = list(rows[:running]), [], []
    done: list[tuple[int, int, int, int]] = []
    while todo and budget:
        handle, prompt, computed, output = todo.pop(0)
        tokens = min(prompt + output - computed, budget, longest or budget)
        extra = max(0, -(-(computed + tokens) // size) - held[handle])
        while extra > free and todo:
            victims.append(todo.pop()[0])
            free += held[victims[-1]]
        if extra > free:
            victims.append(handle)
            break
        free, budget = free - extra, budget - tokens
        done.append((handle, prompt, computed, output))
        chosen.append((handle, tokens))
    if victims:
        return chosen, victims
    seats = limits.max_sequences - running
    for handle, prompt, computed, output in rows[running:]:
        tokens = min(prompt + output - computed, budget, longest or budget)
        whole = -(-(prompt + output) // size) if reserve else 0
        extra = -(-(computed + tokens) // size)
        if not budget or seats <= 0 or max(extra, whole) > free:
            break
        free, budget, seats = free - extra, budget - tokens, seats - 1
        chosen.append((handle, tokens))
    return chosen, victims


request_sizes = st.integers(1, 40).flatmap(
    lambda prompt: st.tuples(st.just(prompt), st.integers(0, 9), st.integers(0, prompt + 8))
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(request_sizes, min_size=1, max_size=9),
    st.integers(0, 6),
    st.integers(0, 14),
    st.builds(EngineLimits, st.integers(1, 60), st.integers(1, 7), st.just(200), st.integers(1, 8)),
    st.sampled_from([0, 0, 1, 5, 16]),
    st.booleans(),
)
def test_equals_the_reference(
    sizes: list[tuple[int, int, int]], running: int, free: int, limits: EngineLimits, longest: int, reserve: bool
) -> None:
    running = min(running, len(sizes), limits.max_sequences)
    rows = [
        (handle, prompt, min(computed, prompt + output - 1) if handle < running else 0, output)
        for handle, (prompt, output, computed) in enumerate(sizes)
    ]
    expected = reference(rows, running, free, limits, longest, reserve)
    given = plan(rows, running, free, limits, long_prefill_tokens=longest, reserve_full_prompt=str(reserve))
    assert given == expected


def test_limits_by_parameter_equal_limits_of_the_engine() -> None:
    rows = [(handle, 9 + handle, 0, 0) for handle in range(12)]
    small = EngineLimits(30, 2, 50, 4)
    assert plan(rows, 0, 50, small) == plan(rows, 0, 50, EngineLimits(90, 9, 50, 4), max_tokens=30, max_sequences=2)
    assert plan(rows, 0, 50, small, max_tokens=10**6, max_sequences=10**6) == plan(rows, 0, 50, small)


@pytest.mark.parametrize("text", ["true", "True", "false"])
def test_switch_is_read_in_any_case(text: str) -> None:
    opened(policy="vllm", policy_parameters={"reserve_full_prompt": text})


def test_allocation_names_its_policy() -> None:
    allocation = decide(opened(policy="vllm"), step(0, arrived=columns([1], [3])))
    assert (allocation.policy_version, allocation.model_version, allocation.decision_path) == ("vllm/1", "", "fcfs")
