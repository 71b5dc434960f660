"""Policy ``explore``: fills the space of batches, so that a latency model can be fitted to what each kind takes.

For profiling only (`slidingserve profile`): it serves everybody, and nobody well. Each iteration takes the next point
of a low-discrepancy sequence (Roberts' R sequence: multiples of powers of the generalised golden ratio, modulo 1) and
comes as close to it as the requests at hand allow:

* prompt tokens: none in a fifth of the iterations, else log-uniform up to the budget; in three of four iterations the
  total is moved to a multiple of 16, 64, 128 or 256 tokens, or one to either side, where the steps of real GEMMs are;
* decodes: none in a fifth, else from one to all, few more often than many;
* how many prompts share the tokens, how unevenly, and how much of them is computed already;
* which decodes: neighbours in the order of their contexts, so that batches of short and of long ones both occur.

Nobody is held back for long: who got nothing for ``patience`` iterations goes first, longest first. Prompts are
admitted first come, first served, a few at a time, and only with room in the KV cache for all of what they and those
before them still need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.registry import register
from sidecar.queues import Queues, Table
from slidingserve.contract.values import EngineLimits, Ints, IterationState

VERSION = "explore/1"

NONE_SHARE = 0.2
"""Share of the iterations that are to have no prompt tokens, and of those that are to have no decodes."""
STEPS = (16, 64, 128, 256)
"""Tokens whose multiples may be where an iteration begins to take longer."""
_DIMENSIONS = 7
_MOST_SHARING = 8  # prompts in one iteration
_MOST_UNEVEN = 0.7  # a prompt's share is at least 0.3 of the one's before it


@dataclass(frozen=True, slots=True)
class ExploreParameters:
    """Settings of the policy.

    Attributes:
        seed: where the sequence of targets begins.
        max_tokens: most tokens of an iteration, decodes included; 0: the engine's limit.
        patience: a running request that got nothing for so many iterations goes first.
        prompts: most prompts that are in progress at once; the others wait.
    """

    seed: int = 0
    max_tokens: int = 0
    patience: int = 32
    prompts: int = 8

    def __post_init__(self) -> None:
        for name in ("seed", "max_tokens"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(name, "give 0 or a positive number below 2^32")
        for name in ("patience", "prompts"):
            if not 1 <= getattr(self, name) < 2**32:
                raise ValueError(name, "give a positive number below 2^32")


@dataclass(frozen=True, slots=True)
class Target:
    """What one iteration is to hold; shares are from 0 to 1.

    Attributes:
        tokens: of prompts.
        decodes: share of the decodes.
        sharing: prompts that share the tokens.
        evenness: a prompt gets so much of what the one before it got.
        step: whether the total is moved: 0 not, else to a multiple of ``grain`` plus ``step - 2``.
        grain: see there.
        prompt_place, decode_place: where in the order of contexts the chosen ones begin.
    """

    tokens: int
    decodes: float
    sharing: int
    evenness: float
    step: int
    grain: int
    prompt_place: float
    decode_place: float

    def prompt_tokens(self, decodes: int, budget: int) -> int:
        """Returns the prompt tokens beside ``decodes``, so that the total is on or beside a step. O(1)."""
        if self.tokens <= 0:
            return 0
        total = self.tokens + decodes
        if self.step and total > self.grain:
            total = total // self.grain * self.grain + self.step - 2
        return max(1, min(total, budget) - decodes)


class Targets:
    """The sequence of targets; each number gives the same target whenever it is asked for.

    Args:
        seed: moves the sequence.
        budget: most tokens of an iteration.
    """

    def __init__(self, seed: int, budget: int) -> None:
        self._budget = budget
        ratio = 2.0
        for _ in range(40):  # the root of x^(d + 1) = x + 1
            ratio = (1.0 + ratio) ** (1.0 / (_DIMENSIONS + 1))
        self._steps = np.array([ratio ** -(axis + 1) for axis in range(_DIMENSIONS)])
        self._start = np.random.default_rng(seed).random(_DIMENSIONS)

    def __getitem__(self, number: int) -> Target:
        tokens, decodes, sharing, uneven, step, prompt_place, decode_place = (
            (self._start + (number + 1) * self._steps) % 1.0
        ).tolist()
        wanted = 0
        if tokens >= NONE_SHARE:
            wanted = round(math.exp(_above(tokens) * math.log(self._budget)))
        quarter, rest = divmod(4.0 * step, 1.0)
        return Target(
            tokens=wanted,
            decodes=_above(decodes) ** 2 if decodes >= NONE_SHARE else 0.0,
            sharing=1 if sharing < 0.5 else round(_MOST_SHARING ** (2.0 * sharing - 1.0)),
            evenness=1.0 - _MOST_UNEVEN * uneven,
            step=int(quarter),
            grain=STEPS[int(rest * len(STEPS))],
            prompt_place=prompt_place,
            decode_place=decode_place,
        )


def _above(value: float) -> float:
    """Stretches what is above `NONE_SHARE` to 0 to 1."""
    return (value - NONE_SHARE) / (1.0 - NONE_SHARE)


class ExplorePolicy:
    """See the module. A decision is linear in the running requests (n log n), about 0.3 ms at 64."""

    version = VERSION
    model_version = ""

    def __init__(self, parameters: ExploreParameters, context: PolicyContext) -> None:
        self._limits = context.limits
        most = context.limits.max_tokens_per_iteration
        self._budget = min(parameters.max_tokens or most, most)
        self._patience, self._most_prompts = parameters.patience, parameters.prompts
        self._targets = Targets(parameters.seed, self._budget)
        self._number = 0
        self._handles: Ints = np.full(0, -1, np.int64)  # whose the row below is, by slot
        self._served: Ints = np.zeros(0, np.int64)  # number of the decision that last served the request

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        """Fills the plan; see the class for time."""
        running = queues.running_slots
        requests = queues.requests
        missing = requests["target"][running] - requests["computed"][running]
        is_decode = (missing == 1) & (requests["output"][running] > 0)
        target = self._targets[self._number]
        self._number += 1
        batch = _Batch(queues, iteration.free_kv_blocks, self._budget, self._limits, plan)
        in_progress = running[~is_decode]
        candidates = np.concatenate((in_progress, self._admissible(queues, iteration, in_progress)))
        decodes = running[is_decode]
        self._meet(requests, np.concatenate((running, candidates[len(in_progress) :])))
        self._fill(batch, target, decodes, candidates)
        if not plan.count and not plan.victim_count:  # KV blocks are short, or the target asked for what is not there
            self._fill_with_anything(batch, running, candidates)
        self._served[plan.entries["slot"][: plan.count]] = self._number
        plan.path = batch.path

    def _fill(self, batch: _Batch, target: Target, decodes: Ints, prompts: Ints) -> None:
        late_decodes, decodes = self._late_first(decodes)
        late_prompts, prompts = self._late_first(prompts)
        wanted = math.ceil(target.decodes * (len(decodes) + len(late_decodes)))
        if not len(prompts) and not len(late_prompts):
            wanted = max(1, wanted)
        rest = max(0, wanted - len(late_decodes))
        chosen = [*late_decodes.tolist(), *_window(decodes, batch.context(decodes), target.decode_place, rest)]
        if not chosen and not target.tokens and len(decodes):
            chosen = _window(decodes, batch.context(decodes), target.decode_place, 1)
        kept = min(STEPS[0], max(1, self._budget // 2)) if len(late_prompts) else 0
        for slot in chosen:
            if batch.tokens < self._budget - kept:
                batch.take_decode(slot)
        tokens = max(kept, target.prompt_tokens(batch.tokens, self._budget))
        order = _window(prompts, batch.context(prompts), target.prompt_place, len(prompts))
        batch.share([*late_prompts.tolist(), *order], tokens, target, late=len(late_prompts))

    def _fill_with_anything(self, batch: _Batch, running: Ints, candidates: Ints) -> None:
        """Serves whoever waited longest and can be served."""
        everybody = np.concatenate((running, candidates[~np.isin(candidates, running)]))
        for slot in everybody[np.argsort(self._served[everybody], kind="stable")].tolist():
            if batch.take(slot, self._budget, evict=True):
                return

    def _late_first(self, slots: Ints) -> tuple[Ints, Ints]:
        """Returns those that got nothing for too long, longest first, and the others."""
        waited = self._number - self._served[slots]
        late = waited > self._patience
        return slots[late][np.argsort(-waited[late], kind="stable")], slots[~late]

    def _meet(self, requests: Table, slots: Ints) -> None:
        """Begins to count for requests that are seen for the first time."""
        if len(self._handles) < len(requests):
            more = len(requests) - len(self._handles)
            self._handles = np.concatenate((self._handles, np.full(more, -1, np.int64)))
            self._served = np.concatenate((self._served, np.zeros(more, np.int64)))
        new = slots[self._handles[slots] != requests["handle"][slots]]
        self._handles[new] = requests["handle"][new]
        self._served[new] = self._number

    def _admissible(self, queues: Queues, iteration: IterationState, in_progress: Ints) -> Ints:
        """Returns waiting requests that may be admitted now, in order: slots, prompts in progress, KV blocks allow."""
        running = queues.running_slots
        room = min(self._limits.max_sequences - len(running), self._most_prompts - len(in_progress))
        if not iteration.may_admit or room <= 0:
            return queues.waiting_slots[:0]
        size, requests = self._limits.kv_block_tokens, queues.requests
        needed = -(-(requests["target"][running] + 1) // size) - requests["blocks"][running]
        free = iteration.free_kv_blocks - int(np.maximum(needed, 0).sum())
        heads = queues.waiting_slots[:room]
        blocks = np.cumsum(-(-(requests["target"][heads] + 1) // size))
        fits = int(np.searchsorted(blocks, free, side="right"))
        if not fits and not len(running) and len(heads):
            fits = 1  # nobody else will make room
        return heads[:fits]


class _Batch:
    """The plan as it grows: what is left of budget and KV blocks, and who is in it."""

    def __init__(self, queues: Queues, free_blocks: int, budget: int, limits: EngineLimits, plan: Plan) -> None:
        self._requests, self._plan, self._free, self._size = queues.requests, plan, free_blocks, limits.kv_block_tokens
        self._tail = queues.running_slots.tolist()  # may be preempted, last first
        self._left = budget
        self._chosen: set[int] = set()
        self._has_decodes = self._has_prompts = False
        self.tokens = 0

    @property
    def path(self) -> str:
        """What the batch holds."""
        if self._has_decodes and self._has_prompts:
            return "mixed"
        return "decode" if self._has_decodes else "prefill" if self._has_prompts else "nothing"

    def context(self, slots: Ints) -> Ints:
        """Returns the tokens that each has in the KV cache."""
        computed: Ints = self._requests["computed"][slots]
        return computed

    def take_decode(self, slot: int) -> int:
        """Adds a decode with its draft tokens; returns its tokens, 0 if it does not fit."""
        return self.take(slot, 1 + int(self._requests["speculative"][slot]), evict=True)

    def take(self, slot: int, tokens: int, *, evict: bool) -> int:
        """Adds up to ``tokens`` of a request; returns how many. ``evict``: preempt running ones behind it if need be.

        Those before it are safe, so two requests that do not fit together never take turns to preempt each other.
        """
        request = self._requests[slot]
        missing = int(request["target"] - request["computed"])
        is_decode = missing == 1 and request["output"] > 0
        tokens = min(tokens, missing + (int(request["speculative"]) if is_decode else 0), self._left)
        if tokens <= 0 or slot in self._chosen or slot in self._victims():
            return 0
        held, computed = int(request["blocks"]), int(request["computed"])
        wanted = max(0, -(-(computed + tokens) // self._size) - held)
        while evict and wanted > self._free and self._preempt_last(slot):
            pass
        if wanted > self._free:
            tokens = min(tokens, (held + self._free) * self._size - computed)
            wanted = self._free
        if tokens <= 0:
            return 0
        self._plan.entries[self._plan.count] = (slot, tokens)
        self._plan.count += 1
        self._chosen.add(slot)
        self._free -= wanted
        self._left -= tokens
        self.tokens += tokens
        self._has_decodes |= is_decode
        self._has_prompts |= not is_decode
        return tokens

    def share(self, slots: list[int], tokens: int, target: Target, *, late: int) -> None:
        """Spreads prompt tokens over the first ``target.sharing`` of the slots; what they do not need, others get.

        The first ``late`` may preempt.
        """
        count = min(target.sharing, len(slots))
        weights = [target.evenness**place for place in range(count)]
        missing = [int(self._requests["target"][slot] - self._requests["computed"][slot]) for slot in slots]
        given = [min(missing[place], int(tokens * weights[place] / sum(weights))) for place in range(count)]
        given += [0] * (len(slots) - count)
        left = tokens - sum(given)
        for place in range(len(slots)):
            more = min(left, missing[place] - given[place])
            given[place] += more
            left -= more
        for place, (slot, part) in enumerate(zip(slots, given, strict=True)):
            if part > 0 and self._left > 0:
                self.take(slot, part, evict=place < late)

    def _victims(self) -> Iterable[int]:
        return self._plan.victims[: self._plan.victim_count].tolist() if self._plan.victim_count else ()

    def _preempt_last(self, keep: int) -> bool:
        """Preempts the last running request behind ``keep`` that is not in the batch; returns whether there is one."""
        while self._tail and self._tail[-1] != keep:
            slot = self._tail.pop()
            if slot not in self._chosen:
                self._plan.victims[self._plan.victim_count] = slot
                self._plan.victim_count += 1
                self._free += int(self._requests["blocks"][slot])
                return True
        return False


def _window(slots: Ints, context: Ints, place: float, count: int) -> list[int]:
    """Returns ``count`` neighbours in the order of their contexts, from ``place`` (0 to 1) on, around the end."""
    if not len(slots) or count <= 0:
        return []
    order = slots[np.argsort(context, kind="stable")]
    first = int(place * len(order))
    return [*order[first:].tolist(), *order[:first].tolist()][:count]


def _build(parameters: ExploreParameters, context: PolicyContext) -> ExplorePolicy:
    return ExplorePolicy(parameters, context)


register("explore", ExploreParameters, _build, "for profiling only: batches of every size and kind, heedless of SLOs")
