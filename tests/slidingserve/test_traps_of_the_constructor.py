"""Each hole of order and constructor: `paper` falls into it, `robust` does not, and one switch makes the difference.

The numbers are those of `sidecar.policies.slidingserve.parameters`. A switch is turned in both directions wherever one
of them shows: `paper` with it no longer falls in, `robust` without it does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sidecar.policies.base import PolicyContext
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.policies.slidingserve.policy import make_rules
from sidecar.policies.slidingserve.workspace import make_workspace
from tests.slidingserve.scenes import LIMITS, Request, Scene, decoding, linear, prompt
from tests.slidingserve.traps import LINEAR, in_paper, to_prompts


class TestExpiredFirst:
    """(6) `expired_last`. Equation 13 takes a deadline in the past for the greatest urgency of all.

    In `paper` as it is (7) hides this, for then no prompt gets anything; so (7) is corrected in its half.
    """

    SCENE = Scene([prompt(3000, -1.0), prompt(500), *[decoding(0.030)] * 4])

    def test_paper(self) -> None:
        corrected: dict[str, Any] = {"max_tokens": 1024, "drop_expired_risks": True}
        decision = in_paper(self.SCENE, LINEAR, **corrected)
        assert (decision.tokens[0], decision.tokens.get(1, 0), decision.demoted) == (1020, 0, [])
        decision = in_paper(self.SCENE, LINEAR, **corrected, expired_last=True)
        assert (decision.tokens[0], decision.tokens[1], decision.demoted) == (520, 500, [0])

    def test_robust(self) -> None:
        decision = self.SCENE.decide(LINEAR, max_tokens=1024)
        assert (decision.tokens[0], decision.tokens[1], decision.demoted) == (520, 500, [0])
        assert list(decision.tokens)[-2:] == [1, 0], "in the order of the batch, too"
        decision = self.SCENE.decide(LINEAR, max_tokens=1024, expired_last=False)
        assert (decision.tokens[0], decision.tokens.get(1, 0), decision.demoted) == (1020, 0, [])

    def test_shortest_first_among_the_expired(self) -> None:
        scene = Scene([prompt(700, -1.0), prompt(300, -3.0), prompt(500, 0.0)])
        decision = scene.decide(LINEAR, max_tokens=1024, window=1)
        assert list(decision.tokens.items()) == [(1, 300), (2, 500), (0, 224)]
        assert sorted(decision.demoted) == [0, 1, 2]


class TestExpiredAtRisk:
    """(7) `drop_expired_risks`. What has expired is always at risk and never to be saved."""

    def test_paper(self) -> None:
        scene = Scene([prompt(3000, -1.0), prompt(500), *[decoding(0.030)] * 4])
        decision = in_paper(scene, LINEAR, max_tokens=1024)
        assert (decision.path, to_prompts(decision, scene)) == ("infeasible", 0), "decodes alone, for ever"
        decision = in_paper(scene, LINEAR, max_tokens=1024, drop_expired_risks=True)
        assert (decision.path, to_prompts(decision, scene)) == ("chunker", 1020)

    def test_robust(self) -> None:
        """Eight expired ones take all the anchors; the one that could be saved is late by what others get."""
        scene = Scene([*[prompt(3000, -1.0)] * 8, prompt(500, 0.020), *[decoding(0.030)] * 4])
        decision = scene.decide(LINEAR, max_tokens=1024)
        assert (decision.path, decision.tokens[8]) == ("constructor", 500)
        assert decision.predicted_seconds <= 0.020
        decision = scene.decide(LINEAR, max_tokens=1024, drop_expired_risks=False)
        assert decision.path == "infeasible"
        assert decision.predicted_seconds > 0.020


class TestNobodyCanBeSaved:
    """(7) `chunk_if_infeasible`. 6000 tokens within 20 ms: too late whatever is done, but not to be left out."""

    SCENE = Scene([prompt(6000, 0.020), *[decoding(0.030)] * 4])

    def test_paper(self) -> None:
        decision = in_paper(self.SCENE, LINEAR, max_tokens=1024)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("infeasible", 0)
        decision = in_paper(self.SCENE, LINEAR, max_tokens=1024, chunk_if_infeasible=True)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("infeasible", 1020)

    @pytest.mark.parametrize("how", [{}, {"window": 3}, {"window": 4}, {"objective": "max_tokens"}, {"window": 1}])
    def test_robust(self, how: dict[str, Any]) -> None:
        decision = self.SCENE.decide(LINEAR, max_tokens=1024, **how)
        assert decision.path == "infeasible"
        assert to_prompts(decision, self.SCENE) > 900
        decision = self.SCENE.decide(LINEAR, max_tokens=1024, chunk_if_infeasible=False, **how)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("infeasible", 0)


class TestConstructedBatchLongerThanDecodesCanWait:
    """(8) `anchor_within_tbt`. The anchor can wait 60 ms, so 2300 tokens are packed; the decodes can wait 20 ms."""

    SCENE = Scene([prompt(300, 0.060), prompt(2000, 0.061), prompt(6000), *[decoding(0.020)] * 4])

    def test_paper(self) -> None:
        decision = in_paper(self.SCENE, LINEAR, max_tokens=4096)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("constructor", 2300)
        assert decision.predicted_seconds > 0.020
        decision = in_paper(self.SCENE, LINEAR, max_tokens=4096, anchor_within_tbt=True)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("constructor", 300)

    def test_robust(self) -> None:
        decision = self.SCENE.decide(LINEAR, max_tokens=4096)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("constructor", 300)
        assert decision.predicted_seconds <= 0.020
        decision = self.SCENE.decide(LINEAR, max_tokens=4096, anchor_within_tbt=False)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("constructor", 2300)


class TestCostOfTheKnapsack:
    """(9) The steps and caps. What they save is work; what they cost is shown as well."""

    @staticmethod
    def cells(**parameters: Any) -> int:
        """Entries of the largest knapsack's table (candidates by capacity), for 256 live requests."""
        resolved = SlidingServeParameters(**parameters).resolved()
        rules = make_rules(resolved, PolicyContext(LIMITS), LIMITS.max_tokens_per_iteration)
        candidates, capacity = make_workspace(256, rules[0]).best.shape
        return int((candidates - 1) * (capacity - 1))

    def test_work_for_one_anchor(self) -> None:
        paper, robust = self.cells(mode="paper"), self.cells()
        assert (paper > 1_000_000, robust < 10_000) == (True, True)
        assert self.cells(mode="paper", knapsack_step_tokens=16) < paper / 15
        assert self.cells(mode="paper", max_candidates=32) == paper / 8
        assert self.cells(knapsack_step_tokens=1) > 15 * robust
        assert self.cells(max_candidates=0) == 8 * robust

    def test_weights_are_rounded_up(self) -> None:
        """The anchor's 10 tokens leave 24: in steps of 16 that is one, which 17 tokens do not fit into."""
        scene = Scene([prompt(10, 0.00845), prompt(17, 0.020), prompt(7, 0.020), prompt(6000)])
        slow = linear(0.005, 1e-4)
        for mode in ("paper", "robust"):
            exact = scene.decide(slow, mode=mode, step_tokens=1, knapsack_step_tokens=1)
            rounded = scene.decide(slow, mode=mode, step_tokens=1, knapsack_step_tokens=16)
            assert exact.tokens == {0: 10, 1: 17, 2: 7}
            assert rounded.tokens == {0: 10, 2: 7}

    @pytest.mark.parametrize("step", [1, 3, 16, 100, 4096])
    def test_no_step_overfills(self, step: int) -> None:
        lengths = np.random.default_rng(step).integers(150, 200, 30).tolist()  # four or five fit
        scene = Scene([prompt(200, 0.025), *[prompt(length) for length in lengths], *[decoding(0.030)] * 4])
        decision = scene.decide(LINEAR, max_tokens=4096, knapsack_step_tokens=step)
        assert decision.path == "constructor"
        assert decision.tokens[0] == 200
        assert decision.predicted_seconds <= 0.025
        assert all(decision.tokens[place] == lengths[place - 1] for place in decision.tokens if 0 < place <= 30)

    def test_anchors_are_those_of_least_slack(self) -> None:
        """Eight that cannot be saved come before one that can."""
        hopeless = [prompt(1000, 0.010 + place * 1e-4) for place in range(8)]
        scene = Scene([*hopeless, prompt(100, 0.020), prompt(6000), decoding(1.0)])
        slow = linear(0.005, 1e-4)
        assert scene.decide(slow, max_tokens=4096, max_anchors=8).path == "infeasible"
        for parameters in ({"max_anchors": 9}, {"max_anchors": 0}, {"mode": "paper"}):
            decision = scene.decide(slow, max_tokens=4096, **parameters)
            assert (decision.path, decision.tokens[8]) == ("constructor", 100)

    def test_candidates_are_the_first_in_order(self) -> None:
        scene = Scene([prompt(20, 0.40), *[prompt(10 + place, 0.50) for place in range(40)], prompt(60_000)])
        slow = linear(0.005, 1e-4)
        chosen = set(scene.decide(slow, max_tokens=4096, max_candidates=32).tokens)
        assert chosen == set(range(33)), "the anchor and the 32 shortest"
        assert set(scene.decide(slow, max_tokens=4096, max_candidates=0).tokens) == set(range(41))


class TestSumsOfTheValues:
    """(11) `anchor_in_sums`, no trap but a reading; found by search, as it seldom matters.

    Of three anchors the second (400 tokens, 21 ms) and the third (500, 18 ms) can be saved, one of them. With itself in
    the sums the second is worth 1 / (21 / 10021 + 400 / 6400) = 15.5, the third 1 / (18 / 10039 + 500 / 6900) = 13.5.
    Without, an anchor is worth nothing, both batches complete one, and the tokens decide.
    """

    SCENE = Scene([prompt(600, 0.006), prompt(400, 0.021), prompt(500, 0.018), prompt(6000)])

    @pytest.mark.parametrize("mode", ["paper", "robust"])
    def test_choice(self, mode: str) -> None:
        assert self.SCENE.decide(LINEAR, mode=mode, max_tokens=2048, anchor_in_sums=True).tokens == {1: 400}
        assert self.SCENE.decide(LINEAR, mode=mode, max_tokens=2048, anchor_in_sums=False).tokens == {2: 500}

    def test_what_the_modes_read(self) -> None:
        assert in_paper(self.SCENE, LINEAR, max_tokens=2048).tokens == {1: 400}
        assert self.SCENE.decide(LINEAR, max_tokens=2048).tokens == {2: 500}


class TestRemainder:
    """`fill_remainder`, off in both modes: Algorithm 2 leaves the rest of a constructed batch's budget unused."""

    SCENE = Scene([prompt(300, 0.020), prompt(6000), *[decoding(0.030)] * 4])

    @pytest.mark.parametrize("mode", ["paper", "robust"])
    def test_rest_of_the_budget(self, mode: str) -> None:
        decision = self.SCENE.decide(LINEAR, mode=mode, max_tokens=2048)
        assert (decision.path, to_prompts(decision, self.SCENE)) == ("constructor", 300)
        decision = self.SCENE.decide(LINEAR, mode=mode, max_tokens=2048, fill_remainder=True)
        assert decision.tokens[0] == 300
        assert 0.0195 < decision.predicted_seconds <= 0.020, "what the anchor can wait for is used"


def test_both_presets_say_something_about_every_switch() -> None:
    for mode in ("paper", "robust"):
        assert None not in SlidingServeParameters(mode=mode).resolved().values()


def test_a_prompt_with_one_missing_token_competes_like_others() -> None:
    """Its chunk counts as a decode in the features (2.2), but it is a prompt."""
    scene = Scene([Request(100, 10.0, computed=99), *[decoding(0.030)] * 4])
    assert scene.decide(LINEAR).tokens == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
