"""Any message gets an answer; one that is refused changes nothing, one that is accepted leaves a sound mirror."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.session.machine import State
from slidingserve.contract.values import (
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    ErrorReason,
    IterationState,
    PauseState,
    ProgressColumns,
    RequestColumns,
    ResyncRequired,
    SessionError,
    Snapshot,
    Step,
)
from tests.strategies import LIMITS, decide, mirror_rows, opened, snapshot

whole = st.one_of(st.integers(0, 13), st.sampled_from([-1, -(2**63), 2**31, 2**32 - 1, 2**32, 2**63 - 1]))
real = st.one_of(st.floats(0.1, 2.0), st.sampled_from([0.0, -1.0, 1e10, float("nan"), float("inf")]))
reals = {"arrival_seconds", "ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds", "weight"}


def column(values: st.SearchStrategy[Any], kind: type, length: int) -> st.SearchStrategy[Any]:
    """A column of that length, as a rule."""
    lengths = st.sampled_from([length] * 8 + [0, 1, length + 1])
    lists = lengths.flatmap(lambda size: st.lists(values, min_size=size, max_size=size))
    return lists.map(lambda listed: np.array(listed, kind))


@st.composite
def requests(draw: st.DrawFn, first: int) -> RequestColumns:
    count = draw(st.integers(0, 4))
    start = draw(st.sampled_from([first] * 6 + [first - 1, 0]))
    listed = np.array([start + 1 + position for position in range(count)], np.int64)
    if draw(st.integers(0, 5)) == 0:
        listed = draw(column(whole, np.int64, count))
    sane = draw(st.integers(0, 2)) > 0
    fields: dict[str, Any] = {}
    for name in RequestColumns._fields[1:13]:
        values = real if name in reals else whole
        if sane:
            values = st.floats(0.1, 2.0) if name in reals else st.integers(0, 1)
        if sane and name == "prompt_tokens":
            values = st.integers(2, 30)
        if name in ("arrival_seconds", "prompt_tokens") or draw(st.integers(0, 3)) == 0:
            kind = np.float64 if name in reals else np.int64
            fields[name] = draw(column(values, kind, count))
    for name in ("request_ids", "class_names", "tenant_names"):
        fields[name] = tuple(draw(st.lists(st.just("x"), max_size=2))) if draw(st.integers(0, 3)) == 0 else ()
    return RequestColumns(listed, **fields)


@st.composite
def progresses(draw: st.DrawFn, handles: st.SearchStrategy[Any]) -> ProgressColumns:
    listed = draw(handles)
    count = len(listed)
    small = st.integers(0, 9)
    values = small if draw(st.integers(0, 2)) else whole
    flight = draw(column(values, np.int64, count)) if draw(st.integers(0, 3)) == 0 else np.zeros(0, np.int64)
    return ProgressColumns(listed, draw(column(values, np.int64, count)), draw(column(values, np.int64, count)), flight)


known = st.sampled_from([7, 3, 9, 7, 3, 9, 7, 3, 9, 8])
some = st.lists(known, max_size=3).map(lambda listed: np.array(listed, np.int64))


@st.composite
def iterations(draw: st.DrawFn, epoch: int, number: int) -> IterationState:
    return IterationState(
        draw(st.sampled_from([epoch] * 9 + [0, epoch + 1])),
        draw(st.sampled_from([number] * 9 + [0, number + 1])),
        draw(st.sampled_from([1.0] * 9 + [0.5, float("nan")])),
        draw(st.sampled_from([30, 5, 2, 0] * 4 + [41, -1])),
        pause_state=draw(st.sampled_from([PauseState.RUNNING] * 4 + list(PauseState))),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    exactly = draw(st.booleans())
    applied = None
    if not exactly or draw(st.integers(0, 9)) == 0:
        handles = draw(some)
        tokens = draw(column(st.integers(1, 3) if draw(st.integers(0, 3)) else whole, np.int64, len(handles)))
        applied = AppliedBatch(handles, tokens, draw(some))
    return Step(
        draw(iterations(1, 1)),
        exactly,
        applied,
        draw(st.none() | progresses(some)),
        draw(some) if draw(st.booleans()) else np.zeros(0, np.int64),
        draw(st.none() | requests(9)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    columns = draw(requests(draw(st.integers(0, 20))))
    handles = st.sampled_from([np.zeros(0, np.int64), columns.handles])
    progress = draw(progresses(st.just(columns.handles)))._replace(handles=draw(handles))
    return Snapshot(draw(iterations(2, 5)), columns, draw(st.sampled_from([0, 1, 1, 2, -1])), progress)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.one_of(steps(), steps(), snapshots()))
def test_any_message_gets_an_answer(message: Step | Snapshot) -> None:
    session = opened()
    decide(session, snapshot([(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)], 2, 37, epoch=1, number=0, now_seconds=1.0))
    before = mirror_rows(session), list(session.mirror.class_names), list(session.mirror.tenant_names)
    answer = session.handle(message)
    after = mirror_rows(session)
    if isinstance(answer, BatchAllocation):
        assert session.state is State.SYNCED
        assert all(row.computed <= row.prompt + row.output and row.prompt > 0 for row in after)
        assert all(row.ttft > 0 and row.tbt > 0 and row.ttlt >= 0 for row in after)
        budget, free = LIMITS.max_tokens_per_iteration, message.iteration.free_kv_blocks
        assert int(answer.tokens.sum()) <= budget
        freed = {row.handle: row.blocks for row in after}
        assert free + sum(freed[handle] for handle in answer.preempted_handles.tolist()) >= 0
        return
    assert isinstance(answer, SessionError | ResyncRequired)
    assert answer.reason is not ErrorReason.INTERNAL
    assert session.state is State.LOST
    assert (after, session.mirror.class_names, session.mirror.tenant_names) == before
    if isinstance(answer, SessionError):
        assert answer.field.startswith(("step.", "snapshot."))
        assert answer.value != "rows", "the checks find what the fast way in has refused"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(requests(-1))
def test_step_and_snapshot_take_the_same_requests(arrived: RequestColumns) -> None:
    """Otherwise an engine could bring a request that bars it from ever coming back into step."""
    count = len(arrived.handles)
    zeros = np.zeros(count, np.int64)
    progress = ProgressColumns(NO_INTS, zeros, zeros)
    by_step = opened().handle(Step(IterationState(0, 0, 0.0, 0), arrived=arrived))
    by_snapshot = opened().handle(Snapshot(IterationState(1, 0, 0.0, 0), arrived, 0, progress))
    if isinstance(by_step, BatchAllocation):
        assert isinstance(by_snapshot, BatchAllocation)
    elif isinstance(by_snapshot, BatchAllocation):
        assert isinstance(by_step, SessionError)
        assert by_step.reason is ErrorReason.DUPLICATE_HANDLE, "only the order of handles is free in a snapshot"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.one_of(steps(), snapshots()), max_size=6))
def test_after_any_messages_a_snapshot_leads_back(messages: list[Step | Snapshot]) -> None:
    session = opened()
    for message in messages:
        session.handle(message)
    full = snapshot([(70, 8, 8, 1), (30, 20, 4, 0), (90, 5, 0, 0)], 2, 37, epoch=9, number=0, now_seconds=9.0)
    allocation = decide(session, full)
    assert allocation.handles.tolist() == [70, 30, 90]
    assert [row.handle for row in mirror_rows(session)] == [70, 30, 90]
