"""QoServe by the paper: hybrid priority, chunks by the least slack, relegation, learned lengths. T = 1 ms per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sidecar.policies import registry
from sidecar.policies.base import PolicyContext
from tests.policies.rivals import LIMITS, Req, World, decode, due, per_token, qoserve, served

FAR = 1000.0  # TTFT of those that nobody hurries for


def test_large_and_small_alpha_are_shortest_and_earliest_first() -> None:
    requests = [due(100, 1.0), due(10, 1.5), due(50, 2.0)]
    assert list(served(qoserve(alpha_seconds_per_token=0.0), requests)) == [0, 1, 2]
    assert list(served(qoserve(alpha_seconds_per_token=1.0), requests)) == [1, 2, 0]
    assert list(served(qoserve(), requests)) == [1, 0, 2], "8 ms per token: 1.80, 1.58 and 2.40 s"


def test_alpha_of_service_is_in_seconds_of_service() -> None:
    """At 1000 tokens/s 100 tokens take 0.1 s: 1.4 and 1.54 s at alpha 4, 1.8 and 1.58 s at alpha 8."""
    requests = [due(100, 1.0), due(10, 1.5)]
    assert list(served(qoserve(alpha_of_service=4.0), requests)) == [0, 1]
    assert list(served(qoserve(alpha_of_service=8.0), requests)) == [1, 0]


@pytest.mark.parametrize(("slack", "total"), [(1.01, 1008), (0.51, 496), (0.11, 96), (0.0201, 16)])
def test_budget_shrinks_with_the_least_slack(slack: float, total: int) -> None:
    """In steps of 16 tokens; a decode with more slack does not matter, each has its token."""
    requests = [decode(slack=slack), decode(slack=2.0), Req(5000, ttft=FAR)]
    assert served(qoserve(), requests) == {0: 1, 1: 1, 2: total - 2}


def test_cap() -> None:
    """2500 tokens, decodes included, where nobody waits for a token; never above the engine's limit."""
    assert served(qoserve(), [Req(5000, ttft=FAR)]) == {0: 2500}
    assert served(qoserve(), [decode(slack=60.0), Req(5000, ttft=FAR)]) == {0: 1, 1: 2499}
    small = replace(LIMITS, max_tokens_per_iteration=1000)
    assert served(qoserve(limits=small), [Req(5000, ttft=FAR)], small) == {0: 1000}
    assert served(qoserve(max_tokens=0), [Req(5000, ttft=FAR)]) == {0: 4096}
    assert served(qoserve(max_tokens=4), [*[decode(slack=60.0)] * 8, Req(50)])[8] == 16, "raised above the decodes"


@pytest.mark.parametrize("slack", [-1.0, 0.0005])
def test_lost_decodes_bound_nothing_unless_told_so(slack: float) -> None:
    """One is late, one cannot be saved by an iteration of 1 ms."""
    requests = [decode(slack=slack), Req(5000, ttft=FAR)]
    assert served(qoserve(), requests) == {0: 1, 1: 2499}
    assert served(qoserve(skip_lost_decodes=False), requests) == ({0: 1, 1: 127} if slack < 0.0 else {0: 1})


def test_prediction() -> None:
    decision = World([decode(slack=0.11), Req(500, ttft=FAR)]).decide(qoserve())
    assert decision.path == "chunk"
    assert decision.predicted_seconds == pytest.approx(0.096)
    assert World([decode()]).decide(qoserve()).path == "decode"
    nonsense = World([decode(), Req(50)]).decide(qoserve(per_token(-1.0)))
    assert (nonsense.path, nonsense.tokens, nonsense.predicted_seconds) == ("unpredicted", {0: 1, 1: 50}, 0.0)


LATE = due(10, -0.1, ttft=FAR)
SOON = due(150, 0.155, ttft=FAR)  # computed in 0.151 s at the throughput, but not within an iteration of 0.2 s
SLOW = due(900, 0.5, ttft=FAR)  # takes 0.9 s


@pytest.mark.parametrize(
    ("rule", "relegated"),
    [("off", set()), ("violated", {1}), ("iteration", {1, 2}), ("throughput", {1, 3})],
)
def test_relegation_before_and_after_violation(rule: str, relegated: set[int]) -> None:
    """The iteration is bound to 0.2 s by the decode."""
    world = World([decode(slack=0.2), LATE, SOON, SLOW])
    decision = world.decide(qoserve(relegation=rule, alpha_seconds_per_token=0.0))
    assert decision.demoted == relegated
    assert next(iter(decision.tokens)) == 0
    first = min({1, 2, 3} - relegated)
    assert list(decision.tokens)[1] == first, "the primary sort key"


def test_the_relegated_get_what_is_left() -> None:
    requests = [due(30, -1.0), due(100, 9.0), due(20, -2.0)]
    assert list(served(qoserve(max_tokens=140), requests).items()) == [(1, 100), (2, 20), (0, 20)]
    assert served(qoserve(max_tokens=90), requests) == {1: 90}


def test_relegated_for_good_until_a_snapshot() -> None:
    world, policy = World([SLOW, due(10, 5.0)]), qoserve()
    assert world.decide(policy).demoted == {0}
    world.set(0, ttft=2 * FAR)
    assert world.decide(policy).demoted == {0}
    world.add(*[Req(10)] * 300)
    assert len(world.queues.requests) > 256
    assert world.decide(policy).demoted == {0}, "the mirror has grown"
    assert world.decide(policy, epoch=2).demoted == set()


def test_a_slots_next_request_is_not_relegated() -> None:
    world, policy = World([SLOW]), qoserve()
    assert world.decide(policy).demoted == {0}
    world.end(0)
    world.add(due(10, 5.0))
    assert world.queues.slot(1) == 0
    assert world.decide(policy).demoted == set()


def test_less_important_ones_are_relegated_first() -> None:
    """The last that came; each late request is spared once; when none is left they go themselves."""
    low = due(10, 5.0, priority=1)
    world, policy = World([SLOW, low, low]), qoserve()
    assert world.decide(policy).demoted == {2}
    assert world.decide(policy).demoted == {2}
    world.add(SLOW._replace(priority=-1))
    assert world.decide(policy).demoted == {1, 2}
    assert world.decide(policy).demoted == {0, 1, 2, 3}
    assert World([SLOW._replace(priority=1), low]).decide(qoserve()).demoted == {0}, "a late one of theirs goes itself"


def test_selective_preemption() -> None:
    """Needs 0.4 of its 0.45 s; what came would take 0.1 s of them. With more time, or none to lose, it may wait."""
    requests = [due(400, 0.45, context=16), due(100, 0.2)]
    assert list(served(qoserve(alpha_seconds_per_token=0.0), requests)) == [1, 0]
    spared: dict[str, Any] = {"alpha_seconds_per_token": 0.0, "spare_started": True, "relegation": "violated"}
    assert list(served(qoserve(**spared), requests)) == [0, 1]
    for slack in (1.5, 0.3):
        assert list(served(qoserve(**spared), [due(400, slack, context=16), due(100, 0.2)])) == [1, 0]
    assert list(served(qoserve(**spared), [due(400, 0.45), due(100, 0.2)])) == [1, 0], "not started"


BATCH = Req(10, ttft=0.0, tbt=0.0, ttlt=100.0, class_index=1)


def _rank(policy: Any, world: World, expected: float, epoch: int = 1) -> bool:
    """Whether a batch request of class 1 stands where ``expected`` output tokens at 1 s put it: 110 s + that."""
    world.add(due(1, 108.5 + expected, ttft=FAR), BATCH, due(1, 109.5 + expected, ttft=FAR))
    order = [handle for handle, tokens in world.decide(policy, epoch=epoch).tokens.items() if tokens <= 10]
    return order[-3:] == sorted(order)[-3:]


def test_time_to_last_token_counts_what_is_still_generated() -> None:
    """15 tokens until requests of the class have ended; then mean + 2 standard deviations of 10 and 20: 25."""
    policy = qoserve(alpha_seconds_per_token=1.0, relegation="off")
    assert _rank(policy, World([]), 15.0)
    running = [Req(5, 5 + output - 1, output, ttft=0.0, ttlt=50.0, class_index=1) for output in (9, 19)]
    other = Req(5, 5 + 98, 99, ttft=0.0, ttlt=50.0, class_index=2)
    world = World([*running, other])
    world.decide(policy, epoch=2)
    for handle in (0, 1, 2):
        world.end(handle)
    assert _rank(policy, world, 25.0, epoch=2)


def test_most_output_that_a_client_names_bounds_it() -> None:
    policy = qoserve(alpha_seconds_per_token=1.0, relegation="off")
    requests = [BATCH._replace(max_output=4), due(1, 112.5, ttft=FAR), due(1, 113.5, ttft=FAR)]
    assert list(served(policy, requests)) == [1, 0, 2]


def test_a_snapshot_ends_nobody() -> None:
    policy = qoserve(alpha_seconds_per_token=1.0, relegation="off")
    world = World([Req(5, 5 + 98, 99, ttft=0.0, ttlt=50.0, class_index=1)])
    world.decide(policy, epoch=2)
    other = World([])
    assert _rank(policy, other, 15.0)


def test_without_a_profile_it_says_what_it_needs() -> None:
    with pytest.raises(registry.UnknownProfileError, match=r"policy 'qoserve' predicts .* set the parameter model"):
        registry.build("qoserve", {}, PolicyContext(LIMITS))
    built = registry.build("qoserve", {}, PolicyContext(LIMITS, "rtx3090-tp2"))
    assert built.model_version.startswith("rtx3090-tp2/")


def test_wrong_parameters_are_named() -> None:
    for name, value in (("constants", "nope"), ("relegation", "nope"), ("safety", "0"), ("alpha_of_service", "-1")):
        with pytest.raises(registry.PolicyParameterError, match=f"'{name}' = '{value}': give "):
            registry.build("qoserve", {name: value}, PolicyContext(LIMITS, "rtx3090-tp2"))


def test_errors_of_predictions_and_throughput_are_learned() -> None:
    """100 tokens predicted at 0.1 s took 0.2: 500 tokens/s now, so that 60 more take 0.12 s."""
    policy, world = qoserve(), World([Req(100, ttft=FAR)])
    assert world.decide(policy).tokens == {0: 100}
    world.end(0)
    world.add(due(60, 0.1))
    assert world.decide(policy, executed=True, last_iteration_seconds=0.2).demoted == {1}
    assert policy.prediction_errors.summary().bias_seconds == pytest.approx(-0.1)
    assert World([due(60, 0.1)]).decide(qoserve()).demoted == set()
