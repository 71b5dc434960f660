"""What a session's journal tells of its requests: when each came, what it asked for, and when it got which token.

The session's own `Mirror` follows the messages, once with the engine's report of the last batch and once with who left
and who came, so that a request's last token is seen before the request is gone. No policy decides here: what was
decided is in the journal. When a token came, `shadow_timing` says.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.shadow_timing import Timed, TokenBatch, TokenClock
from sidecar.journal import read_entries
from sidecar.policies.base import Plan
from sidecar.policies.registry import parse_spec
from sidecar.queues import FREE, WAITING, Table
from sidecar.session.mirror import Mirror
from sidecar.session.refusal import Refusal
from slidingserve.contract.codec import decode_request, decode_response
from slidingserve.contract.values import (
    NO_INTS,
    BatchAllocation,
    Floats,
    Ints,
    Mode,
    OpenSession,
    Request,
    Response,
    SessionOpened,
    Snapshot,
    Step,
)
from slidingserve.journal.v1 import journal_pb2

REQUEST = np.dtype(
    [
        ("handle", np.int64),
        ("arrival", np.float64),  # seconds on the engine's clock
        ("prompt", np.int64),  # tokens to compute: those expected in the prefix cache do not count
        ("output", np.int64),  # tokens that it got
        ("ttft", np.float64),  # SLOs in seconds; 0: none
        ("tbt", np.float64),
        ("ttlt", np.float64),
        ("class_index", np.int64),  # into `SessionRecord.class_names`
        ("first", np.float64),  # time of the first token; NaN: never
        ("last", np.float64),  # time of the latest token; NaN: never
        ("late", np.bool_),  # some token k came later than arrival + TTFT + (k - 1) TBT
        ("gap_missed", np.bool_),  # two tokens were further apart than TBT
        ("followed", np.bool_),  # every token of it was seen to come
        ("finished", np.bool_),  # it has left, with a token at least
    ]
)


class ShadowError(ValueError):
    """Journals from which no report can be made; the message names the file and the remedy."""


@dataclass(slots=True)
class Decisions:
    """What was decided, and what the engine made of it.

    Attributes:
        modes: answers by mode.
        paths: decisions by their path through the policy.
        compared: decisions in shadow of which the next message tells what the engine did instead.
        equal: those of them in which it did the same: the same tokens for the same requests, the same victims.
        obeyed: decisions in active mode that were executed to the letter, of ``active``.
        active: decisions in active mode of which that is known.
    """

    modes: Counter[Mode] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    equal: int = 0
    obeyed: int = 0
    active: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SessionRecord:
    """One session, read.

    Attributes:
        path: its journal.
        session: its name.
        opening: what the engine opened it with; policy, parameters and profile as they were decided.
        opened: what was answered.
        requests: table of REQUEST rows in the order of arrival.
        class_names: names by class index; entry 0 is "no class".
        token_gaps: seconds between tokens of one request, of all that were followed, float64[m].
        decisions: see `Decisions`.
        overhead_seconds: see `TokenClock.overhead_seconds`.
        first_seconds: the engine's clock at the first message.
        last_seconds: the engine's clock at the last one.
    """

    path: Path
    session: str
    opening: OpenSession
    opened: SessionOpened
    requests: Table
    class_names: tuple[str, ...]
    token_gaps: Floats
    decisions: Decisions
    overhead_seconds: float
    first_seconds: float
    last_seconds: float

    @property
    def was_active(self) -> bool:
        """Whether the engine obeyed most of the time."""
        return 2 * self.decisions.modes[Mode.ACTIVE] > self.decisions.modes.total()

    @property
    def scored(self) -> Any:
        """Which requests count, bool[n]: those that were followed from their arrival to their end."""
        return self.requests["followed"] & self.requests["finished"]


def read_session(path: Path) -> SessionRecord:
    """Reads one journal. Linear in its size; memory is linear in its requests and tokens.

    Raises:
        JournalError: the file is no journal.
        ShadowError: no session was opened in it.
    """
    entries = read_entries(path)
    header = next(entries).header
    reader: _Reader | None = None
    for request, response in _exchanges(entries):
        if isinstance(request, OpenSession) and isinstance(response, SessionOpened) and reader is None:
            reader = _Reader(_as_decided(request, response, header), response)
        elif reader is not None:
            reader.take(request, response)
    if reader is None:
        raise ShadowError(f"{path}: no session was opened in it; give the journal of an engine that has run")
    return reader.record(path, header.session)


def _exchanges(entries: Iterator[journal_pb2.JournalEntry]) -> Iterator[tuple[Request | None, Response | None]]:
    """Yields each request that was answered, with its answer."""
    request: Request | None = None
    for entry in entries:
        payload = entry.WhichOneof("payload")
        if payload == "request":
            request = decode_request(entry.request)
        elif payload == "response":
            yield request, decode_response(entry.response)


def _as_decided(asked: OpenSession, opened: SessionOpened, header: journal_pb2.JournalHeader) -> OpenSession:
    """Returns the opening with what the sidecar added to it."""
    parameters = dict(asked.policy_parameters)
    if not asked.policy:
        parameters = {**parse_spec(header.default_policy)[1], **parameters}
    return OpenSession(
        limits=opened.limits,
        engine=asked.engine,
        slo_defaults=opened.slo_defaults,
        policy=opened.policy,
        policy_parameters=parameters,
        profile=asked.profile or header.default_profile,
        mode=opened.mode,
    )


class _Reader:
    """Follows one session message by message."""

    def __init__(self, opening: OpenSession, opened: SessionOpened) -> None:
        self._opening, self._opened = opening, opened
        self._mirror = Mirror(opening.limits, opened.slo_defaults)
        self._plan = Plan(self._mirror.queues.capacity)
        self._in_step = True  # the mirror equals what the session's own was
        self._answer: BatchAllocation | None = None  # what was decided last
        self._requests: Table = np.zeros(256, REQUEST)
        self._count = 0
        self._row_of: dict[int, int] = {}  # by handle, of live requests
        self._rows: Ints = np.zeros(0, np.int64)  # by slot of the mirror
        self._seen: Ints = np.zeros(0, np.int64)  # output tokens so far, by slot
        self._class_names = [""]
        self._class_of: dict[str, int] = {"": 0}
        self._gaps = array("d")
        self._clock = TokenClock()
        self._decisions = Decisions()
        self._last_step = -1
        self._now = math.nan
        self._started = math.nan

    def take(self, request: Request | None, response: Response | None) -> None:
        """Takes one exchange; those that changed nothing, or put the session out of step, are no news of requests."""
        if not isinstance(request, Step | Snapshot):
            return
        if not isinstance(response, BatchAllocation):
            self._in_step = False
            return
        try:
            if isinstance(request, Snapshot):
                self._restore(request)
            elif self._in_step:
                self._step(request)
            else:
                return
        except Refusal:  # another release took it, say; from the next snapshot on the journal can be read again
            self._in_step = False
            return
        self._last_step, self._now = request.iteration.step, request.iteration.now_seconds
        self._decided(response)

    def record(self, path: Path, session: str) -> SessionRecord:
        """Returns all that was read."""
        self._date(self._clock.rest())
        requests = self._requests[: self._count]
        requests = requests[np.argsort(requests["arrival"], kind="stable")]
        return SessionRecord(
            path,
            session,
            self._opening,
            self._opened,
            requests,
            tuple(self._class_names),
            np.array(self._gaps),
            self._decisions,
            self._clock.overhead_seconds,
            self._started,
            self._now,
        )

    def _step(self, step: Step) -> None:
        iteration = step.iteration
        self._compare(step)
        self._mirror.update(step._replace(finished_handles=NO_INTS, arrived=None), self._plan)
        stays = len(self._mirror.queues) > len(step.finished_handles)
        # Who is gone although an iteration runs got nothing from that one: its token was computed in vain.
        batch = self._grown(step.finished_handles if iteration.pipeline_depth else NO_INTS)
        self._date(self._clock.take(iteration, batch, self._answer, stays=stays))
        for handle in step.finished_handles.tolist():
            row = self._row_of.pop(handle)
            self._requests[row]["finished"] = self._requests[row]["output"] > 0
        news = Step(iteration, False, None, None, step.finished_handles, step.arrived)
        self._mirror.update(news, self._plan)
        if step.arrived is not None:
            self._add(step.arrived.handles, step.arrived.class_index)

    def _restore(self, snapshot: Snapshot) -> None:
        """Takes everything anew; of requests that got several tokens meanwhile nobody knows when."""
        at_once = self._in_step and snapshot.iteration.step <= self._last_step + 1
        self._mirror.restore(snapshot)
        self._in_step = True
        known = self._row_of
        self._row_of = {}
        queues = self._mirror.queues
        classes = snapshot.requests.class_index
        for place, handle in enumerate(snapshot.requests.handles.tolist()):
            row = known.get(handle)
            if row is None:
                self._add(snapshot.requests.handles[place : place + 1], classes[place : place + 1])
                continue
            slot = queues.slot(handle)
            self._place(slot, row, int(self._requests[row]["output"]))
            self._row_of[handle] = row
            grown = int(queues.requests[slot]["output"]) - int(self._requests[row]["output"])
            self._requests[row]["followed"] &= grown == 0 or (at_once and grown == 1)
        answer = self._answer if at_once else None
        self._date(self._clock.take(snapshot.iteration, self._grown(), answer, stays=True))

    def _add(self, handles: Ints, class_index: Ints) -> None:
        """Opens a row for each request, of which the mirror has just heard."""
        queues = self._mirror.queues
        for place, handle in enumerate(handles.tolist()):
            slot = queues.slot(handle)
            facts = queues.requests[slot]
            if self._count == len(self._requests):
                self._requests = np.concatenate([self._requests, np.zeros(self._count, REQUEST)])
            row = self._requests[self._count]
            for name in ("handle", "arrival", "ttft", "tbt", "ttlt"):
                row[name] = facts[name]
            cached = facts["computed"] if facts["state"] == WAITING else 0
            row["prompt"] = max(1, facts["prompt"] - cached)
            row["output"] = facts["output"]
            row["class_index"] = self._class(int(class_index[place]) if len(class_index) else 0)
            row["first"] = row["last"] = math.nan
            row["followed"] = facts["output"] == 0
            self._place(slot, self._count, int(facts["output"]))
            self._row_of[handle] = self._count
            self._count += 1

    def _class(self, index: int) -> int:
        """Returns the index of the session's class among all classes read."""
        name = self._mirror.class_names[index]
        if name not in self._class_of:
            self._class_of[name] = len(self._class_names)
            self._class_names.append(name)
        return self._class_of[name]

    def _place(self, slot: int, row: int, output: int) -> None:
        """Notes which request a slot of the mirror holds, and what it had when it was last looked at."""
        capacity = self._mirror.queues.capacity
        if len(self._rows) < capacity:
            more = np.zeros(capacity - len(self._rows), np.int64)
            self._rows, self._seen = np.concatenate([self._rows, more]), np.concatenate([self._seen, more])
        self._rows[slot], self._seen[slot] = row, output

    def _grown(self, spoilt: Ints = NO_INTS) -> TokenBatch:
        """Returns the requests whose output has grown since the last look, but for the handles ``spoilt``.

        Linear in the mirror's capacity.
        """
        table = self._mirror.queues.requests[: len(self._rows)]
        slots = np.flatnonzero((table["state"] != FREE) & (table["output"] > self._seen))
        if len(spoilt):
            slots = slots[~np.isin(table["handle"][slots], spoilt)]
        rows, before, tokens = self._rows[slots], self._seen[slots], table["output"][slots]
        self._seen[slots] = self._requests["output"][rows] = tokens
        return TokenBatch(rows, before, tokens)

    def _date(self, batches: Iterable[Timed]) -> None:
        """Gives requests the times of their tokens."""
        for (rows, before, tokens), seconds in batches:
            if not len(rows):
                continue
            had = self._requests[rows]
            had["late"] |= seconds > had["arrival"] + had["ttft"] + before * had["tbt"]
            gaps = seconds - had["last"]  # NaN where this is the first token
            had["gap_missed"] |= gaps > had["tbt"]
            self._gaps.extend(gaps[had["followed"] & (before > 0)].tolist())
            self._gaps.extend([0.0] * int((tokens - before - 1)[had["followed"]].sum()))  # several at once
            had["first"] = np.where(before == 0, seconds, had["first"])
            had["last"] = seconds
            self._requests[rows] = had

    def _compare(self, step: Step) -> None:
        """Holds the last decision against what the engine did; if nothing, it had asked again before that iteration."""
        answer, decisions = self._answer, self._decisions
        nothing = not step.applied_exactly and (step.applied is None or not len(step.applied.handles))
        if answer is None or not len(answer.handles) or nothing:
            return
        if answer.mode is Mode.ACTIVE:
            decisions.active += 1
            decisions.obeyed += step.applied_exactly
        elif answer.mode is Mode.SHADOW:
            decisions.compared += 1
            decisions.equal += step.applied_exactly or _is_same(answer, step)

    def _decided(self, answer: BatchAllocation) -> None:
        """Makes an answer the plan that the engine may execute to the letter."""
        if math.isnan(self._started):
            self._started = self._now
        self._answer = answer
        self._decisions.modes[answer.mode] += 1
        if answer.mode is not Mode.OFF:
            self._decisions.paths[answer.decision_path] += 1
        queues = self._mirror.queues
        if len(self._plan.entries) != queues.capacity:
            self._plan = Plan(queues.capacity)
        plan = self._plan
        plan.clear()
        plan.count, plan.victim_count = len(answer.handles), len(answer.preempted_handles)
        plan.entries["slot"][: plan.count] = queues.slots(answer.handles)
        plan.entries["tokens"][: plan.count] = answer.tokens
        plan.victims[: plan.victim_count] = queues.slots(answer.preempted_handles)


def _is_same(answer: BatchAllocation, step: Step) -> bool:
    """Says whether the engine gave the same requests the same tokens, in whatever order, and preempted the same."""
    applied = step.applied
    if applied is None or len(applied.handles) != len(answer.handles):
        return False
    ours = dict(zip(answer.handles.tolist(), answer.tokens.tolist(), strict=True))
    theirs = dict(zip(applied.handles.tolist(), applied.tokens.tolist(), strict=True))
    return ours == theirs and set(answer.preempted_handles.tolist()) == set(applied.preempted_handles.tolist())
