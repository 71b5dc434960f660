"""Bad input: the answer names the reason, the field, the value and a remedy in words, and nothing changes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sidecar.session.machine import Session
from slidingserve.contract.values import (
    NO_INTS,
    AppliedBatch,
    BatchAllocation,
    EngineLimits,
    ErrorReason,
    OpenSession,
    ProgressColumns,
    RequestColumns,
    SessionError,
    SloDefaults,
    Snapshot,
    Step,
)
from tests.strategies import LIMITS, columns, decide, floats, ints, mirror_rows, opened, snapshot, step

NAN, INF = float("nan"), float("inf")
INVALID, UNKNOWN = ErrorReason.INVALID_FIELD, ErrorReason.UNKNOWN_HANDLE
DUPLICATE, IMPOSSIBLE = ErrorReason.DUPLICATE_HANDLE, ErrorReason.IMPOSSIBLE_PROGRESS
TWO = columns([20, 21], [6, 7])
BOUNDED = EngineLimits(64, 8, 40, 4, max_model_tokens=100)

Case = tuple[dict[str, Any], ErrorReason, str, str]


def assert_says(answer: object, reason: ErrorReason, field: str, value: str) -> None:
    """The answer is an error with that reason, field and value, and its remedy is words."""
    assert isinstance(answer, SessionError), answer
    assert (answer.reason, answer.field, answer.value) == (reason, field, value)
    assert len(re.findall(r"[A-Za-z]{2,}", answer.remedy)) >= 3, answer.remedy
    assert not re.search(r"array|dtype|Traceback|object at|<class", answer.message)
    for part in (answer.field, answer.value, answer.remedy):
        assert part in answer.message


def at_work() -> Session:
    """Expects step 1 at 1 s: handle 7 decodes, 3 is in its prompt (4 of 20), 9 waits; 8 was there and is gone."""
    session = opened(BOUNDED)
    decide(session, step(0, now=1.0, arrived=columns([3, 7, 8, 9], [20, 8, 2, 5])))
    rows = [(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)]
    decide(session, snapshot(rows, running=2, free=37, epoch=1, number=0, now_seconds=1.0))
    return session


def refuse(message: Step | Snapshot, reason: ErrorReason, field: str, value: str) -> None:
    """The session refuses the message, keeps its mirror, and goes on after a snapshot."""
    session = at_work()
    before = mirror_rows(session), list(session.mirror.class_names), list(session.mirror.tenant_names)
    assert_says(session.handle(message), reason, field, value)
    assert (mirror_rows(session), session.mirror.class_names, session.mirror.tenant_names) == before
    decide(session, snapshot([(7, 8, 8, 1)], running=1, free=38, epoch=2, number=1, now_seconds=1.0))


def two(**more: Any) -> RequestColumns:
    """Two requests that could arrive, with some columns changed."""
    return TWO._replace(**more)


def next_step(**more: Any) -> Step:
    return step(1, now=1.0, free=37, epoch=1, **more)


def applied(handles: list[int], tokens: list[int], victims: tuple[int, ...] = ()) -> dict[str, Any]:
    batch = AppliedBatch(ints(*handles), ints(*tokens), ints(*victims))
    return {"applied_exactly": False, "applied": batch}


def progress(handles: list[int], computed: list[int], output: list[int], **more: Any) -> dict[str, Any]:
    return {"progress": ProgressColumns(ints(*handles), ints(*computed), ints(*output), **more)}


STEPS: dict[str, Case] = {
    "finished, never seen": ({"finished_handles": ints(7, 99)}, UNKNOWN, "step.finished_handles[1]", "99"),
    "finished, gone": ({"finished_handles": ints(8)}, UNKNOWN, "step.finished_handles[0]", "8"),
    "finished twice": ({"finished_handles": ints(7, 3, 7)}, DUPLICATE, "step.finished_handles[2]", "7"),
    "applied, never seen": (applied([7, 50], [1, 1]), UNKNOWN, "step.applied.handles[1]", "50"),
    "applied twice": (applied([7, 3, 3], [1, 1, 1]), DUPLICATE, "step.applied.handles[2]", "3"),
    "applied, more than missing": (applied([3, 9], [16, 6]), IMPOSSIBLE, "step.applied.tokens[1]", "6"),
    "applied to a decode": (applied([7], [2]), IMPOSSIBLE, "step.applied.tokens[0]", "2"),
    "applied nothing": (applied([7], [0]), IMPOSSIBLE, "step.applied.tokens[0]", "0"),
    "applied negative": (applied([3], [-4]), IMPOSSIBLE, "step.applied.tokens[0]", "-4"),
    "applied to a victim": (applied([3], [21], (3,)), IMPOSSIBLE, "step.applied.tokens[0]", "21"),
    "applied columns": (applied([7, 3], [1]), INVALID, "step.applied.tokens", "1 entries"),
    "applied columns, longer": (applied([7], [1, 1]), INVALID, "step.applied.tokens", "2 entries"),
    "applied and exactly": ({**applied([7], [1]), "applied_exactly": True}, INVALID, "step.applied", "set"),
    "victim, never seen": (applied([], [], (44,)), UNKNOWN, "step.applied.preempted_handles[0]", "44"),
    "victim twice": (applied([], [], (7, 7)), DUPLICATE, "step.applied.preempted_handles[1]", "7"),
    "victim that waits": (applied([], [], (7, 9)), INVALID, "step.applied.preempted_handles[1]", "9"),
    "progress, never seen": (progress([7, 60], [8, 1], [1, 0]), UNKNOWN, "step.progress.handles[1]", "60"),
    "progress twice": (progress([7, 7], [8, 8], [1, 1]), DUPLICATE, "step.progress.handles[1]", "7"),
    "progress beyond the prompt": (progress([3], [21], [0]), IMPOSSIBLE, "step.progress.computed_tokens[0]", "21"),
    "progress negative": (progress([3], [-1], [0]), INVALID, "step.progress.computed_tokens[0]", "-1"),
    "progress, negative output": (progress([7, 3], [8, 2], [1, -2]), INVALID, "step.progress.output_tokens[1]", "-2"),
    "progress columns": (progress([7, 3], [8], [1, 0]), INVALID, "step.progress.computed_tokens", "1 entries"),
    "progress without output": (progress([7, 3], [8, 2], []), INVALID, "step.progress.output_tokens", "0 entries"),
    "progress, flight columns": (
        progress([7, 3], [8, 2], [1, 0], in_flight_tokens=ints(1)),
        INVALID,
        "step.progress.in_flight_tokens",
        "1 entries",
    ),
    "progress, negative flight": (
        progress([7], [8], [1], in_flight_tokens=ints(-1)),
        INVALID,
        "step.progress.in_flight_tokens[0]",
        "-1",
    ),
    "arrived, live": ({"arrived": columns([9], [5])}, DUPLICATE, "step.arrived.handles[0]", "9"),
    "arrived, was gone": ({"arrived": columns([8], [5])}, DUPLICATE, "step.arrived.handles[0]", "8"),
    "arrived twice": ({"arrived": columns([10, 10], [5, 5])}, DUPLICATE, "step.arrived.handles[1]", "10"),
    "arrived in descent": ({"arrived": columns([12, 11], [5, 5])}, DUPLICATE, "step.arrived.handles[1]", "11"),
    "arrived, negative": ({"arrived": columns([-1], [5])}, INVALID, "step.arrived.handles[0]", "-1"),
    "arrived, no handle": ({"arrived": columns([2**32], [5])}, INVALID, "step.arrived.handles[0]", "4294967296"),
    "empty prompt": ({"arrived": columns([20, 21], [5, 0])}, INVALID, "step.arrived.prompt_tokens[1]", "0"),
    "negative prompt": ({"arrived": columns([20], [-3])}, INVALID, "step.arrived.prompt_tokens[0]", "-3"),
    "prompt too long": ({"arrived": columns([20], [101])}, INVALID, "step.arrived.prompt_tokens[0]", "101"),
    "no prompts": (
        {"arrived": TWO._replace(prompt_tokens=NO_INTS)},
        INVALID,
        "step.arrived.prompt_tokens",
        "0 entries",
    ),
    "no arrivals": (
        {"arrived": TWO._replace(arrival_seconds=floats())},
        INVALID,
        "step.arrived.arrival_seconds",
        "0 entries",
    ),
    "no handles": ({"arrived": TWO._replace(handles=NO_INTS)}, INVALID, "step.arrived.arrival_seconds", "2 entries"),
    "whole prompt cached": (
        {"arrived": TWO._replace(cached_prefix_tokens=ints(0, 7))},
        IMPOSSIBLE,
        "step.arrived.cached_prefix_tokens[1]",
        "7",
    ),
    "more than the prompt cached": (
        {"arrived": TWO._replace(cached_prefix_tokens=ints(0, 8))},
        IMPOSSIBLE,
        "step.arrived.cached_prefix_tokens[1]",
        "8",
    ),
    "class without a name": (
        {"arrived": TWO._replace(class_index=ints(1, 2), class_names=("chat",))},
        INVALID,
        "step.arrived.class_index[1]",
        "2",
    ),
    "tenant without a name": (
        {"arrived": TWO._replace(tenant_index=ints(1, 0))},
        INVALID,
        "step.arrived.tenant_index[0]",
        "1",
    ),
    "an id too few": ({"arrived": TWO._replace(request_ids=("a",))}, INVALID, "step.arrived.request_ids", "1 ids"),
    "an id too many": (
        {"arrived": TWO._replace(request_ids=("a", "b", "c"))},
        INVALID,
        "step.arrived.request_ids",
        "3 ids",
    ),
    "clock going back": (
        {"iteration": {"now_seconds": 0.5}},
        INVALID,
        "step.iteration.now_seconds",
        "0.5",
    ),
    "more blocks than all": ({"iteration": {"free_kv_blocks": 41}}, INVALID, "step.iteration.free_kv_blocks", "41"),
    "negative blocks": ({"iteration": {"free_kv_blocks": -1}}, INVALID, "step.iteration.free_kv_blocks", "-1"),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_bad_step(case: Case) -> None:
    more, reason, field, value = case
    refuse(next_step(**more), reason, field, value)


@pytest.mark.parametrize("name", ["now_seconds", "last_iteration_seconds", "answer_within_seconds"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, 1e300])
def test_bad_seconds_of_an_iteration(name: str, value: float) -> None:
    bad = {"iteration": {name: value}}
    refuse(next_step(**bad), INVALID, f"step.iteration.{name}", str(value))
    full = snapshot([(7, 8, 8, 1)], running=1, free=38, epoch=2, number=1, **{name: value})
    refuse(full, INVALID, f"snapshot.iteration.{name}", str(value))


REAL_COLUMNS = ["arrival_seconds", "ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds", "weight"]
WHOLE_COLUMNS = ["max_output_tokens", "speculative_tokens", "class_index", "tenant_index", "cached_prefix_tokens"]


BAD_REALS = [(name, value) for name in REAL_COLUMNS for value in (NAN, INF, -INF, 1e300)]
BAD_REALS += [(name, -1.0) for name in REAL_COLUMNS if name != "arrival_seconds"]


@pytest.mark.parametrize(("name", "value"), [*BAD_REALS, ("weight", 0.0)])
def test_bad_real_column(name: str, value: float) -> None:
    bad = two(**{name: floats(1.0, value)})
    refuse(next_step(arrived=bad), INVALID, f"step.arrived.{name}[1]", str(value))
    full = Snapshot(next_step().iteration._replace(epoch=2), bad, 1, ProgressColumns(NO_INTS, ints(1, 0), ints(0, 0)))
    refuse(full, INVALID, f"snapshot.requests.{name}[1]", str(value))


@pytest.mark.parametrize("name", WHOLE_COLUMNS)
@pytest.mark.parametrize("value", [-1, -(2**63), 2**62])
def test_bad_whole_column(name: str, value: int) -> None:
    bad = two(**{name: ints(0, value)})
    refuse(next_step(arrived=bad), INVALID, f"step.arrived.{name}[1]", str(value))
    full = Snapshot(next_step().iteration._replace(epoch=2), bad, 1, ProgressColumns(NO_INTS, ints(1, 0), ints(0, 0)))
    refuse(full, INVALID, f"snapshot.requests.{name}[1]", str(value))


@pytest.mark.parametrize("name", [*REAL_COLUMNS, *WHOLE_COLUMNS, "priority"])
@pytest.mark.parametrize("length", [1, 3])
def test_column_of_another_length(name: str, length: int) -> None:
    column = np.ones(length) if name in REAL_COLUMNS else np.ones(length, np.int64)
    bad = two(**{name: column}, class_names=("chat",), tenant_names=("we",))
    refuse(next_step(arrived=bad), INVALID, f"step.arrived.{name}", f"{length} entries")


@pytest.mark.parametrize("name", ["max_output_tokens", "speculative_tokens"])
def test_what_a_step_may_bring_a_snapshot_may_too(name: str) -> None:
    """The wire's largest number stands for "no limit" in some engines; it must not block the way back."""
    session = opened()
    arrived = columns([1], [5], **{name: ints(2**32 - 1)})
    decide(session, step(0, arrived=arrived))
    decide(session, Snapshot(step(1, epoch=1).iteration, arrived, 0, ProgressColumns(NO_INTS, ints(0), ints(0))))


SNAPSHOT = snapshot([(7, 8, 8, 1), (3, 20, 4, 0), (9, 5, 0, 0)], running=2, free=37, epoch=2, number=1)
SNAPSHOTS: dict[str, Case] = {
    "duplicate": (
        {"requests": SNAPSHOT.requests._replace(handles=ints(7, 3, 7))},
        DUPLICATE,
        "snapshot.requests.handles",
        "7",
    ),
    "too many running": ({"running_count": 4}, INVALID, "snapshot.running_count", "4"),
    "negative running": ({"running_count": -1}, INVALID, "snapshot.running_count", "-1"),
    "old epoch": (
        {"iteration": SNAPSHOT.iteration._replace(epoch=1)},
        INVALID,
        "snapshot.iteration.epoch",
        "1",
    ),
    "other order": (
        {"progress": SNAPSHOT.progress._replace(handles=ints(3, 7, 9))},
        INVALID,
        "snapshot.progress.handles",
        "3 handles",
    ),
    "progress missing": (
        {"progress": ProgressColumns(NO_INTS, NO_INTS, NO_INTS)},
        INVALID,
        "snapshot.progress.computed_tokens",
        "0 entries",
    ),
    "progress beyond": (
        {"progress": ProgressColumns(NO_INTS, ints(8, 21, 0), ints(1, 0, 0))},
        IMPOSSIBLE,
        "snapshot.progress.computed_tokens[1]",
        "21",
    ),
    "empty prompt": (
        {"requests": SNAPSHOT.requests._replace(prompt_tokens=ints(8, 20, 0))},
        INVALID,
        "snapshot.requests.prompt_tokens[2]",
        "0",
    ),
    "class without a name": (
        {"requests": SNAPSHOT.requests._replace(class_index=ints(0, 0, 1))},
        INVALID,
        "snapshot.requests.class_index[2]",
        "1",
    ),
    "more blocks than all": (
        {"iteration": SNAPSHOT.iteration._replace(free_kv_blocks=41)},
        INVALID,
        "snapshot.iteration.free_kv_blocks",
        "41",
    ),
}


@pytest.mark.parametrize("case", SNAPSHOTS.values(), ids=SNAPSHOTS.keys())
def test_bad_snapshot(case: Case) -> None:
    more, reason, field, value = case
    refuse(SNAPSHOT._replace(**more), reason, field, value)


OPENINGS: dict[str, Case] = {
    "protocol": ({"protocol_version": 2}, ErrorReason.UNSUPPORTED_PROTOCOL, "open_session.protocol_version", "2"),
    "no protocol": ({"protocol_version": 0}, ErrorReason.UNSUPPORTED_PROTOCOL, "open_session.protocol_version", "0"),
    "policy": ({"policy": "best"}, ErrorReason.UNKNOWN_POLICY, "open_session.policy", "best"),
    **{
        f"{name} {value}": (
            {"limits": replace(LIMITS, **{name: value})},
            INVALID,
            f"open_session.limits.{name}",
            str(value),
        )
        for name in ("max_tokens_per_iteration", "max_sequences", "kv_blocks", "kv_block_tokens")
        for value in (0, -5, 2**63 + 1)
    },
    "model tokens": (
        {"limits": replace(LIMITS, max_model_tokens=-1)},
        INVALID,
        "open_session.limits.max_model_tokens",
        "-1",
    ),
    **{
        f"{name} {value}": (
            {"slo_defaults": SloDefaults(**{name: value})},
            INVALID,
            f"open_session.slo_defaults.{name}",
            str(value),
        )
        for name in ("ttft_slo_seconds", "tbt_slo_seconds", "ttlt_slo_seconds")
        for value in (NAN, INF, -0.5)
    },
    **{
        f"parameter {name}={text}": (
            {"policy": "vllm", "policy_parameters": {name: text}},
            ErrorReason.INVALID_POLICY_PARAMETER,
            f"open_session.policy_parameters['{name}']",
            text,
        )
        for name, text in [
            ("chunk", "3"),
            ("max_tokens", "many"),
            ("max_tokens", "1.5"),
            ("max_tokens", "nan"),
            ("max_tokens", ""),
            ("max_tokens", "-1"),
            ("max_sequences", "-7"),
            ("long_prefill_tokens", "-1"),
            ("reserve_full_prompt", "yes"),
        ]
    },
}


@pytest.mark.parametrize("case", OPENINGS.values(), ids=OPENINGS.keys())
def test_bad_opening(case: Case) -> None:
    more, reason, field, value = case
    answer = Session("bad").handle(OpenSession(**{"limits": LIMITS, **more}))
    assert_says(answer, reason, field, value)


def test_unknown_policy_names_those_there_are() -> None:
    answer = Session("bad").handle(OpenSession(LIMITS, policy="best"))
    assert isinstance(answer, SessionError)
    assert "vllm" in answer.remedy


def test_huge_policy_parameter_is_no_internal_error() -> None:
    session = opened(policy="vllm", policy_parameters={"long_prefill_tokens": "9" * 30, "max_tokens": "9" * 30})
    assert isinstance(session.handle(step(0, arrived=columns([1], [5]))), BatchAllocation)


def test_another_session_notices_nothing() -> None:
    session, other = at_work(), at_work()
    before = mirror_rows(other)
    for more, *_ in STEPS.values():
        session.handle(next_step(**more))
    assert mirror_rows(other) == before
    decide(other, next_step())
