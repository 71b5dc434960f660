"""The mirror equals the engine after any sequence of arrivals, finishes, aborts, preemptions, losses and resyncs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import InProcessSource
from slidingserve.contract.values import EngineLimits, OpenSession
from tests.core.toy_policies import toys
from tests.simulated.flaky_source import Fault, FlakySource
from tests.strategies import Feed, LinearTimer, feed, feeds, random_feed, run_to_end, tight_limits

SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

faults = st.lists(st.sampled_from(Fault), max_size=40)
aborts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=6)
policies = st.sampled_from([("vllm", {}), ("shortest", {}), ("wild", {"seed": "1"}), ("wild", {"seed": "2"})])
FEW = EngineLimits(max_tokens_per_iteration=16, max_sequences=3, kv_blocks=9, kv_block_tokens=4)
THREE = feed([(0.0, 9, 6), (0.0, 12, 6), (0.0, 10, 8)])


def drive(engine: SimulatedEngine, aborts: list[tuple[int, int]]) -> set[int]:
    """Runs to the end, aborting (steps, handle) on the way; returns the handles that were aborted alive."""
    aborted = set()
    for steps in range(5000):
        for handle in (handle for due, handle in aborts if due == steps):
            before = engine.live
            engine.abort(handle)
            if engine.live < before:
                aborted.add(handle)
        if not engine.step():
            return aborted
    raise AssertionError("the engine makes no progress")


@SETTINGS
@given(feeds(), tight_limits(), faults, aborts, policies)
@example(THREE, FEW, [Fault.NONE, Fault.NONE, Fault.VICTIMS_FOR_NOTHING], [], ("vllm", {}))
@example(THREE, FEW, [Fault.NONE, Fault.NO_TOKENS], [], ("vllm", {}))
@example(THREE, FEW, [Fault.NONE, Fault.ALL_VICTIMS, Fault.DROP], [(2, 0)], ("shortest", {}))
def test_mirror_follows_engine(
    requests: Feed,
    limits: EngineLimits,
    faults: list[Fault],
    aborts: list[tuple[int, int]],
    policy: tuple[str, dict[str, str]],
) -> None:
    with toys():
        source = FlakySource(limits, faults)
        source.open(OpenSession(limits, policy=policy[0], policy_parameters=policy[1]))
        engine = SimulatedEngine(requests, limits, LinearTimer(), source)
        aborted = drive(engine, aborts)
    outcome = engine.outcome()
    fits = requests.prompt_tokens + requests.output_tokens <= limits.kv_blocks * limits.kv_block_tokens
    whole = fits & ~np.isin(np.arange(len(fits)), list(aborted))
    assert (outcome.output_tokens[whole] == requests.output_tokens[whole]).all()
    assert outcome.finished[whole].all()
    assert not outcome.finished[~whole].any()
    assert (outcome.output_tokens <= requests.output_tokens).all()
    assert outcome.rejected == np.count_nonzero(~fits)
    assert engine.live == 0
    assert engine.finished == len(fits)
    assert engine.snapshot().iteration.free_kv_blocks == limits.kv_blocks
    assert math.isfinite(outcome.makespan_seconds)


@settings(SETTINGS, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(Fault), min_size=20, max_size=200))
def test_mirror_follows_larger_engine(seed: int, faults: list[Fault]) -> None:
    limits = EngineLimits(max_tokens_per_iteration=48, max_sequences=12, kv_blocks=30, kv_block_tokens=4)
    requests = random_feed(seed, 40, prompt=40, output=12, gap_seconds=0.02)
    source = FlakySource(limits, faults)
    source.open(OpenSession(limits, policy="vllm"))
    engine = SimulatedEngine(requests, limits, LinearTimer(), source)
    drive(engine, [(steps, steps * 7 % 40) for steps in range(0, 200, 20)])
    assert engine.snapshot().iteration.free_kv_blocks == limits.kv_blocks


def test_the_property_meets_preemptions_and_exact_steps() -> None:
    """Guards the tests above against becoming empty."""
    limits = EngineLimits(max_tokens_per_iteration=48, max_sequences=12, kv_blocks=30, kv_block_tokens=4)
    source = FlakySource(limits, [])
    source.open(OpenSession(limits, policy="vllm"))
    engine = SimulatedEngine(random_feed(1, 40, 40, 12, 0.02), limits, LinearTimer(), source)
    drive(engine, [])
    assert engine.outcome().preemptions >= 5
    assert source.exact == engine.iterations - 1
    assert engine.outcome().fallbacks == 0


def test_aborted_request_is_gone_from_the_mirror_at_once() -> None:
    source = InProcessSource()
    source.open(OpenSession(FEW, policy="vllm"))
    engine = SimulatedEngine(THREE, FEW, LinearTimer(), source)
    engine.step()
    engine.abort(0)
    engine.abort(0)
    engine.step()
    assert 0 not in source.session.mirror.queues
    assert engine.live == 2


@pytest.mark.parametrize("handle", [-1, -3, 3, 10**9])
def test_unknown_handles_cannot_be_aborted(handle: int) -> None:
    engine = SimulatedEngine(THREE, FEW, LinearTimer())
    engine.step()
    before = engine.snapshot()
    engine.abort(handle)
    assert engine.live == 3
    assert engine.snapshot().requests.handles.tolist() == before.requests.handles.tolist()
    run_to_end(engine)
    assert engine.outcome().finished.all()


def test_request_cannot_be_aborted_before_it_arrives() -> None:
    source = InProcessSource()
    source.open(OpenSession(FEW, policy="vllm"))
    engine = SimulatedEngine(feed([(0.0, 4, 4), (5.0, 4, 4)]), FEW, LinearTimer(), source)
    engine.step()
    engine.abort(1)
    run_to_end(engine)
    assert engine.outcome().finished.all()
