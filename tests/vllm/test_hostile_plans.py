"""Whatever a plan says, vLLM loses nothing: no token, no request, no KV block, and never its way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="needs vLLM: see docs/vllm.md")

from slidingserve.contract.values import BatchAllocation, IterationState, Snapshot, Step
from tests.vllm.engine_checks import check_end, waiting_ids
from tests.vllm.random_load import Load, drive
from tests.vllm.scheduler_objects import EngineLoop, Setup, make_request
from tests.vllm.sources import FunctionSource, WantedPlan, advised_loop, is_advised

pytestmark = pytest.mark.vllm

ways = pytest.mark.parametrize(
    ("asynchronous", "prefetch"), [(False, False), (False, True), (True, False)], ids=["sync", "ahead", "async"]
)
RUNS = 40
"""Of each kind; there are six."""


class Hostile:
    """Makes plans that nobody should make."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._last: list[tuple[str, int]] = []
        self.loop: EngineLoop | None = None

    def plan(self, source: FunctionSource, iteration: IterationState) -> WantedPlan:
        chance = self._chance
        mood = chance.random()
        if mood < 0.1:
            return None
        if mood < 0.15:
            return []
        if mood < 0.2:
            return self._last  # too late: for another iteration
        names = list(source.handles)
        if mood < 0.3 and self.loop is not None:
            names = [name for name in waiting_ids(self.loop.scheduler) if name in source.handles]
        chance.shuffle(names)
        plan = [(name, self._tokens()) for name in names[: chance.randint(0, len(names))]]
        if plan and chance.random() < 0.1:
            plan.append((chance.choice(plan)[0], self._tokens()))
        if chance.random() < 0.2:
            plan.insert(chance.randint(0, len(plan)), ("nobody", self._tokens()))
        self._last = plan
        return plan

    def victims(self, source: FunctionSource) -> Sequence[str]:
        if self._chance.random() > 0.1:
            return ()
        names = [*source.handles, "nobody"]
        return self._chance.choices(names, k=self._chance.randint(1, 3))

    def _tokens(self) -> int:
        return self._chance.choice([-5, 0, 1, 1, 1, 7, 16, 33, 100, 5000])


@ways
@pytest.mark.parametrize("blocks", [30, 400])
def test_hostile_plans_harm_nobody(asynchronous: bool, prefetch: bool, blocks: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(RUNS):
        chance = random.Random(seed)
        hostile = Hostile(chance)
        source = FunctionSource(hostile.plan, victims=hostile.victims)
        setup = Setup(
            asynchronous=asynchronous,
            blocks=blocks,
            max_sequences=chance.randint(8, 16),
            policy=chance.choice(["fcfs", "priority"]),
            reserve_full_prompt=chance.random() < 0.5,
            watermark=chance.choice([0.0, 0.05]),
        )
        loop = hostile.loop = advised_loop(setup, source, prefetch=prefetch)
        totals["steps"] += drive(loop, chance, Load(structured=0.1))
        check_end(loop, setup)
        assert is_advised(source)
        totals["preemptions"] += loop.preemptions
        totals["aborts"] += len(loop.aborted)
        totals["runs"] += 1
    print(f"blocks {blocks}, async {asynchronous}, ahead {prefetch}: {dict(totals)}")
    assert totals["aborts"] > RUNS
    assert totals["preemptions"] > RUNS or blocks == 400


class Broken(FunctionSource):
    """Answers as the function says, and one day no more as a source should."""

    def __init__(self, hostile: Hostile, chance: random.Random) -> None:
        super().__init__(hostile.plan, victims=hostile.victims)
        self._good_answers = chance.randint(0, 60)
        self._raises = chance.random() < 0.5

    def answer(self, message: Step | Snapshot) -> BatchAllocation | None:
        answer = super().answer(message)
        if answer is None or self.asked <= self._good_answers:
            return answer
        if self._raises:
            raise RuntimeError("this source is broken")
        return answer._replace(handles=np.append(answer.handles, 1), tokens=answer.tokens)


@ways
def test_a_source_that_breaks_is_left_and_vllm_goes_on(asynchronous: bool, prefetch: bool) -> None:
    for seed in range(10):
        chance = random.Random(seed)
        hostile = Hostile(chance)
        source = Broken(hostile, chance)
        setup = Setup(asynchronous=asynchronous, blocks=60, max_sequences=8)
        loop = hostile.loop = advised_loop(setup, source, prefetch=prefetch)
        drive(loop, chance, Load(structured=0.1))
        check_end(loop, setup)
        assert not is_advised(source)


@ways
def test_after_five_hundred_requests_every_block_is_free(asynchronous: bool, prefetch: bool) -> None:
    chance = random.Random(11)
    setup = Setup(asynchronous=asynchronous, blocks=100, max_tokens=512, max_sequences=32, reserve_full_prompt=False)
    hostile = Hostile(chance)
    source = FunctionSource(hostile.plan, victims=hostile.victims)
    loop = hostile.loop = advised_loop(setup, source, prefetch=prefetch)

    drive(loop, chance, Load(requests=500, arriving=0.9, aborted=0.06))
    assert len(loop.requests) == 500
    assert len(loop.aborted) > 50
    assert loop.preemptions > 0
    check_end(loop, setup)
    assert is_advised(source)


@ways
def test_who_is_never_served_is_served_by_the_watchdog(asynchronous: bool, prefetch: bool) -> None:
    """Five requests that plans leave out: one amid its prompt, one while it decodes, three from the start."""

    def favourites(source: FunctionSource, _: IterationState) -> WantedPlan:
        if source.asked == 1:
            return [("s0", 50), ("s1", 1000), ("f0", 100)]
        return [(name, 100) for name in source.handles if name.startswith("f")] or [("nobody", 1)]

    setup = Setup(asynchronous=asynchronous, max_tokens=512)
    source = FunctionSource(favourites)
    loop = advised_loop(setup, source, prefetch=prefetch, starvation_seconds=0.5, waiting_starvation_seconds=2.0)
    loop.add(*(make_request(f"s{number}", 100, 5) for number in range(5)))
    ended: dict[str, int] = {}
    steps = 0
    while len([name for name in ended if name.startswith("s")]) < 5:
        if steps % 10 == 0:  # there is always a favourite
            loop.add(make_request(f"f{steps // 10}", 100, 30))
        loop.step()
        steps += 1
        assert steps < 3000, f"starved: {waiting_ids(loop.scheduler)}"
        for name in loop.finished:
            ended.setdefault(name, steps)
    # 10 ms each: nobody is rescued before the time, and a favourite was there all along.
    assert min(ended[name] for name in ("s0", "s1")) > 50
    assert min(ended[name] for name in ("s2", "s3", "s4")) > 200
    loop.run_out()
    check_end(loop, setup)
    assert is_advised(source)
