"""What the tests of the core and of the simulated engine share: small builders, hypothesis strategies, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from sidecar.queues import RUNNING, WAITING
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import (
    NO_INTS,
    BatchAllocation,
    EngineLimits,
    Floats,
    Ints,
    IterationState,
    OpenSession,
    ProgressColumns,
    RequestColumns,
    SessionOpened,
    Snapshot,
    Step,
)

LIMITS = EngineLimits(max_tokens_per_iteration=64, max_sequences=8, kv_blocks=40, kv_block_tokens=4)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def floats(*values: float) -> Floats:
    return np.array(values, np.float64)


def columns(handles: Sequence[int], prompts: Sequence[int], **more: Any) -> RequestColumns:
    """Requests that arrived at 0 s; further columns by name."""
    return RequestColumns(ints(*handles), floats(*[0.0] * len(handles)), ints(*prompts))._replace(**more)


def step(number: int = 0, now: float = 0.0, free: int = LIMITS.kv_blocks, epoch: int = 0, **more: Any) -> Step:
    """A step; ``iteration`` in ``more`` changes fields of the iteration's state."""
    iteration = IterationState(epoch, number, now, free)._replace(**more.pop("iteration", {}))
    return Step(iteration)._replace(**more)


def snapshot(
    rows: Sequence[tuple[int, int, int, int]],
    running: int,
    free: int,
    *,
    epoch: int = 1,
    number: int = 0,
    **iteration: Any,
) -> Snapshot:
    """A snapshot of (handle, prompt, computed, output) rows; the first ``running`` run."""
    handles, prompts, computed, output = (list(column) for column in zip(*rows, strict=True)) if rows else [[]] * 4
    return Snapshot(
        IterationState(epoch, number, 0.0, free)._replace(**iteration),
        columns(handles, prompts),
        running,
        ProgressColumns(NO_INTS, ints(*computed), ints(*output)),
    )


def opened(limits: EngineLimits = LIMITS, defaults: SessionDefaults | None = None, **opening: Any) -> Session:
    """An open session."""
    session = Session("test", defaults)
    answer = session.handle(OpenSession(limits, **opening))
    assert isinstance(answer, SessionOpened), answer
    return session


def decide(session: Session, message: Step | Snapshot) -> BatchAllocation:
    """The allocation for a message that has to be accepted."""
    answer = session.handle(message)
    assert isinstance(answer, BatchAllocation), answer
    return answer


def batch(allocation: BatchAllocation) -> list[tuple[int, int]]:
    """(handle, tokens) of an allocation."""
    return list(zip(allocation.handles.tolist(), allocation.tokens.tolist(), strict=True))


class Row(NamedTuple):
    """One live request, as engine and mirror both can tell."""

    handle: int
    prompt: int
    computed: int
    output: int
    blocks: int
    running: bool
    arrival: float
    ttft: float
    tbt: float
    ttlt: float
    class_name: str


def mirror_rows(session: Session) -> list[Row]:
    """The mirror's live requests: the running ones in order, then the waiting ones in order."""
    queues = session.mirror.queues
    slots = np.concatenate([queues.running_slots, queues.waiting_slots])
    records = queues.requests[slots]
    assert len(slots) == len(set(slots.tolist())) == len(queues), "each live request stands in one queue, once"
    assert queues.slots(records["handle"]).tolist() == slots.tolist()
    assert (records["target"] == records["prompt"] + records["output"]).all()
    running = np.arange(len(slots)) < len(queues.running_slots)
    assert (records["state"] == np.where(running, RUNNING, WAITING)).all()
    names = [session.mirror.class_names[index] for index in records["class_index"].tolist()]
    numbers = (records[name].tolist() for name in ("handle", "prompt", "computed", "output", "blocks"))
    times = (records[name].tolist() for name in ("arrival", "ttft", "tbt", "ttlt"))
    return [Row(*row) for row in zip(*numbers, running.tolist(), *times, names, strict=True)]


def engine_rows(full: Snapshot, limits: EngineLimits) -> list[Row]:
    """The engine's live requests, in the order of its snapshot; a running one holds blocks for what is computed."""
    requests, progress = full.requests, full.progress
    running = np.arange(len(requests.handles)) < full.running_count
    blocks = np.where(running, -(-progress.computed_tokens // limits.kv_block_tokens), 0)
    names = ("", *requests.class_names)
    absent = np.zeros(len(running))
    columns = (
        requests.handles,
        requests.prompt_tokens,
        progress.computed_tokens,
        progress.output_tokens,
        blocks,
        running,
        requests.arrival_seconds,
        *(column if len(column) else absent for column in requests[4:7]),  # the three SLOs
    )
    listed = (column.tolist() for column in columns)
    classes = requests.class_index if len(requests.class_index) else absent.astype(np.int64)
    return [Row(*row) for row in zip(*listed, (names[index] for index in classes.tolist()), strict=True)]


def assert_mirrors(session: Session, full: Snapshot, limits: EngineLimits) -> None:
    """The mirror equals the engine's state, and no KV block is missing or counted twice."""
    rows = engine_rows(full, limits)
    assert mirror_rows(session) == rows
    assert sum(row.blocks for row in rows) == limits.kv_blocks - full.iteration.free_kv_blocks


def assert_within_limits(allocation: BatchAllocation, full: Snapshot, limits: EngineLimits) -> None:
    """Holds an allocation against the engine's state in plain Python: budget, seats, KV blocks, missing tokens."""
    rows = {row.handle: row for row in engine_rows(full, limits)}
    victims = allocation.preempted_handles.tolist()
    handles = allocation.handles.tolist()
    assert len(handles) == len(allocation.tokens)
    assert len(set(handles) | set(victims)) == len(handles) + len(victims), "each request once, victims get nothing"
    assert all(rows[handle].running for handle in victims)
    assert int(allocation.tokens.sum()) <= limits.max_tokens_per_iteration
    seated = sum(row.running for row in rows.values()) - len(victims)
    seated += sum(not rows[handle].running for handle in handles)
    assert seated <= max(limits.max_sequences, full.running_count)
    draft_column = full.requests.speculative_tokens.tolist() or [0] * len(rows)
    drafts = dict(zip(full.requests.handles.tolist(), draft_column, strict=True))
    free = full.iteration.free_kv_blocks + sum(rows[handle].blocks for handle in victims)
    for handle, tokens in batch(allocation):
        row = rows[handle]
        missing = row.prompt + row.output - row.computed
        assert 1 <= tokens <= missing + (drafts[handle] if missing == 1 and row.output else 0)
        free -= max(0, -(-(row.computed + tokens) // limits.kv_block_tokens) - row.blocks)
    assert free >= 0


@dataclass(frozen=True)
class Feed:
    """Requests as the simulated engine takes them."""

    arrival_seconds: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_slo_seconds: Floats
    tbt_slo_seconds: Floats
    ttlt_slo_seconds: Floats
    class_index: Ints
    class_names: tuple[str, ...]


def feed(rows: Sequence[tuple[float, int, int]], ttft: float = 0.5, tbt: float = 0.05) -> Feed:
    """Requests from (arrival, prompt, output) rows; classes alternate."""
    count = len(rows)
    return Feed(
        floats(*(row[0] for row in rows)),
        ints(*(row[1] for row in rows)),
        ints(*(row[2] for row in rows)),
        np.full(count, ttft),
        np.full(count, tbt),
        np.full(count, 10.0),
        np.arange(count) % 3,
        ("chat", "code"),
    )


def random_feed(seed: int, count: int, prompt: int, output: int, gap_seconds: float) -> Feed:
    """Requests of up to ``prompt`` and ``output`` tokens, arriving in bursts ``gap_seconds`` apart on average."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(gap_seconds, count) * (rng.random(count) < 0.7))
    prompts = rng.integers(1, prompt + 1, count)
    outputs = rng.integers(1, output + 1, count)
    return feed(list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)))


class LinearTimer:
    """10 ms, 1 ms per token and 1 us per token of context; keeps the batches if asked."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self.batches: list[list[tuple[int, int]]] = []

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        if self.keep:
            self.batches.append(list(zip(chunk[:count].tolist(), context[:count].tolist(), strict=True)))
        return 0.01 + 1e-3 * int(chunk[:count].sum()) + 1e-6 * int(context[:count].sum())


def run_to_end(engine: SimulatedEngine, most_steps: int = 20_000) -> int:
    """Steps until nothing is left; fails when there is no end."""
    steps = 0
    while engine.step():
        steps += 1
        assert steps < most_steps, "the engine makes no progress"
    return steps


@st.composite
def feeds(draw: st.DrawFn, most: int = 10) -> Feed:
    """A few requests, arriving together, within an iteration, or long after."""
    gaps = st.sampled_from([0.0, 0.0, 0.005, 0.03, 0.2, 2.0])
    rows, now = [], 0.0
    for gap, prompt, output in draw(
        st.lists(st.tuples(gaps, st.integers(1, 40), st.integers(1, 10)), min_size=1, max_size=most)
    ):
        now += gap
        rows.append((now, prompt, output))
    return feed(rows)


@st.composite
def tight_limits(draw: st.DrawFn) -> EngineLimits:
    """Small budgets, few seats and little KV: one request of `feeds` may fit (50 tokens), rarely four do."""
    block_tokens = draw(st.integers(1, 8))
    capacity = draw(st.integers(20, 130))
    return EngineLimits(
        max_tokens_per_iteration=draw(st.integers(1, 48)),
        max_sequences=draw(st.integers(1, 6)),
        kv_blocks=-(-capacity // block_tokens),
        kv_block_tokens=block_tokens,
    )
