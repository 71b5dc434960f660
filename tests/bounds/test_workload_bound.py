"""The upper bound for full workloads: by hand, against optima and policies, and how it moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.clairvoyant import clairvoyant_optimum
from evaluation.bounds.comparison import InstanceKind, run_policy, small_instance, small_limits
from evaluation.bounds.workload import bound_goodput, upper_bound
from evaluation.scores import missed_deadlines
from evaluation.simulate import engine_limits
from evaluation.workloads import Workload, make_workload, parse_workload, solo_ttft
from sidecar.policies.registry import BUILT_IN
from slidingserve.contract.values import EngineLimits, Floats, Ints
from tests.bounds.bounds_reference import profile, workload

LIMITS = EngineLimits(max_tokens_per_iteration=100, max_sequences=8, kv_blocks=1000, kv_block_tokens=16)
PER_TOKEN = ProfileTimer(profile([0.001 * n for n in range(1, 101)]))  # 1 ms per token and nothing else
POLICIES = [name for name in BUILT_IN if name != "explore"]


def requests(name: str, rate: float, count: int, hardware: str = "rtx3090-tp2") -> Workload:
    timer = ProfileTimer(load_profile(hardware))

    def solo(prompt_tokens: Ints) -> Floats:
        return solo_ttft(timer, prompt_tokens)

    return make_workload(parse_workload(name), rate=rate, requests=count, seed=3, solo_ttft_seconds=solo)


def test_what_does_not_fit_is_late_by_hand() -> None:
    """Prompts of 100 ms: in 250 ms two of five fit; the other three are late, whatever is done."""
    bound = upper_bound(workload([(0.0, 100, 1, 0.25, 1.0)] * 5), PER_TOKEN, LIMITS)
    assert (bound.met_at_most, bound.hopeless) == (2, 0)
    assert bound.work_seconds == pytest.approx(0.5)
    (interval,) = bound.intervals
    assert (interval.first, interval.stop, interval.late) == (0, 5, 3)
    assert interval.end_seconds == pytest.approx(0.25)
    assert bound.share_late_at_least == pytest.approx(0.6)


def test_the_largest_are_taken_out_first() -> None:
    """10 + 10 + 100 ms in 60 ms: only the long one, hopeless by itself, is lost; with 101 ms one has to be, any."""
    rows = [(0.0, 10, 1, 0.06, 1.0), (0.0, 10, 1, 0.06, 1.0), (0.0, 100, 1, 0.06, 1.0)]
    assert upper_bound(workload(rows), PER_TOKEN, LIMITS).hopeless == 1
    rows = [(a, p, o, 0.101, b) for a, p, o, _, b in rows]
    bound = upper_bound(workload(rows), PER_TOKEN, LIMITS)
    assert (bound.hopeless, bound.met_at_most) == (0, 2)


def test_bursts_far_apart_add_up() -> None:
    burst = [(0.0, 100, 1, 0.25, 1.0)] * 5
    both = burst + [(10.0, p, o, f, b) for _, p, o, f, b in burst]
    bound = upper_bound(workload(both), PER_TOKEN, LIMITS)
    assert bound.met_at_most == 4
    assert [interval.late for interval in bound.intervals] == [3, 3]


def test_decodes_count_up_to_their_deadlines() -> None:
    """First tokens fit (3 x 50 ms by 150 ms), and so do all decodes but those of one request (each 50 ms) by 250 ms."""
    rows = [(0.0, 50, 51, 0.15, 0.002)] * 3
    assert upper_bound(workload([(a, p, 1, f, b) for a, p, _, f, b in rows]), PER_TOKEN, LIMITS).met_at_most == 3
    assert upper_bound(workload(rows), PER_TOKEN, LIMITS).met_at_most == 2


def test_last_token_deadlines_count_and_no_deadline_never_binds() -> None:
    work = workload([(0.0, 100, 1, 0.0, 0.0)] * 5)
    assert upper_bound(work, PER_TOKEN, LIMITS).met_at_most == 5
    assert upper_bound(replace(work, ttlt_slo_seconds=np.full(5, 0.25)), PER_TOKEN, LIMITS).met_at_most == 2


@pytest.mark.parametrize("name", ["h100-tp1", "rtx3090-tp2"])
def test_it_is_never_below_the_optimum(name: str) -> None:
    hardware, kind = load_profile(name), InstanceKind(requests=6, granularities=(64,))
    limits, timer, bounded = small_limits(hardware, kind), ProfileTimer(hardware), 0
    for seed in range(10):
        work = small_instance(hardware, seed, kind)
        work = replace(work, arrival_seconds=0.3 * work.arrival_seconds)
        optimum = clairvoyant_optimum(work, timer, limits, granularities_tokens=(64,), max_steps=300_000)
        bound = upper_bound(work, timer, limits)
        assert bound.met_at_most >= optimum.met_at_least
        bounded += bound.met_at_most < len(work)
    assert bounded > 0


def check_against_policies(name: str, rates: tuple[float, ...], count: int, hardware: str) -> None:
    profile_ = load_profile(hardware)
    limits, timer = engine_limits(profile_), ProfileTimer(profile_)
    for rate in rates:
        work = requests(name, rate, count, hardware)
        bound = upper_bound(work, timer, limits)
        for policy in POLICIES:
            met = np.count_nonzero(~missed_deadlines(work, run_policy(policy, work, profile_, limits)))
            assert met <= bound.met_at_most, (policy, rate)


def test_it_is_never_below_a_policy() -> None:
    check_against_policies("mixed-v2", (12.0,), 100, "rtx3090-tp2")


@pytest.mark.long
@pytest.mark.parametrize("hardware", ["rtx3090-tp2", "a100-tp1", "rtx4090-tp1"])
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("sharegpt", (6.0, 20.0)),
        ("arxiv-v1", (1.0, 2.5)),
        ("arxiv-v2", (0.5, 1.2)),
        ("mixed-v1", (3.0, 8.0)),
        ("mixed-v2", (2.5, 7.0)),
    ],
)
def test_it_is_never_below_a_policy_on_any_workload(name: str, rates: tuple[float, ...], hardware: str) -> None:
    check_against_policies(name, rates, 600, hardware)


def test_light_load_is_not_bounded_and_more_load_or_shorter_slos_never_make_it_better() -> None:
    hardware = load_profile("rtx3090-tp2")
    limits, timer = engine_limits(hardware), ProfileTimer(hardware)
    base = requests("arxiv-v1", 1.0, 200)
    late = [
        upper_bound(base.at_rate(rate), timer, limits).share_late_at_least for rate in (0.2, 0.8, 1.6, 2.4, 4.0, 8.0)
    ]
    assert late[:2] == [0.0, 0.0]
    assert late == sorted(late)
    assert late[-1] > 0.5
    for factor in (2.0, 0.5):
        other = replace(base.at_rate(2.4), ttft_slo_seconds=factor * base.ttft_slo_seconds)
        share = upper_bound(other, timer, limits).share_late_at_least
        assert share <= late[3] if factor > 1 else share >= late[3]


def test_fewer_intervals_only_blunt_it() -> None:
    hardware = load_profile("rtx3090-tp2")
    limits, timer = engine_limits(hardware), ProfileTimer(hardware)
    work = requests("mixed-v1", 8.0, 300)
    full, few = (upper_bound(work, timer, limits, intervals=count) for count in (1000, 20))
    assert full.met_at_most <= few.met_at_most < len(work)


def test_goodput_bound_lies_where_the_share_crosses() -> None:
    hardware = load_profile("rtx3090-tp2")
    limits, timer = engine_limits(hardware), ProfileTimer(hardware)
    base = requests("arxiv-v2", 1.0, 100)
    found = bound_goodput(base.at_rate, timer, limits, start_rate=8.0, precision=0.05)
    assert found.not_excluded < found.at_most <= found.not_excluded * 1.06
    assert found.bound.share_late_at_least > 0.01
    assert upper_bound(base.at_rate(found.not_excluded), timer, limits).share_late_at_least <= 0.01
    assert 0.5 < found.at_most < 1.5


def test_bad_input_is_explained() -> None:
    base = workload([(0.0, 100, 1, 0.0, 0.0)] * 2)
    with pytest.raises(ValueError, match="do they have SLOs"):
        bound_goodput(lambda rate: base, PER_TOKEN, LIMITS)
    with pytest.raises(ValueError, match=r"late at .* already"):
        bound_goodput(lambda rate: workload([(0.0, 100, 1, 0.01, 1.0)] * 2), PER_TOKEN, LIMITS)
    with pytest.raises(ValueError, match="start rate 0"):
        bound_goodput(lambda rate: base, PER_TOKEN, LIMITS, start_rate=0.0)
    with pytest.raises(ValueError, match="400 intervals; there must be at least one"):
        upper_bound(replace(base, arrival_seconds=np.zeros(0)), PER_TOKEN, LIMITS)
