"""What fields of the contract mean: pauses, modes, draining, SLO defaults, cached prefixes, drafts, order of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import (
    NO_FLOATS,
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    Mode,
    OpenSession,
    PauseState,
    ProgressColumns,
    SessionOpened,
    SloDefaults,
    Snapshot,
)
from tests.strategies import LIMITS, batch, columns, decide, floats, ints, mirror_rows, opened, snapshot, step

DECODING, PROMPT, WAITING = (7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)  # handle, prompt, computed, output


def at_work(free: int = 36, **opening: Any) -> tuple[Session, BatchAllocation]:
    """Two run, one waits; the next step is 1 of epoch 1."""
    session = opened(**opening)
    return session, decide(session, snapshot([DECODING, PROMPT, WAITING], running=2, free=free))


def paused(state: PauseState, free: int = 36) -> tuple[Session, BatchAllocation]:
    session = opened()
    full = snapshot([DECODING, PROMPT, WAITING], running=2, free=free, pause_state=state)
    return session, decide(session, full)


def by_handle(session: Session) -> dict[int, tuple[bool, int, int]]:
    """(runs, computed, output) by handle."""
    return {row.handle: (row.running, row.computed, row.output) for row in mirror_rows(session)}


def applied(handles: list[int], tokens: list[int], victims: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"applied_exactly": False, "applied": AppliedBatch(ints(*handles), ints(*tokens), ints(*victims))}


def test_paused_new_lets_running_go_on_and_admits_nobody() -> None:
    session, allocation = paused(PauseState.PAUSED_NEW)
    assert batch(allocation) == [(7, 1), (3, 16)]
    resumed = decide(session, step(1, free=31, epoch=1))
    assert batch(resumed) == [(7, 1), (3, 1), (9, 5)]


def test_victim_of_a_paused_engine_is_not_admitted_again() -> None:
    session, allocation = paused(PauseState.PAUSED_NEW, free=0)
    assert (batch(allocation), allocation.preempted_handles.tolist()) == ([(7, 1)], [3])
    pause = {"pause_state": PauseState.PAUSED_NEW}
    assert batch(decide(session, step(1, free=30, epoch=1, iteration=pause))) == [(7, 1)]
    assert batch(decide(session, step(2, free=30, epoch=1))) == [(7, 1), (3, 20), (9, 5)]


def test_paused_all_is_an_empty_answer_and_changes_nothing() -> None:
    session, allocation = paused(PauseState.PAUSED_ALL)
    assert len(allocation.handles) == len(allocation.preempted_handles) == 0
    before = mirror_rows(session)
    again = decide(session, step(1, free=36, epoch=1, iteration={"pause_state": PauseState.PAUSED_ALL}))
    assert batch(again) == []
    assert batch(decide(session, step(2, free=36, epoch=1))) == [(7, 1), (3, 16), (9, 5)]
    assert mirror_rows(session) == before


def test_mode_off_decides_nothing_and_follows_what_is_applied() -> None:
    session, allocation = at_work(mode=Mode.OFF)
    assert (batch(allocation), allocation.mode, allocation.decision_path) == ([], Mode.OFF, "")
    answer = decide(session, step(1, free=30, epoch=1, **applied([7, 3], [1, 9])))
    assert (batch(answer), answer.mode) == ([], Mode.OFF)
    assert by_handle(session) == {7: (True, 9, 2), 3: (True, 13, 0), 9: (False, 0, 0)}


def test_mode_shadow_decides_and_follows_what_is_applied() -> None:
    session, allocation = at_work(mode=Mode.SHADOW)
    _, active = at_work(mode=Mode.ACTIVE)
    assert batch(allocation) == batch(active) != []
    assert (allocation.mode, active.mode) == (Mode.SHADOW, Mode.ACTIVE)
    decide(session, step(1, free=34, epoch=1, **applied([3, 9], [2, 5])))
    assert by_handle(session) == {7: (True, 8, 1), 3: (True, 6, 0), 9: (True, 5, 1)}


def test_mode_left_open_is_active() -> None:
    session = Session("open")
    answer = session.handle(OpenSession(LIMITS, mode=Mode.UNSPECIFIED))
    assert isinstance(answer, SessionOpened)
    assert answer.mode is Mode.ACTIVE


def test_draining_is_told_in_every_answer() -> None:
    session, allocation = at_work()
    assert not allocation.draining
    session.draining = True
    assert decide(session, step(1, free=30, epoch=1)).draining
    assert batch(decide(session, step(2, free=30, epoch=1))) != []


def test_phases_are_timed_by_the_clock_that_is_handed_in() -> None:
    ticks = iter(range(100))
    session = Session("ticks", clock=lambda: float(next(ticks)))
    session.handle(OpenSession(LIMITS))
    timings = decide(session, step(0)).phase_timings
    assert timings is not None
    assert timings == (0.0, 1.0, 1.0, 1.0)
    assert timings.core_seconds == 3.0


SIDECAR = SloDefaults(2.0, 0.2, 20.0)


@pytest.mark.parametrize(
    ("own", "session_slos", "expected"),
    [
        ((3.0, 0.3, 30.0), SloDefaults(1.0, 0.1, 10.0), (3.0, 0.3, 30.0)),
        ((0.0, 0.0, 0.0), SloDefaults(1.0, 0.1, 10.0), (1.0, 0.1, 10.0)),
        ((0.0, 0.3, 0.0), SloDefaults(1.0, 0.1, 0.0), (1.0, 0.3, 20.0)),
        ((0.0, 0.0, 0.0), SloDefaults(), (2.0, 0.2, 20.0)),
        (None, SloDefaults(1.0, 0.1, 10.0), (1.0, 0.1, 10.0)),
        (None, SloDefaults(0.0, 0.1, 0.0), (2.0, 0.1, 20.0)),
    ],
)
@pytest.mark.parametrize("by_snapshot", [False, True])
def test_absent_and_zero_slos_fall_back(
    own: tuple[float, float, float] | None,
    session_slos: SloDefaults,
    expected: tuple[float, float, float],
    by_snapshot: bool,
) -> None:
    session = opened(defaults=SessionDefaults(slos=SIDECAR), slo_defaults=session_slos)
    given = [NO_FLOATS] * 3 if own is None else [floats(value) for value in own]
    arrived = columns([1], [5])._replace(ttft_slo_seconds=given[0], tbt_slo_seconds=given[1], ttlt_slo_seconds=given[2])
    if by_snapshot:
        decide(session, Snapshot(step(0, epoch=1).iteration, arrived, 0, ProgressColumns(NO_INTS, ints(0), ints(0))))
    else:
        decide(session, step(0, arrived=arrived))
    (row,) = mirror_rows(session)
    assert (row.ttft, row.tbt, row.ttlt) == expected


def test_time_to_last_token_may_be_none() -> None:
    session = opened()
    decide(session, step(0, arrived=columns([1], [5])))
    (row,) = mirror_rows(session)
    assert row.ttlt == 0.0
    assert (row.ttft, row.tbt) == (SessionDefaults().slos.ttft_slo_seconds, SessionDefaults().slos.tbt_slo_seconds)


def test_cached_prefix_is_not_computed_again_but_takes_blocks() -> None:
    arrived = columns([1], [40], cached_prefix_tokens=ints(16))
    assert batch(decide(opened(), step(0, arrived=arrived))) == [(1, 24)]
    assert batch(decide(opened(), step(0, free=9, arrived=arrived))) == []
    assert batch(decide(opened(), step(0, free=10, arrived=arrived))) == [(1, 24)]
    session = opened()
    decide(session, step(0, arrived=arrived))
    decide(session, step(1, free=30))
    (row,) = mirror_rows(session)
    assert (row.computed, row.output, row.blocks) == (40, 1, 10)


def test_victim_loses_its_cached_prefix_until_the_engine_tells_otherwise() -> None:
    session = opened()
    decide(session, step(0, arrived=columns([1], [40], cached_prefix_tokens=ints(16))))
    decide(session, step(1, free=40, **applied([1], [8])))
    decide(session, step(2, free=40, **applied([], [], (1,))))
    assert by_handle(session) == {1: (False, 0, 0)}
    told = ProgressColumns(ints(1), ints(24), ints(0))
    session.handle(step(3, free=40, applied_exactly=False, progress=told))
    assert by_handle(session) == {1: (False, 24, 0)}


def test_smaller_cache_hit_is_told_by_progress() -> None:
    session = opened()
    assert batch(decide(session, step(0, arrived=columns([1], [40], cached_prefix_tokens=ints(16))))) == [(1, 24)]
    told = ProgressColumns(ints(1), ints(24), ints(0))
    assert batch(decide(session, step(1, free=34, progress=told))) == [(1, 16)]
    assert mirror_rows(session)[0].blocks == 6


def test_engine_that_finds_nothing_in_its_cache_may_compute_the_whole_prompt() -> None:
    """The prefix was expected, not promised: an engine on its own policy reports what it really gave."""
    session = opened()
    decide(session, step(0, arrived=columns([1, 2], [40, 40], cached_prefix_tokens=ints(16, 16))))
    told = ProgressColumns(ints(2), ints(20), ints(0))
    decide(session, step(1, free=25, progress=told, **applied([1, 2], [40, 20])))
    assert by_handle(session) == {1: (True, 40, 1), 2: (True, 20, 0)}


def test_snapshot_tells_of_waiting_requests_what_their_progress_says() -> None:
    session = opened()
    full = snapshot([(1, 40, 16, 0)], running=0, free=40)
    assert batch(decide(session, full)) == [(1, 24)]


def test_decode_carries_its_drafts_a_prompt_does_not() -> None:
    session = opened()
    arrived = columns([1, 2], [6, 9], speculative_tokens=ints(3, 0))
    assert batch(decide(session, step(0, arrived=arrived))) == [(1, 6), (2, 9)]
    assert batch(decide(session, step(1, free=35))) == [(1, 4), (2, 1)]
    rejected = decide(session, step(2, free=34))
    assert by_handle(session) == {1: (True, 7, 2), 2: (True, 10, 2)}
    assert batch(rejected) == [(1, 4), (2, 1)]
    two_accepted = ProgressColumns(ints(1), ints(10), ints(5))
    decide(session, step(3, free=34, progress=two_accepted))
    assert by_handle(session) == {1: (True, 10, 5), 2: (True, 11, 3)}


def test_drafts_take_budget_and_blocks() -> None:
    rows = [(1, 8, 8, 1), (2, 8, 8, 1)]
    full = snapshot(rows, running=2, free=3)
    drafts = full._replace(requests=full.requests._replace(speculative_tokens=ints(3, 4)))
    small = opened(policy="vllm", policy_parameters={"max_tokens": "6"})
    assert batch(decide(small, drafts)) == [(1, 4), (2, 2)]
    assert batch(decide(opened(), drafts)) == [(1, 4), (2, 5)]
    tight = drafts._replace(iteration=drafts.iteration._replace(free_kv_blocks=1))
    allocation = decide(opened(), tight)
    assert (batch(allocation), allocation.preempted_handles.tolist()) == ([(1, 4)], [2])


def test_engine_may_apply_a_decode_with_drafts() -> None:
    session = opened()
    full = snapshot([(1, 8, 8, 1)], running=1, free=30)
    decide(session, full._replace(requests=full.requests._replace(speculative_tokens=ints(3))))
    accepted = ProgressColumns(ints(1), ints(12), ints(5))
    decide(session, step(1, free=30, epoch=1, progress=accepted, **applied([1], [4])))
    assert by_handle(session) == {1: (True, 12, 5)}


def test_parts_of_a_step_apply_in_the_order_of_the_contract() -> None:
    """Preemption, batch, progress, finished, arrived."""
    session, _ = at_work()
    message = step(
        1,
        free=33,
        epoch=1,
        progress=ProgressColumns(ints(9, 7), ints(4, 9), ints(0, 2)),
        finished_handles=ints(7),
        arrived=columns([20, 21], [2, 3]),
        **applied([7, 3, 9], [1, 6, 5], (3,)),
    )
    decide(session, message)
    rows = mirror_rows(session)
    assert [(row.handle, row.running, row.computed, row.output) for row in rows] == [
        (3, True, 6, 0),
        (9, True, 4, 0),
        (20, False, 0, 0),
        (21, False, 0, 0),
    ]


def test_nothing_applied_is_nothing_changed() -> None:
    session, allocation = at_work()
    before = mirror_rows(session)
    again = decide(session, step(1, free=36, epoch=1, applied_exactly=False))
    assert mirror_rows(session) == before
    assert batch(again) == batch(allocation)


def test_tokens_in_flight_are_kept_until_told_otherwise() -> None:
    session, _ = at_work()
    session.handle(step(1, free=36, epoch=1, progress=ProgressColumns(ints(7), ints(9), ints(2), ints(1))))
    queues = session.mirror.queues
    assert queues.requests["in_flight"][queues.slot(7)] == 1
    session.handle(step(2, free=36, epoch=1, progress=ProgressColumns(ints(7), ints(10), ints(3))))
    assert queues.requests["in_flight"][queues.slot(7)] == 0


def test_names_are_sent_once_and_start_anew_with_a_snapshot() -> None:
    session = opened()
    first = columns([1], [5], class_index=ints(1), class_names=("chat",), tenant_index=ints(1), tenant_names=("we",))
    decide(session, step(0, arrived=first))
    decide(session, step(1, free=38, arrived=columns([2, 3], [5, 5], class_index=ints(2, 1), class_names=("code",))))
    assert [row.class_name for row in mirror_rows(session)] == ["chat", "code", "chat"]
    full = snapshot([(2, 5, 0, 0)], running=0, free=40)
    decide(session, full._replace(requests=full.requests._replace(class_index=ints(1), class_names=("code",))))
    assert [row.class_name for row in mirror_rows(session)] == ["code"]
    assert session.mirror.tenant_names == [""]


def test_handle_is_never_used_again_even_after_a_snapshot_without_it() -> None:
    session, _ = at_work()
    decide(session, snapshot([], running=0, free=40, epoch=2))
    answer = session.handle(step(1, free=40, epoch=2, arrived=columns([9], [5])))
    assert getattr(answer, "field", "") == "step.arrived.handles[0]"
    decide(session, snapshot([(9, 5, 0, 0)], running=0, free=40, epoch=3))
    decide(session, step(1, free=38, epoch=3, arrived=columns([10], [5])))


def test_zero_sized_columns_do_no_harm() -> None:
    session, _ = at_work()
    empty = columns([], [])
    message = step(
        1,
        free=36,
        epoch=1,
        arrived=empty,
        progress=ProgressColumns(NO_INTS, NO_INTS, NO_INTS),
        **applied([], []),
    )
    assert batch(decide(session, message)) == [(7, 1), (3, 16), (9, 5)]


def test_read_only_columns_are_fine() -> None:
    """As the codec makes them from bytes."""
    session = opened()
    frozen = [np.frombuffer(np.array([value]).tobytes(), np.int64) for value in (1, 5)]
    arrived = columns([1], [5])._replace(handles=frozen[0], prompt_tokens=frozen[1])
    decide(session, step(0, arrived=arrived))
    frozen_batch = AppliedBatch(frozen[0], frozen[1])
    decide(session, step(1, free=38, applied_exactly=False, applied=frozen_batch))
    decide(session, step(2, free=40, finished_handles=frozen[0]))
    assert mirror_rows(session) == []
