"""What the sidecar is told of vLLM's queues is what they are, at every step and whatever happens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="needs vLLM: see docs/vllm.md")

from sidecar.policies.base import Plan, PolicyContext
from sidecar.queues import RUNNING, Queues
from sidecar.session.machine import State
from slidingserve.contract.values import IterationState, Step
from tests.vllm.engine_checks import check_end, free_blocks, running_ids, waiting_ids
from tests.vllm.random_load import Load, drive
from tests.vllm.scheduler_objects import BLOCK_TOKENS, EngineLoop, Setup, make_request
from tests.vllm.sources import SessionSource, advised_loop, is_advised

pytestmark = pytest.mark.vllm

ways = pytest.mark.parametrize(
    ("asynchronous", "prefetch"), [(False, False), (False, True), (True, False)], ids=["sync", "ahead", "async"]
)


class RandomPolicy:
    """Some of the requests in some order with some tokens; now and then victims. Never too much: the guard cuts it."""

    version, model_version = "random/1", ""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        rng = self._rng
        waiting = queues.waiting_slots if iteration.may_admit else queues.waiting_slots[:0]
        for slots, share in ((queues.running_slots, 0.9), (waiting, 0.5)):
            for slot in rng.permutation(slots).tolist():
                if rng.random() < share:
                    plan.entries[plan.count] = (slot, int(rng.choice([1, 7, 16, 33, 100, 5000])))
                    plan.count += 1
        if len(queues.running_slots) > 1 and rng.random() < 0.02:
            plan.victims[0] = rng.choice(queues.running_slots)
            plan.victim_count = 1


class Comparison:
    """Compares the mirror with vLLM's objects and with what the runner has computed, whenever an answer is given.

    Args:
        source: who has the mirror.
        loop: who has the rest.
        in_order: whether the policy keeps to the order in which requests were admitted.
        resets: whether running requests may be preempted between two iterations, and their tokens thrown away.
    """

    def __init__(self, source: SessionSource, loop: EngineLoop, *, in_order: bool, resets: bool = False) -> None:
        self._source, self._loop = source, loop
        self._in_order, self._resets = in_order, resets
        self._rows = 0
        self._difference: AssertionError | None = None
        source.look = self._look

    def finish(self) -> None:
        """Asserts that there never was a difference, over many rows."""
        if self._difference is not None:
            raise self._difference
        assert self._rows > 1000

    def _look(self, ahead: bool) -> None:
        if ahead and self._resets:
            return
        try:
            self._compare(ahead)
        except AssertionError as difference:
            self._difference = self._difference or difference  # whoever calls this would swallow it
            raise

    def _compare(self, ahead: bool) -> None:
        """Asserts that the mirror holds what the engine holds.

        ``ahead``: the session was asked when the last batch was launched; since then its result was taken in, so that
        requests may have ended, and others may have come.
        """
        queues = self._source.session.mirror.queues
        scheduler = self._loop.scheduler
        live = {
            name: request
            for name, request in scheduler.requests.items()
            if not request.is_finished() and not scheduler._is_blocked_waiting_status(request.status)
        }
        told = self._source.handles
        if not ahead:
            assert set(told) == set(live), "the mirror holds other requests"
            assert self._source.messages[-1].iteration.free_kv_blocks == free_blocks(scheduler)
        names = {handle: name for name, handle in told.items() if name in live}
        assert len(queues) == len(told)
        running = self._names(queues, queues.running_slots, names)
        waiting = self._names(queues, queues.waiting_slots, names)
        in_vllm = running_ids(scheduler), [name for name in waiting_ids(scheduler) if name in told]
        if self._in_order:
            assert (running, waiting) == in_vllm
        assert (set(running), set(waiting)) == (set(in_vllm[0]), set(in_vllm[1]))
        for name in names.values():
            self._compare_row(queues.requests[queues.slot(told[name])], live[name])

    @staticmethod
    def _names(queues: Queues, slots: Any, names: dict[int, str]) -> list[str]:
        handles = queues.requests["handle"][slots].tolist()
        return [names[handle] for handle in handles if handle in names]

    def _compare_row(self, row: Any, request: Any) -> None:
        name = request.request_id
        self._rows += 1
        assert row["prompt"] == request.num_prompt_tokens
        assert row["max_output"] == request.max_tokens
        assert row["target"] == row["prompt"] + row["output"], name
        text = self._loop.runner.texts.get(name)
        generated = len(text.tokens) - request.num_prompt_tokens if text is not None else 0
        if row["state"] == RUNNING:
            assert text is not None
            assert row["computed"] == text.computed, f"{name}: the runner has computed {text.computed}"
            assert row["output"] == generated, f"{name}: the runner has sampled {generated}"
            held = self._loop.scheduler.kv_cache_manager.get_block_ids(name)[0]
            assert row["blocks"] == len(held) == -(-text.computed // BLOCK_TOKENS)
            return
        assert row["blocks"] == 0
        if request.num_preemptions == 0:
            assert row["output"] == 0
            assert row["computed"] < row["prompt"]  # what may be cached
        elif request.num_stale_output_tokens == 0:
            assert row["output"] == request.num_output_tokens
            assert generated == row["output"] or self._resets
        else:  # sampled, and on its way to the scheduler
            assert request.num_output_tokens <= row["output"] <= generated


LOAD = Load(requests=60, output_tokens=40, arriving=0.6, aborted=0.02)


class Losses:
    """Says of each answer whether it gets lost.

    Attributes:
        lost: how many did.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._chance = random.Random(3)
        self.lost = 0

    def __call__(self) -> bool:
        is_lost = self._chance.random() < self._share
        self.lost += is_lost
        return is_lost


def random_policy(name: str, parameters: dict[str, str], context: PolicyContext) -> RandomPolicy:
    return RandomPolicy(5)


@ways
@pytest.mark.parametrize("blocks", [30, 1000])
@pytest.mark.parametrize("policy", ["vllm", "random"])
@pytest.mark.parametrize("withheld", [0.0, 0.1])
def test_the_mirror_equals_the_engine(
    asynchronous: bool, prefetch: bool, blocks: int, policy: str, withheld: float
) -> None:
    losses = Losses(withheld)
    source = SessionSource(build_policy=random_policy if policy == "random" else None, withhold=losses)
    setup = Setup(asynchronous=asynchronous, blocks=blocks, max_sequences=8, reserve_full_prompt=blocks > 100)
    loop = advised_loop(setup, source, prefetch=prefetch)
    comparison = Comparison(source, loop, in_order=policy == "vllm")
    drive(loop, random.Random(7), LOAD)
    comparison.finish()
    check_end(loop, setup)
    assert is_advised(source)
    assert loop.preemptions > 0 or blocks == 1000
    assert (losses.lost > 0) == (withheld > 0)
    assert source.gaps == 0, "a snapshot where no answer was withheld"
    assert source.session.state is State.SYNCED


@ways
def test_where_all_goes_by_plan_nothing_else_is_said(asynchronous: bool, prefetch: bool) -> None:
    source = SessionSource()
    setup = Setup(asynchronous=asynchronous, max_sequences=8)
    loop = advised_loop(setup, source, prefetch=prefetch)
    loop.add(*(make_request(f"r{number}", 10 * number, 20) for number in range(1, 20)))
    loop.run_out()
    steps = [message for message in source.messages if isinstance(message, Step)]
    assert len(steps) == len(source.messages) > 40
    assert not [step for step in steps if step.progress is not None]
    # Who ends while the answer is under way does not run; of the others all that was asked for was done.
    deviations = [step for step in steps[1:] if not step.applied_exactly]
    assert len(deviations) < len(steps) / 4
    assert sum(len(step.finished_handles) for step in steps) >= 11
    check_end(loop, setup)


@ways
def test_requests_without_a_grammar_are_in_nobodys_way(asynchronous: bool, prefetch: bool) -> None:
    """They are told when they can run; until then the mirror does without them."""
    losses = Losses(0.05)
    source = SessionSource(build_policy=random_policy, withhold=losses)
    setup = Setup(asynchronous=asynchronous, blocks=30, max_sequences=8, reserve_full_prompt=False)
    loop = advised_loop(setup, source, prefetch=prefetch)
    comparison = Comparison(source, loop, in_order=False)
    drive(loop, random.Random(7), replace(LOAD, structured=0.3))
    comparison.finish()
    check_end(loop, setup)
    assert is_advised(source)
    assert source.session.state is State.SYNCED


def reset_in_the_middle(policy: str, *, asynchronous: bool, prefetch: bool) -> None:
    """Drops the prefix cache now and then, which preempts between two iterations; no step tells, a snapshot does."""
    source = SessionSource(build_policy=random_policy if policy == "random" else None)
    setup = Setup(asynchronous=asynchronous, blocks=30, max_sequences=8, reserve_full_prompt=False)
    loop = advised_loop(setup, source, prefetch=prefetch)
    comparison = Comparison(source, loop, in_order=False, resets=True)
    drive(loop, random.Random(7), replace(LOAD, resets=0.05))
    comparison.finish()
    check_end(loop, setup)
    assert is_advised(source), "the session refused a message, or worse; the log says what"
    assert source.gaps > 0
    assert source.session.state is State.SYNCED


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["vllm", "random"])
def test_a_reset_of_the_prefix_cache_in_the_middle_of_everything(policy: str, asynchronous: bool) -> None:
    reset_in_the_middle(policy, asynchronous=asynchronous, prefetch=False)


def test_a_reset_of_the_prefix_cache_after_the_next_plan_was_asked_for() -> None:
    reset_in_the_middle("random", asynchronous=False, prefetch=True)
