"""sarathi-edf and qoserve once more in plain Python, by lists and sorting, held against their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slidingserve.contract.values import EngineLimits
from tests.policies.rivals import Decision, Req, World, made, per_token, qoserve

PER_TOKEN, START = 2.0**-10, 2.0**-8
QUICK = settings(max_examples=120, deadline=None, derandomize=True)
FAR = 1e6


@dataclass
class Prompt:
    """A request that misses more than its next token, as a policy sees it."""

    handle: int
    request: Req
    missing: int
    slack: float
    waiting: bool
    late: bool = False


def slack_of(request: Req) -> float:
    """Seconds to the deadline of the next token."""
    if request.ttft > 0.0 and (request.output == 0 or request.tbt > 0.0):
        return -request.age + request.ttft + request.output * request.tbt
    return -request.age + request.ttlt if request.ttlt > 0.0 else FAR


class Taken:
    """Decodes, prompts and places, as the specification says."""

    def __init__(self, requests: Sequence[Req], limits: EngineLimits, free: int) -> None:
        self.size, self.victims = limits.kv_block_tokens, list[int]()
        running = [(handle, request) for handle, request in enumerate(requests) if request.runs]
        free -= sum(self.next_blocks(request) for _, request in running if self.decodes(request))

        def stuck() -> bool:
            return free < 0 or not any(
                self.decodes(request) or self.next_blocks(request) <= free for _, request in running
            )

        while running and stuck():
            handle, request = running.pop()
            self.victims.append(handle)
            free += self.held(request) + (self.next_blocks(request) if self.decodes(request) else 0)
        self.decoding = [(handle, request) for handle, request in running if self.decodes(request)]
        self.prompts = [self.prompt(handle, request) for handle, request in running if not self.decodes(request)]
        self.free, self.open = free, free - sum(self.blocks(prompt) for prompt in self.prompts)
        self.scarce = self.open < 0
        self.seats = 0 if self.victims else limits.max_sequences - len(running)
        if self.seats > 0:
            waiting = [self.prompt(handle, request) for handle, request in enumerate(requests) if not request.runs]
            self.prompts += [prompt for prompt in waiting if self.blocks(prompt) <= self.open]

    def held(self, request: Req) -> int:
        return -(-request.computed // self.size) if request.runs else 0

    def decodes(self, request: Req) -> bool:
        return request.output > 0 and request.prompt + request.output - request.computed == 1

    def next_blocks(self, request: Req) -> int:
        return max(0, -(-(request.computed + 1) // self.size) - self.held(request))

    def blocks(self, prompt: Prompt) -> int:
        return max(0, -(-(prompt.request.prompt + prompt.request.output) // self.size) - self.held(prompt.request))

    def prompt(self, handle: int, request: Req) -> Prompt:
        missing = request.prompt + request.output - request.computed
        return Prompt(handle, request, missing, slack_of(request), not request.runs)

    def placed(self, order: Sequence[Prompt]) -> list[tuple[int, int]]:
        """(handle, most tokens) of those that find seats and KV blocks, in their order."""
        found = []
        for prompt in order:
            tokens = prompt.missing
            if prompt.waiting:
                if self.seats == 0 or self.blocks(prompt) > self.open:
                    continue
                self.seats, self.open = self.seats - 1, self.open - self.blocks(prompt)
            elif self.scarce:
                room = self.held(prompt.request) * self.size - prompt.request.computed
                tokens = min(tokens, room + self.free * self.size)
                self.free -= max(0, -(-(tokens - room) // self.size))
            if tokens > 0:
                found.append((prompt.handle, tokens))
        return found

    def spent(self, placed: Sequence[tuple[int, int]], budget: int) -> dict[int, int]:
        """Tokens of all, decodes first, by a total of ``budget``."""
        got = {handle: 1 for handle, _ in self.decoding}
        for handle, tokens in placed:
            left = budget - sum(got.values())
            if left > 0:
                got[handle] = min(tokens, left)
        return got


def raised(cap: int, taken: Taken, limits: EngineLimits) -> int:
    return max(cap, min(len(taken.decoding) + 16, limits.max_tokens_per_iteration))


def edf(requests: Sequence[Req], limits: EngineLimits, free: int, cap: int, expired_last: bool) -> tuple[Any, ...]:
    """Tokens, victims, demoted."""
    taken = Taken(requests, limits, free)

    def deadline(prompt: Prompt) -> float:
        of_batch = prompt.request.ttft <= 0.0 and prompt.request.ttlt > 0.0
        expected = prompt.request.max_output or 16
        return prompt.slack - (max(expected - prompt.request.output, 0) * 0.5 if of_batch else 0.0)

    def key(prompt: Prompt) -> tuple[Any, ...]:
        late = expired_last and deadline(prompt) <= 0.0
        return (late, prompt.missing if late else deadline(prompt))

    order = sorted(taken.prompts, key=key)
    late = {prompt.handle for prompt in order if key(prompt)[0]}
    return taken.spent(taken.placed(order), raised(cap, taken, limits)), taken.victims, late


def seconds(tokens: int) -> float:
    return START + tokens * PER_TOKEN if tokens else 0.0


def qos(requests: Sequence[Req], limits: EngineLimits, free: int, cap: int, rules: dict[str, Any]) -> tuple[Any, ...]:
    """Tokens, victims, demoted."""
    taken = Taken(requests, limits, free)
    decodes = len(taken.decoding)
    slacks = [slack_of(request) for _, request in taken.decoding]
    if rules["skip_lost_decodes"]:
        slacks = [slack for slack in slacks if slack > 0.0 and slack >= seconds(decodes)]
    least = min([FAR, *slacks])
    highest = raised(cap, taken, limits)
    everything = decodes + sum(prompt.missing for prompt in taken.prompts)
    turn = seconds(min(highest, everything))
    turn = min(turn, least) if least > 0.0 else turn
    throughput, pace = cap / (seconds(cap + 16)), seconds(16)

    def rest(prompt: Prompt) -> float:
        of_batch = prompt.request.ttft <= 0.0 and prompt.request.ttlt > 0.0
        expected = min(15, prompt.request.max_output or 15)
        return max(expected - prompt.request.output, 0) if of_batch else 0.0

    def service(prompt: Prompt) -> float:
        return prompt.missing / throughput + rest(prompt) * pace

    for prompt in taken.prompts:
        limit = {"throughput": service(prompt), "iteration": turn}.get(rules["relegation"], -FAR)
        prompt.late = rules["relegation"] != "off" and (prompt.slack <= 0.0 or prompt.slack < limit)
    late = {prompt.handle for prompt in taken.prompts if prompt.late and prompt.request.priority > 0}
    lows = [p.handle for p in taken.prompts if p.request.priority > 0 and p.handle not in late]
    for prompt in taken.prompts:
        if prompt.late and prompt.request.priority <= 0:
            late.add(lows.pop() if lows else prompt.handle)

    def key(prompt: Prompt) -> tuple[Any, ...]:
        started = rules["spare_started"] and not prompt.waiting and prompt.request.computed > 0
        first = started and service(prompt) <= prompt.slack < service(prompt) + turn
        group = 2 if prompt.handle in late else 0 if first else 1
        return (group, int((prompt.slack + 2.0**-7 * (prompt.missing + rest(prompt)) + FAR) * 1e6))

    placed = taken.placed(sorted(taken.prompts, key=key))
    total = min(decodes + sum(tokens for _, tokens in placed), highest)
    budget = highest
    if taken.prompts and least <= 0.0:
        budget = max(min(128, highest), min(highest, decodes + 16))
    elif least < FAR:
        fits = [b for b in {total, *range(0, total, 16)} if b > decodes and seconds(b) <= least]
        budget = max(fits, default=decodes)
    return taken.spent(placed, budget), taken.victims, late


sixteenths = st.integers(-8, 48).map(lambda n: n / 16)
tbts = st.sampled_from([1 / 16, 1 / 4, 0.0])


@st.composite
def decodes(draw: st.DrawFn) -> Req:
    output, context = draw(st.integers(1, 8)), draw(st.integers(8, 200))
    age = 10.0 + draw(st.integers(-4, 20)) / 16
    ttft = draw(st.sampled_from([10.0, 10.0, 0.0]))
    return Req(context + 1 - output, context, output, age, ttft, draw(tbts), draw(st.sampled_from([0.0, 12.0])))


@st.composite
def prompts(draw: st.DrawFn) -> Req:
    missing, output = draw(st.integers(2, 90)), draw(st.sampled_from([0, 0, 0, 1]))
    computed = draw(st.sampled_from([0, 0, 0, 16, 33]))
    running = draw(st.sampled_from([None, None, True])) if computed == 0 else None
    slack = draw(sixteenths)
    batch = draw(st.sampled_from([False, False, True]))
    return Req(
        missing + computed,
        computed,
        output,
        age=16.0 - slack,
        ttft=0.0 if batch else 16.0,
        tbt=draw(tbts),
        ttlt=16.0 if batch else 0.0,
        priority=draw(st.sampled_from([0, 0, -1, 1])),
        max_output=draw(st.sampled_from([0, 0, 3])),
        running=running,
    )


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Req], EngineLimits, int]:
    requests = draw(st.permutations([*draw(st.lists(decodes(), max_size=6)), *draw(st.lists(prompts(), max_size=9))]))
    limits = EngineLimits(4096, draw(st.sampled_from([256, 256, 6])), 10_000, draw(st.sampled_from([16, 4])))
    return requests, limits, draw(st.sampled_from([1000, 1000, 1000, 0, 2, 7, 20]))


def check(decision: Decision, expected: tuple[Any, ...]) -> None:
    tokens, victims, late = expected
    assert list(decision.tokens.items()) == list(tokens.items())
    assert decision.victims == victims
    assert decision.demoted == late


@QUICK
@given(scenes(), st.sampled_from([8, 64, 256]), st.booleans())
def test_sarathi_edf(scene: tuple[list[Req], EngineLimits, int], cap: int, expired_last: bool) -> None:
    requests, limits, free = scene
    policy = made(
        "sarathi-edf", limits, max_tokens=cap, expired_last=expired_last, output_tokens=16, seconds_per_output=0.5
    )
    check(World(requests, limits).decide(policy, free), edf(requests, limits, free, cap, expired_last))


rules = st.fixed_dictionaries(
    {
        "relegation": st.sampled_from(["off", "violated", "iteration", "throughput"]),
        "skip_lost_decodes": st.booleans(),
        "spare_started": st.booleans(),
    }
)


@QUICK
@given(scenes(), st.sampled_from([8, 64, 256]), rules)
def test_qoserve(scene: tuple[list[Req], EngineLimits, int], cap: int, rules: dict[str, Any]) -> None:
    requests, limits, free = scene
    policy = qoserve(per_token(PER_TOKEN, START), limits, max_tokens=cap, alpha_seconds_per_token=2.0**-7, **rules)
    check(World(requests, limits).decide(policy, free), qos(requests, limits, free, cap, rules))
