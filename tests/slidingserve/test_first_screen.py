"""What a new user sees first: `slidingserve simulate` with no arguments."""

from __future__ import annotations

from evaluation.simulate import SimulationRequest, simulate


def test_the_gain_is_plain_to_see() -> None:
    """Over gRPC the allocations are the same (test_transports); in one process it takes a second."""
    vllm, ours = simulate(SimulationRequest(transport="inprocess"))
    assert (vllm.policy, ours.policy) == ("vllm", "slidingserve")
    assert (vllm.profile, vllm.workload, vllm.rate, vllm.floor_seconds) == ("rtx3090-tp2", "mixed-v1", 2.0, 0.2)
    assert vllm.scores.violations.deadline > 0.15
    assert ours.scores.violations.deadline <= 0.05
    assert ours.fallbacks == 0
    assert 0.0 < ours.prediction_error < 0.2, "predictions are compared with what the engine measured"


def test_why() -> None:
    """The engine's own policy fills iterations with prompts; ours bounds them by what decodes and arrivals can wait."""
    vllm, capped, ours = simulate(
        SimulationRequest(policies=("vllm", "vllm:max_tokens=256", "slidingserve"), transport="inprocess")
    )
    assert vllm.scores.tbt_seconds.p99 > 4 * ours.scores.tbt_seconds.p99
    assert capped.scores.tbt_seconds.p99 < 2 * ours.scores.tbt_seconds.p99, "a cap alone mends the gaps between tokens"
    assert capped.scores.ttft_seconds.p50 > 2 * ours.scores.ttft_seconds.p50, "but not who comes first"
    for run in (vllm, capped):
        assert run.scores.violations.deadline > ours.scores.violations.deadline
