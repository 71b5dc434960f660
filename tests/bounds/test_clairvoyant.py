"""The clairvoyant optimum: against enumeration, by hand, in the engine, and no policy beats it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.clairvoyant import Iteration, clairvoyant_optimum
from evaluation.bounds.comparison import InstanceKind, compare, render, run_policy, small_instance, small_limits
from evaluation.scores import missed_deadlines
from evaluation.workloads import Workload
from sidecar.policies.registry import BUILT_IN
from slidingserve.contract.values import BatchAllocation, EngineLimits, OpenSession, SessionOpened, Snapshot, Step
from tests.bounds.bounds_reference import check_schedule, most_met, profile, workload

ROOMY = EngineLimits(max_tokens_per_iteration=8, max_sequences=8, kv_blocks=1000, kv_block_tokens=16)
LINEAR = profile([0.01 + 0.001 * n for n in range(1, 9)])  # 10 ms and 1 ms per token
POLICIES = [name for name in BUILT_IN if name != "explore"]


def test_one_after_the_other_by_hand() -> None:
    """Each takes 18 ms alone; 36 ms for both, so with 30 ms for each only one can be met, with 36 both."""
    timer = ProfileTimer(LINEAR)
    for ttft, most in ((0.0179, 0), (0.030, 1), (0.0361, 2)):
        work = workload([(0.0, 8, 1, ttft, 1.0), (0.0, 8, 1, ttft, 1.0)])
        optimum = clairvoyant_optimum(work, timer, ROOMY, granularities_tokens=(1,))
        assert (optimum.met_at_least, optimum.met_at_most) == (most, most)
        assert optimum.settled
        check_schedule(work, timer, ROOMY, optimum)


def test_waiting_for_a_request_that_is_known_to_come() -> None:
    """The first has time, the second none: it is met only if the engine idles until it arrives."""
    work = workload([(0.0, 8, 1, 0.060, 1.0), (0.005, 8, 1, 0.0181, 1.0)])
    optimum = clairvoyant_optimum(work, ProfileTimer(LINEAR), ROOMY, granularities_tokens=(8,))
    assert optimum.met == (0, 1)
    first = optimum.schedule[0]
    assert (first.start_seconds, first.batch) == (0.005, ((1, 8),))


def test_a_decode_is_postponed_for_a_prefill() -> None:
    """Request 0 has 20 ms left for its second token when request 1, which has none, arrives with 8 tokens."""
    work = workload([(0.0, 7, 2, 0.040, 0.016), (0.017, 8, 1, 0.0185, 1.0)])
    optimum = clairvoyant_optimum(work, ProfileTimer(LINEAR), ROOMY, granularities_tokens=(1,))
    assert optimum.settled
    assert [iteration.batch for iteration in optimum.schedule] == [((0, 7),), ((1, 8),), ((0, 1),)]


@pytest.mark.parametrize(
    ("limits", "most"),
    [(replace(ROOMY, max_sequences=1), 1), (replace(ROOMY, kv_blocks=1), 1), (ROOMY, 2)],
    ids=["sequences", "blocks", "roomy"],
)
def test_limits_of_the_engine_hold(limits: EngineLimits, most: int) -> None:
    """Both in one iteration are in time, one after the other are not."""
    work = workload([(0.0, 4, 1, 0.020, 1.0), (0.0, 4, 1, 0.020, 1.0)])
    optimum = clairvoyant_optimum(work, ProfileTimer(LINEAR), limits, granularities_tokens=(1,))
    assert (optimum.met_at_least, optimum.met_at_most) == (most, most)


def test_a_request_that_the_engine_rejects_is_not_met() -> None:
    work = workload([(0.0, 8, 1, 1.0, 1.0), (0.0, 8, 12, 1.0, 1.0)])
    limits = replace(ROOMY, kv_blocks=1)
    assert clairvoyant_optimum(work, ProfileTimer(LINEAR), limits, granularities_tokens=(1,)).met == (0,)


def test_last_token_deadline_and_no_deadline() -> None:
    timer = ProfileTimer(LINEAR)
    work = workload([(0.0, 8, 3, 0.0, 0.0)])
    assert clairvoyant_optimum(work, timer, ROOMY).met_at_most == 1
    for ttlt, met in ((0.0399, 0), (0.0401, 1)):  # 18 + 11 + 11 ms
        limited = replace(work, ttlt_slo_seconds=np.array([ttlt]))
        assert clairvoyant_optimum(limited, timer, ROOMY).met_at_least == met


def test_without_steps_it_says_what_is_not_known() -> None:
    work = workload([(0.0, 8, 1, 0.030, 1.0), (0.0, 8, 1, 0.030, 1.0)])
    optimum = clairvoyant_optimum(work, ProfileTimer(LINEAR), ROOMY, max_steps=1)
    assert str(optimum) == "not settled: between 0 and 2"
    assert not optimum.best_on_grid


def test_too_many_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="17 requests; the exact search takes 1 to 16"):
        clairvoyant_optimum(workload([(0.0, 1, 1, 1.0, 1.0)] * 17), ProfileTimer(LINEAR), ROOMY)


def a_tiny_instance(seed: int) -> tuple[Workload, ProfileTimer]:
    """Three requests of up to 3 + 2 tokens on hardware whose time falls and rises with the tokens."""
    random = np.random.default_rng(seed)
    hardware = profile(
        random.uniform(0.5, 2.0, 4).tolist(),
        decode_requests_to_8=float(random.choice([0.0, 0.4])),
        mixed_iteration=float(random.choice([0.0, 0.3])),
        prefill_only_iteration=float(random.choice([0.0, 0.3])),
        prefill_requests=0.1,
        prefill_prefix=0.05,
        mixed_kv_to_8k=0.02,
        decode_kv_to_4k=0.02,
    )
    rows = [
        (
            random.uniform(0, 1),
            random.integers(1, 4),
            random.integers(1, 3),
            random.uniform(1, 3),
            random.uniform(0.8, 2),
        )
        for _ in range(3)
    ]
    return workload(sorted((float(a), int(p), int(o), float(f), float(b)) for a, p, o, f, b in rows)), ProfileTimer(
        hardware
    )


def test_enumeration_of_all_schedules_lies_within_the_bounds_and_mostly_on_both() -> None:
    limits = replace(ROOMY, max_tokens_per_iteration=4)
    settled, below_all = 0, 0
    for seed in range(12):
        work, timer = a_tiny_instance(seed)
        optimum = clairvoyant_optimum(work, timer, limits, granularities_tokens=(1,))
        check_schedule(work, timer, limits, optimum)
        most = most_met(work, timer, 4)
        assert optimum.met_at_least <= most <= optimum.met_at_most
        coarse = clairvoyant_optimum(work, timer, limits, granularities_tokens=(2,))
        assert coarse.met_at_least <= most <= coarse.met_at_most
        settled += optimum.settled
        below_all += most < len(work)
    assert settled >= 9
    assert below_all >= 4


class Scripted:
    """Hands the engine the batches of a schedule, then leaves it alone."""

    def __init__(self, schedule: tuple[Iteration, ...]) -> None:
        self._schedule = list(schedule)

    def open(self, message: OpenSession) -> SessionOpened:
        raise NotImplementedError  # the engine is given an open source

    def close(self) -> None:
        pass

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        if not self._schedule:
            return None
        batch = self._schedule.pop(0).batch
        return BatchAllocation(
            step.iteration.epoch,
            step.iteration.step,
            np.array([row for row, _ in batch]),
            np.array([tokens for _, tokens in batch]),
        )


def test_the_schedule_meets_in_the_engine_what_it_says() -> None:
    hardware = load_profile("rtx3090-tp2")
    limits, timer = small_limits(hardware, InstanceKind()), ProfileTimer(hardware)
    for seed in range(3):
        work = small_instance(hardware, seed, InstanceKind(requests=6))
        work = replace(work, arrival_seconds=np.zeros(len(work)), ttft_slo_seconds=2 * work.ttft_slo_seconds)
        optimum = clairvoyant_optimum(work, timer, limits, granularities_tokens=(64,), max_steps=300_000)
        assert optimum.met_at_least > 0
        outcome = SimulatedEngine(work, limits, timer, Scripted(optimum.schedule)).run()
        assert not missed_deadlines(work, outcome)[list(optimum.met)].any()


@pytest.mark.parametrize("name", ["h100-tp1", "rtx3090-tp2"])
def test_no_policy_beats_the_optimum(name: str) -> None:
    hardware = load_profile(name)
    comparison = compare(POLICIES, hardware, range(8), InstanceKind(requests=6, granularities=(64,)))
    assert [d.policy for d in comparison.distances if d.beyond] == []
    assert comparison.met_at_most < comparison.requests
    assert len({d.met for d in comparison.distances}) > 1
    text = render(comparison)
    assert all(policy in text for policy in POLICIES)
    assert f"meets {comparison.met_at_least}" in text


def test_no_policy_beats_the_optimum_where_the_cache_is_too_small_for_all() -> None:
    hardware = replace(load_profile("a100-tp1"), kv_blocks=600, kv_block_tokens=1)
    kind = InstanceKind(requests=6, granularities=(64,))
    limits, timer, preemptions = small_limits(hardware, kind), ProfileTimer(hardware), 0
    for seed in range(3, 8):
        work = small_instance(hardware, seed, kind)
        optimum = clairvoyant_optimum(work, timer, limits, granularities_tokens=(64,), max_steps=300_000)
        check_schedule(work, timer, limits, optimum)
        for policy in POLICIES:
            outcome = run_policy(policy, work, hardware, limits)
            preemptions += outcome.preemptions
            assert np.count_nonzero(~missed_deadlines(work, outcome)) <= optimum.met_at_most
    assert preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["a100-tp1", "h100-tp1", "rtx3090-tp2", "rtx4090-tp1", "rtxpro6000-tp1"])
def test_no_policy_beats_the_optimum_on_many_instances(name: str) -> None:
    kind = InstanceKind(requests=8, granularities=(64, 32))
    comparison = compare(POLICIES, load_profile(name), range(100, 150), kind)
    assert [d.policy for d in comparison.distances if d.beyond] == []
