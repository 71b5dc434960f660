"""Scenes for the policy's tests: a few requests, a model, a decision, without session or engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from evaluation.inprocess import InProcessSource
from predictor.features import ROW, add_decode
from predictor.forecast import append_prompt
from predictor.model import LatencyModel, linear_model
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.policy import make_rules
from sidecar.policies.slidingserve.workspace import FACTS, Workspace, make_workspace
from sidecar.queues import REQUEST, RUNNING, WAITING, Queues
from sidecar.session.machine import Session
from slidingserve.contract.values import (
    NO_INTS,
    EngineLimits,
    Floats,
    IterationState,
    OpenSession,
    PauseState,
    ProgressColumns,
    SessionOpened,
    Snapshot,
)
from tests.strategies import columns, floats, ints

LIMITS = EngineLimits(max_tokens_per_iteration=4096, max_sequences=256, kv_blocks=100_000, kv_block_tokens=16)


class Request(NamedTuple):
    """One request; times in seconds, lengths in tokens. One that has computed something, or has output, runs."""

    prompt: int
    slack: float = 10.0
    computed: int = 0
    output: int = 0
    tbt: float = 0.05
    priority: int = 0
    running: bool | None = None
    ttlt: float = 0.0
    speculative: int = 0

    @property
    def runs(self) -> bool:
        return self.computed > 0 if self.running is None else self.running


def decoding(slack: float = 0.05, context: int = 100, tbt: float = 0.05, output: int = 3) -> Request:
    """A decode whose next token is due in ``slack`` seconds."""
    return Request(context + 1 - output, slack, context, output, tbt)


def prompt(missing: int, slack: float = 10.0, context: int = 0, **more: Any) -> Request:
    """A prompt that misses ``missing`` tokens, with ``context`` in the KV cache (then it runs)."""
    return Request(missing + context, slack, context, **more)


class Decision(NamedTuple):
    """What came out, requests by their place in the list: tokens of each that got any, in the order of the plan."""

    tokens: dict[int, int]
    victims: list[int]
    demoted: list[int]
    path: str
    predicted_seconds: float

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


@dataclass
class Scene:
    """Requests in an engine whose clock shows 100 s; running ones in their order, then waiting ones in theirs."""

    requests: Sequence[Request]
    limits: EngineLimits = LIMITS
    free_kv_blocks: int | None = None
    now_seconds: float = 100.0

    def queues(self) -> Queues:
        """The mirror; a request's handle is its place in the list."""
        queues = Queues()
        order = sorted(range(len(self.requests)), key=lambda i: not self.requests[i].runs)
        rows = np.zeros(len(order), REQUEST)
        for row, handle in zip(rows, order, strict=True):
            request = self.requests[handle]
            row["handle"] = handle
            row["state"] = RUNNING if request.runs else WAITING
            row["prompt"], row["output"] = request.prompt, request.output
            row["target"] = request.prompt + request.output
            row["computed"] = request.computed
            row["blocks"] = -(-request.computed // self.limits.kv_block_tokens) if request.runs else 0
            row["ttft"], row["tbt"], row["ttlt"], row["weight"] = 1.0, request.tbt, request.ttlt, 1.0
            row["arrival"] = self.now_seconds + request.slack - 1.0 - request.output * request.tbt
            row["priority"], row["speculative"] = request.priority, request.speculative
        if len(rows):
            queues.add(rows)
        return queues

    def decide(self, model: LatencyModel, **parameters: Any) -> Decision:
        """The first decision of a new policy."""
        return self.decide_by(make_policy(model, self.limits, **parameters))

    def decide_by(self, policy: SlidingServePolicy, **iteration: Any) -> Decision:
        """A decision of a policy; ``iteration`` changes fields of the iteration's state."""
        queues = self.queues()
        held = int(queues.requests["blocks"].sum())
        free = self.limits.kv_blocks - held if self.free_kv_blocks is None else self.free_kv_blocks
        plan = Plan(queues.capacity)
        policy.decide(queues, IterationState(1, 0, self.now_seconds, free)._replace(**iteration), plan)
        handles = queues.requests["handle"]
        entries = plan.entries[: plan.count]
        return Decision(
            dict(zip(handles[entries["slot"]].tolist(), entries["tokens"].tolist(), strict=True)),
            handles[plan.victims[: plan.victim_count]].tolist(),
            handles[plan.demoted[: plan.demoted_count]].tolist(),
            plan.path,
            plan.predicted_seconds,
        )


def make_policy(model: LatencyModel, limits: EngineLimits = LIMITS, **parameters: Any) -> SlidingServePolicy:
    """A policy with a model of its own."""
    return SlidingServePolicy(SlidingServeParameters(**parameters), PolicyContext(limits, model.profile), model)


def linear(intercept_seconds: float = 0.0, per_token: float = 0.0, **weights: float) -> LatencyModel:
    """T = intercept + per_token x all tokens + weights by feature name; one expert for everything."""
    return linear_model("none", intercept_seconds, **{"decodes": per_token, "prefill_tokens": per_token, **weights})


class Lined(NamedTuple):
    """Decodes and prompts in their order, as the kernels below a decision take them."""

    work: Workspace
    rules: Any
    facts: Any
    model: Floats
    rows: int


def line_up_as_given(
    model: LatencyModel,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[tuple[int, int, float]],
    slack_seconds: Sequence[float] = (),
    limits: EngineLimits = LIMITS,
    **parameters: Any,
) -> Lined:
    """(tokens, context) of decodes, (missing, context, slack) of prompts, and T_1 to T_4; nothing is sorted."""
    chosen = SlidingServeParameters(**parameters)
    rules = make_rules(chosen.resolved(), PolicyContext(limits), chosen.max_tokens or limits.max_tokens_per_iteration)
    work = make_workspace(len(prompts), rules[0])
    facts = np.zeros(1, FACTS)
    facts["slack_seconds"][0, : len(slack_seconds)] = slack_seconds
    facts["prompt_tokens"] = sum(missing for missing, _, _ in prompts)
    for tokens, context in decodes:
        add_decode(work.batch, float(tokens), float(context))
    work.fill[0, :ROW] = work.batch
    for row, (missing, context, slack) in enumerate(prompts):
        entry = work.pool[row]
        entry["slot"], entry["remaining"], entry["context"] = row, missing, context
        entry["slack"], entry["expired"], entry["whole"] = slack, slack <= 0.0, True
        work.lines["row"][row] = row
        append_prompt(work.fill, row, float(missing), float(context))
    return Lined(work, rules[0], facts[0], model.pack(), len(prompts))


def session_with(policy: Callable[[EngineLimits], SlidingServePolicy], limits: EngineLimits) -> Session:
    """An open session whose policy is what ``policy`` makes of its limits."""
    session = Session("scene", build_policy=lambda name, texts, context: policy(context.limits))
    assert isinstance(session.handle(OpenSession(limits)), SessionOpened)
    return session


def source_with(model: LatencyModel, limits: EngineLimits, **parameters: Any) -> InProcessSource:
    """An open source for the simulated engine that decides by a model of its own."""
    source = InProcessSource()
    source.session = session_with(lambda found: make_policy(model, found, **parameters), limits)
    return source


class State(NamedTuple):
    """What an engine holds, and its limits."""

    full: Snapshot
    limits: EngineLimits


class Held(NamedTuple):
    """One request of a state: tokens, and how long ago it arrived (seconds)."""

    prompt: int
    computed: int
    output: int
    age: float = 0.0
    ttft: float = 10.0
    tbt: float = 1.0
    drafts: int = 0
    priority: int = 0


def state_of(running: Sequence[Held], waiting: Sequence[Held], limits: EngineLimits, **iteration: Any) -> State:
    """The snapshot of these requests at 1000 s; handles are their places. Free KV blocks: what the running leave."""
    rows = [*running, *waiting]
    held = sum(-(-row.computed // limits.kv_block_tokens) for row in running)
    requests = columns(
        range(len(rows)),
        [row.prompt for row in rows],
        arrival_seconds=floats(*(1000.0 - row.age for row in rows)),
        ttft_slo_seconds=floats(*(row.ttft for row in rows)),
        tbt_slo_seconds=floats(*(row.tbt for row in rows)),
        speculative_tokens=ints(*(row.drafts for row in rows)),
        priority=ints(*(row.priority for row in rows)),
    )
    progress = ProgressColumns(NO_INTS, ints(*(row.computed for row in rows)), ints(*(row.output for row in rows)))
    state = IterationState(1, 0, 1000.0, limits.kv_blocks - held)._replace(**iteration)
    return State(Snapshot(state, requests, len(running), progress), limits)


@st.composite
def held_requests(draw: st.DrawFn, kinds: str) -> Held:
    """d: decode, p: prompt under way, o: preempted with output, n: new, c: new with a cached prefix."""
    kind = draw(st.sampled_from(kinds))
    prompt_tokens = draw(st.integers(1, 60))
    output = draw(st.integers(1, 20)) if kind in "do" else 0
    computed = {
        "d": prompt_tokens + output - 1,
        "p": draw(st.integers(0, prompt_tokens - 1)),
        "c": draw(st.integers(0, prompt_tokens - 1)),
    }.get(kind, 0)
    return Held(
        prompt_tokens,
        computed,
        output,
        draw(st.sampled_from([0.0, 0.1, 0.6, 3.0, 100.0])),
        draw(st.sampled_from([0.05, 0.5, 5.0])),
        draw(st.sampled_from([0.005, 0.05, 0.5])),
        draw(st.sampled_from([0, 0, 1, 3])),
        draw(st.sampled_from([0, 0, -1])),
    )


@st.composite
def states(draw: st.DrawFn, scarce: bool = True) -> State:
    """Running and waiting requests of every kind; ``scarce``: budgets, seats and KV blocks may lack."""
    running = draw(st.lists(held_requests("dddppo"), max_size=8))
    waiting = draw(st.lists(held_requests("nnnoc"), max_size=8))
    block_tokens = draw(st.integers(1, 8))
    held = sum(-(-row.computed // block_tokens) for row in running)
    budget, free, seats = 500, 5000, len(running) + 20
    if scarce:
        budget = draw(st.sampled_from([1, 4, 20, 40, 100, 500]))
        free = draw(st.sampled_from([0, 1, 2, 5, 20, 1000]))
        seats = draw(st.integers(max(1, len(running) - 1), len(running) + 5))
    limits = EngineLimits(budget, seats, max(1, held + free), block_tokens)
    pause = draw(st.sampled_from([PauseState.RUNNING] * 4 + [PauseState.PAUSED_NEW])) if scarce else PauseState.RUNNING
    return state_of(running, waiting, limits, pause_state=pause)
