"""QoServe by its artifact: constants held against numbers worked out by hand."""

from __future__ import annotations

import pytest

from sidecar.policies.common.throughput import MovingThroughput, Planned
from sidecar.policies.qoserve.artifact import artifact_seconds
from tests.policies.rivals import Req, World, decode, due, qoserve, served

FAR = 1000.0


def test_step_time_in_two_pieces() -> None:
    """28 decodes of 10,000 tokens of context and a prompt at 2000; 128 and 1024 tokens in all."""
    assert artifact_seconds(100.0, 28.0, 10_000.0, 2000.0) == pytest.approx(0.0283488)
    assert artifact_seconds(996.0, 28.0, 10_000.0, 2000.0) == pytest.approx(0.1071432)
    low, high = artifact_seconds(512.0, 0.0, 0.0, 0.0), artifact_seconds(513.0, 0.0, 0.0, 0.0)
    assert (low, high) == pytest.approx((0.0565616, 0.0541494)), "512 tokens belong to the first piece"


@pytest.mark.parametrize(
    ("slack", "total"),
    [(-1.0, 128), (0.001, 128), (0.042, 128), (0.0435, 256), (0.067, 256), (0.0685, 512), (0.0935, 512), (0.0945, 768)],
)
def test_budget_is_the_largest_of_the_grid_with_its_safety(slack: float, total: int) -> None:
    """1.2 T: 0.0304 s for 128 tokens, 0.0429 for 256, 0.0679 for 512, 0.0942 for 768 (one decode, context 100)."""
    assert served(qoserve(constants="artifact"), [decode(slack=slack), Req(5000, ttft=FAR)]) == {0: 1, 1: total - 1}


def test_without_decodes_the_largest_where_kv_blocks_last() -> None:
    """2000 free blocks of 16 tokens hold 32,000."""
    policy = qoserve(constants="artifact")
    assert served(policy, [Req(5000, ttft=FAR)]) == {0: 2552}
    assert served(policy, [Req(5000, ttft=FAR)], free=2000) == {0: 2552}
    assert served(policy, [Req(5000, ttft=FAR)], free=1999) == {0: 512}
    assert served(qoserve(constants="artifact", max_tokens=300), [Req(5000, ttft=FAR)]) == {0: 300}


def test_context_of_the_first_prompt_counts() -> None:
    """20,000 tokens of it make 128 tokens take 0.0405 s, and 256 take 0.0509 s (1.2 T: 0.0486 and 0.0611)."""
    requests = [decode(slack=0.05), due(500, FAR / 2, context=20_000, ttft=FAR), due(500, FAR / 2 + 1, ttft=FAR)]
    assert served(qoserve(constants="artifact"), requests) == {0: 1, 1: 127}
    assert served(qoserve(constants="artifact"), [requests[0], requests[2]]) == {0: 1, 1: 255}


def test_a_late_first_token_moves_the_later_deadlines() -> None:
    """Its first token is there now, 9 s late: the next is due in 50 ms. By the paper it is lost and bounds nothing."""
    late = Req(100, 100, 1, age=10.0)
    assert served(qoserve(constants="artifact"), [late, Req(5000, ttft=FAR)]) == {0: 1, 1: 255}
    assert served(qoserve(), [late, Req(5000, ttft=FAR)]) == {0: 1, 1: 2499}


def test_a_decode_with_only_a_ttlt_is_due_every_400_ms() -> None:
    """First token due 60 - 15 x 0.4 = 54 s after the arrival, the third 0.8 s later."""
    requests = [Req(100, 101, 2, age=54.75, ttft=0.0, tbt=0.0, ttlt=60.0), Req(5000, ttft=FAR)]
    assert served(qoserve(constants="artifact"), requests) == {0: 1, 1: 255}, "0.05 s left"


def test_relegation_by_throughput_spares_who_holds_kv_blocks() -> None:
    """8500 tokens/s at first."""
    requests = [due(8500, 0.99), due(8500, 1.01), due(8500, 0.99, context=16), due(100, -1.0, context=16)]
    assert World(requests).decide(qoserve(constants="artifact")).demoted == {0}


def test_throughput_is_an_exponential_average_of_prompts() -> None:
    average = MovingThroughput(0.995, 8500.0)
    average.add(Planned(0, 130.0, 100.0, 0.1), 0.2)
    assert average.tokens_per_second == pytest.approx(0.995 * 8500.0 + 0.005 * 500.0)
    average.add(Planned(1, 30.0, 0.0, 0.1), 0.2)
    assert average.tokens_per_second == pytest.approx(8460.0)


def test_it_brings_its_own_model() -> None:
    policy = qoserve(constants="artifact")
    decision = World([Req(100, ttft=FAR)]).decide(policy)
    assert decision.predicted_seconds == pytest.approx(artifact_seconds(100.0, 0.0, 0.0, 0.0))
    assert policy.model_version == "a100-tp1/qoserve-artifact@72339db5"
    assert policy.version == "qoserve/1-artifact"
