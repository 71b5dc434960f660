"""The whole decision in plain Python: what the specification says, by lists, sorting, and trying everything.

Where the knapsack has several best answers, each is as good: an `Outcome` lists all plans that are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from predictor.model import LatencyModel
from tests.predictor.reference import Entries, Fill, row_of, seconds_of
from tests.slidingserve.scenes import Request, Scene

FAR = 1e6
SAME = 1e-9
"""Values and times that differ by less are equal."""

Rules = Mapping[str, Any]
NO_TABLE = np.zeros(0)


# The latency model over budgets.


def flat(decodes: Entries) -> list[tuple[int, int]]:
    """Decodes as the features count them: one with drafts stands for as many as it has tokens."""
    return [(1, context if token == 0 else 0) for tokens, context in decodes for token in range(tokens)]


@dataclass
class Forward:
    """The batch forward simulator: decodes, prompts (missing, context) in their order, and a model."""

    model: LatencyModel
    decodes: Entries
    prompts: Entries
    rules: Rules
    cap: int
    limit: int = 1 << 30  # the engine's own
    known: dict[float, float] = field(default_factory=dict)

    @cached_property
    def fill(self) -> Fill:
        return Fill(flat(self.decodes), self.prompts, NO_TABLE)

    @property
    def base(self) -> int:
        return self.fill.base_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(missing for missing, _ in self.prompts)

    @property
    def highest(self) -> int:
        return max(self.cap, min(self.base + int(self.rules["step_tokens"]), self.limit))

    def seconds(self, budget: float) -> float:
        """T(budget), with the decodes at least."""
        budget = max(budget, self.base)
        if budget not in self.known:
            self.known[budget] = seconds_of(self.model, row_of(self.fill.at(budget)))
        return self.known[budget]

    def seconds_after(self, budget: float, until: float) -> float:
        """T of the iteration after that of ``budget``, which computes prompts up to ``until``."""
        return seconds_of(self.model, row_of(self.fill.after(budget, until, self.rules["expected_decodes"])))

    def within(self, limit_seconds: float) -> int:
        """TimeToBudget: the largest budget of the grid that fits; the decodes alone if none does."""
        top = min(self.highest, self.fill.tokens)
        grid = {top, *range(0, top, self.rules["step_tokens"])}
        limit = limit_seconds / self.rules["safety"]
        return max((b for b in grid if b > self.base and self.seconds(b) <= limit), default=self.base)


# SlidingChunker.


def window_seconds(decodes: Iterable[tuple[float, float]], least: float, window: int) -> list[float]:
    """T_1, T_2, ... from (slack, TBT) of the decodes; those that have less than ``least``, or none, are lost.

    Where none is left that waits for its token, no iteration is bound.
    """
    safe = [(slack, tbt if tbt > 0.0 else FAR) for slack, tbt in decodes if slack > 0.0 and slack >= least]
    if min((slack for slack, _ in safe), default=FAR) >= FAR:
        return [FAR] * window
    shares: list[float] = []
    for j in range(window):
        shares.append(min([FAR, *(slack + j * tbt for slack, tbt in safe)]) - sum(shares))
    return shares


def ternary(cost: Callable[[int], float], left: int, right: int, tolerance: int) -> int:
    """Algorithm 1's search for the least cost, to the letter; equal: the larger one."""
    low, high = left, right
    while high - low > tolerance:
        m1 = low + (high - low) // 3
        m2 = high - (high - low) // 3
        if cost(m1) <= cost(m2) + 1e-12:
            high = m2 - 1
        else:
            low = m1 + 1
    ends = [left, right, (low + high) // 2]
    least = min(cost(b) for b in ends)
    return max(b for b in ends if cost(b) <= least + 1e-12)


def next_seconds(forward: Forward, budget: int, rest: float) -> float:
    """T of the second iteration, which is left ``rest`` tokens."""
    rules, base = forward.rules, forward.base
    if rest < base and not rules["clamp_next_budget"]:  # as many decodes as fit
        row = row_of(flat(forward.decodes))
        return seconds_of(forward.model, [max(rest, 0.0) / base * x for x in row] if base else row)
    rest = max(rest, base)
    return forward.seconds_after(budget, budget + rest - base) if rules["advance_queue"] else forward.seconds(rest)


def chunk(forward: Forward, shares: Sequence[float]) -> int:
    """The budget of this iteration by Algorithm 1, or greedily (window 1)."""
    rules, base = forward.rules, forward.base
    everything = base + forward.prompt_tokens
    if shares[0] >= FAR:  # no decode bounds this iteration: B does
        return min(forward.highest, everything)
    now = forward.within(shares[0])
    if rules["window"] == 1 or (rules["take_all_that_fits"] and everything <= now):
        return now
    right = min(forward.highest, now) if rules["clamp_chunk"] else forward.highest
    both = now + forward.within(shares[1])
    if rules["clamp_budget_sum"]:
        both = min(both, forward.prompt_tokens + 2 * base)
    left = min(max(base, both - forward.highest), right) if rules["cap_next_budget"] else base
    found = ternary(
        lambda b: forward.seconds(b) + next_seconds(forward, b, both - b), left, right, rules["tolerance_tokens"]
    )
    too_long = rules["clamp_chunk"] and forward.seconds(found) * rules["safety"] > shares[0]
    return now if too_long else found


# BatchConstructor.


class Prompt(NamedTuple):
    """One of P."""

    handle: int
    missing: int
    context: int
    slack: float
    waiting: bool = True
    protected: bool = False
    blocks: int = 0  # of all of it, beyond those it has
    whole: bool = True  # there are KV blocks for all of it

    @property
    def expired(self) -> bool:
        return self.slack <= 0.0


class Solution(NamedTuple):
    """A batch around one anchor; members by place in the order."""

    members: frozenset[int]
    value: float
    tokens: int
    budget: int

    def beats(self, other: Solution) -> bool:
        """Completes more, or is worth more, or has more tokens; worth the same within rounding."""
        if len(self.members) != len(other.members):
            return len(self.members) > len(other.members)
        if abs(self.value - other.value) > SAME * max(1.0, abs(other.value)):
            return self.value > other.value
        return self.tokens > other.tokens


def risks(prompts: Sequence[Prompt], full_seconds: float, rules: Rules) -> list[int]:
    """Places of those that a full batch makes late, least slack first."""
    late = [
        place
        for place, prompt in enumerate(prompts)
        if prompt.whole and prompt.slack < full_seconds and not (prompt.expired and rules["drop_expired_risks"])
    ]
    late.sort(key=lambda place: (prompts[place].slack, prompts[place].missing, place))
    return late[: rules["max_anchors"] or None]


def best_subsets(weights: Sequence[int], values: Sequence[float], capacity: int) -> list[tuple[int, ...]]:
    """All subsets within the capacity that are worth the most, of at most a dozen items: by trying all of them."""
    subsets = [
        chosen
        for count in range(len(weights) + 1)
        for chosen in combinations(range(len(weights)), count)
        if sum(weights[i] for i in chosen) <= capacity
    ]
    worth = [sum(values[i] for i in chosen) for chosen in subsets]
    most = max(worth)
    return [chosen for chosen, value in zip(subsets, worth, strict=True) if value >= most - SAME * max(1.0, most)]


def around(anchor: int, prompts: Sequence[Prompt], forward: Forward, tbt_seconds: float) -> list[Solution]:
    """The best batches of one anchor; none if it cannot be saved."""
    rules, chosen = forward.rules, prompts[anchor]
    seconds = min(chosen.slack, tbt_seconds) if rules["anchor_within_tbt"] else chosen.slack
    budget = forward.within(seconds)
    capacity = budget - forward.base
    if capacity <= 0 or chosen.missing > capacity:
        return []
    capacity -= chosen.missing
    others = [p for p, prompt in enumerate(prompts) if p != anchor and prompt.whole and prompt.slack >= chosen.slack]
    counted = [*others, anchor] if rules["anchor_in_sums"] else others
    slacks, tokens = sum(prompts[p].slack for p in counted), sum(prompts[p].missing for p in counted)

    def value(place: int) -> float:
        if slacks == 0.0:
            return 0.0  # no slack at all: not defined
        return 1.0 / (prompts[place].slack / slacks + prompts[place].missing / tokens)

    candidates = [p for p in others if prompts[p].missing <= capacity][: rules["max_candidates"] or None]
    step = rules["knapsack_step_tokens"]
    weights = [-(-prompts[p].missing // step) for p in candidates]
    solutions = []
    for subset in best_subsets(weights, [value(p) for p in candidates], capacity // step):
        members = [candidates[i] for i in subset]
        if rules["recheck_batch"]:
            while not in_time([anchor, *members], prompts, forward, seconds):
                if not members:
                    return []
                members.remove(min(members, key=value))
        worth = sum(map(value, members)) + (value(anchor) if rules["anchor_in_sums"] else 0.0)
        missing = chosen.missing + sum(prompts[p].missing for p in members)
        solutions.append(Solution(frozenset([anchor, *members]), worth, missing, budget))
    return solutions


def in_time(members: Sequence[int], prompts: Sequence[Prompt], forward: Forward, limit_seconds: float) -> bool:
    """Whether a batch of these, all that they miss, takes no longer than that."""
    chunks = [(prompts[place].missing, prompts[place].context) for place in members]
    seconds = seconds_of(forward.model, row_of([*flat(forward.decodes), *chunks]))
    return bool(seconds <= limit_seconds / forward.rules["safety"])


def construct(prompts: Sequence[Prompt], late: Sequence[int], forward: Forward, tbt_seconds: float) -> list[Solution]:
    """The batches that no other anchor's best one beats; none if no anchor can be saved."""
    found = [solutions for solutions in (around(a, prompts, forward, tbt_seconds) for a in late) if solutions]
    every = [solution for solutions in found for solution in solutions]
    return [one for one in every if all(any(not s.beats(one) for s in solutions) for solutions in found)]


# Who takes part, and in which order.


@dataclass
class Taken:
    """What of a scene takes part in an iteration."""

    scene: Scene
    rules: Rules
    may_admit: bool = True

    @property
    def _free(self) -> int:
        held = sum(self.held(r) for r in self.scene.requests)
        return self.scene.limits.kv_blocks - held if self.scene.free_kv_blocks is None else self.scene.free_kv_blocks

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.scene.limits.kv_block_tokens)

    def held(self, request: Request) -> int:
        return self.blocks_of(request.computed) if request.runs else 0

    def lacking(self, request: Request, tokens: int) -> int:
        """KV blocks that ``tokens`` more tokens need."""
        return max(0, self.blocks_of(request.computed + tokens) - self.held(request))

    @cached_property
    def split(self) -> tuple[list[int], list[int], int]:
        """Running requests that stay, victims, and free blocks beside the next tokens of the decodes."""
        requests = self.scene.requests
        staying = [i for i, request in enumerate(requests) if request.runs]
        victims: list[int] = []
        while True:
            decodes = [i for i in staying if is_decode(requests[i])]
            free = self._free + sum(self.held(requests[i]) for i in victims)
            free -= sum(self.lacking(requests[i], 1 + requests[i].speculative) for i in decodes)
            stuck = not decodes and all(self.lacking(requests[i], 1) > free for i in staying)
            if not staying or (free >= 0 and not stuck):
                return staying, victims, free
            victims.append(staying.pop())

    @property
    def decodes(self) -> list[int]:
        return [i for i in self.split[0] if is_decode(self.scene.requests[i])]

    def prompt(self, handle: int) -> Prompt:
        """A request as one of P."""
        request = self.scene.requests[handle]
        whole = request.prompt + request.output
        protected = {
            "none": False,
            "priority": request.priority < 0,
            "running": request.runs and request.computed > 0,
        }[self.rules["protect"]]
        return Prompt(
            handle,
            whole - request.computed,
            request.computed,
            slack_of(request),
            not request.runs,
            protected,
            self.lacking(request, whole - request.computed),
        )

    def order(self, throughput: float) -> list[Prompt]:
        """P in its order.

        Without the waiting ones that find no seat or no KV blocks. Where the running ones lack blocks each is cut to
        what is left in its turn.
        """
        staying, victims, free = self.split
        running = [self.prompt(i) for i in staying if not is_decode(self.scene.requests[i])]
        spare = free - sum(prompt.blocks for prompt in running)
        short = spare < 0
        seats = self.scene.limits.max_sequences - len(staying) if self.may_admit and not victims else 0
        waiting = [self.prompt(i) for i, request in enumerate(self.scene.requests) if not request.runs]
        taken = []
        for prompt in sorted([*running, *waiting], key=lambda prompt: sort_key(prompt, throughput, self.rules)):
            if prompt.waiting:
                if seats <= 0 or prompt.blocks > spare:
                    continue
                seats, spare = seats - 1, spare - prompt.blocks
            elif short:
                request = self.scene.requests[prompt.handle]
                fitting = [n for n in range(1, prompt.missing + 1) if self.lacking(request, n) <= free]
                if not fitting:
                    continue
                free -= self.lacking(request, fitting[-1])
                prompt = prompt._replace(missing=fitting[-1], whole=fitting[-1] == prompt.missing)
            taken.append(prompt)
        return taken


def is_decode(request: Request) -> bool:
    return request.output > 0 and request.prompt + request.output - request.computed == 1


def slack_of(request: Request) -> float:
    """Time to the deadline of its next token (a scene's requests have a TTFT SLO of 1 s)."""
    if request.output == 0 or request.tbt > 0.0:
        return request.slack
    return min(FAR, request.slack - 1.0 + request.ttlt) if request.ttlt > 0.0 else FAR


def sort_key(prompt: Prompt, throughput: float, rules: Rules) -> tuple[bool, bool, bool, int]:
    """Sorts by (expired, 1 - g, 1 - e, r); sorted() leaves equal ones in their places."""
    urgent = prompt.missing / (throughput * max(prompt.slack, rules["eps_seconds"])) > rules["alpha"]
    return prompt.expired and rules["expired_last"], not prompt.protected, not urgent, prompt.missing


# The policy.


def common_seconds(model: LatencyModel, prompt_tokens: int) -> float:
    """The iteration that caps are measured by: 16 decodes of 1024 tokens of context, and a fresh prompt."""
    return seconds_of(model, row_of([*[(1, 1024)] * 16, (prompt_tokens, 0)]))


def cap_of(model: LatencyModel, rules: Rules, limit: int) -> int:
    """B: what is given, or the fewest multiple of 128 tokens that take ``max_stretch`` times as long as decodes."""
    if rules["max_tokens"]:
        return int(min(rules["max_tokens"], limit))
    longest = rules["max_stretch"] * common_seconds(model, 0)
    long_enough = (n for n in range(128, limit, 128) if common_seconds(model, n - 16) >= longest)
    return min(next(long_enough, limit), limit)


class Outcome(NamedTuple):
    """What may come out: (handle, tokens) in the order of the plan, with its predicted seconds."""

    plans: list[tuple[list[tuple[int, int]], float]]
    victims: list[int]
    demoted: set[int]
    path: str


def decide(scene: Scene, model: LatencyModel, rules: Rules, may_admit: bool = True) -> Outcome:
    """The first decision of a policy."""
    limit = scene.limits.max_tokens_per_iteration
    cap = cap_of(model, rules, limit)
    throughput = cap / max(common_seconds(model, cap), 1e-9)
    taken = Taken(scene, rules, may_admit)
    requests, victims = scene.requests, taken.split[1]
    decodes = [(i, 1 + requests[i].speculative) for i in taken.decodes]
    prompts = taken.order(throughput)
    entries = [(tokens, requests[i].computed) for i, tokens in decodes]
    forward = Forward(model, entries, [(p.missing, p.context) for p in prompts], rules, cap, limit)

    def plan(given: Sequence[tuple[Prompt, int]]) -> tuple[list[tuple[int, int]], float]:
        given = [(prompt, tokens) for prompt, tokens in given if tokens > 0]
        batch = [*flat(entries), *((tokens, prompt.context) for prompt, tokens in given)]
        return [*decodes, *((p.handle, tokens) for p, tokens in given)], seconds_of(model, row_of(batch))

    def filled(budget: float) -> tuple[list[tuple[int, int]], float]:
        return plan(spend(prompts, budget - forward.base))

    if not prompts and len(decodes) == len(taken.split[0]):
        return Outcome([plan([])], victims, set(), "decode")
    demoted = {p.handle for p in prompts if p.expired} if rules["expired_last"] else set()
    full = min(forward.highest, forward.fill.tokens)
    full_seconds = forward.seconds(full)
    if full_seconds <= 0.0:
        return Outcome([(filled(full)[0], 0.0)], victims, demoted, "unpredicted")
    least = forward.seconds(forward.base) * rules["safety"] if rules["skip_lost_decodes"] else 0.0
    shares = window_seconds([(slack_of(requests[i]), requests[i].tbt) for i, _ in decodes], least, 2)
    late = risks(prompts, full_seconds * rules["safety"], rules)
    solutions = construct(prompts, late, forward, shares[0])
    if solutions:
        return Outcome([plan(completed(prompts, s, forward)) for s in solutions], victims, demoted, "constructor")
    if late and not rules["chunk_if_infeasible"]:
        return Outcome([plan([])], victims, demoted, "infeasible")
    path = "infeasible" if late else "chunker"
    return Outcome([filled(chunk(forward, shares))], victims, demoted, path)


def spend(prompts: Sequence[Prompt], tokens: float) -> list[tuple[Prompt, int]]:
    """Tokens for each prompt, in their order."""
    given = []
    for prompt in prompts:
        given.append((prompt, int(max(0, min(prompt.missing, tokens)))))
        tokens -= given[-1][1]
    return given


def completed(prompts: Sequence[Prompt], solution: Solution, forward: Forward) -> list[tuple[Prompt, int]]:
    """What a constructed batch gives to whom."""
    inside = [(prompt, prompt.missing) for place, prompt in enumerate(prompts) if place in solution.members]
    if not forward.rules["fill_remainder"]:
        return inside
    outside = [prompt for place, prompt in enumerate(prompts) if place not in solution.members]
    return [*inside, *spend(outside, solution.budget - forward.base - solution.tokens)]
