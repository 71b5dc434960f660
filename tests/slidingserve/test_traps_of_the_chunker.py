"""Each hole of the published window: `paper` falls into it, `robust` does not, and one switch makes the difference.

The numbers are those of `sidecar.policies.slidingserve.parameters`. A switch is turned in both directions wherever one
of them shows: `paper` with it no longer falls in, `robust` without it does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from predictor.features import ROW, add_chunk, add_decode
from predictor.model import Expert, LatencyModel
from slidingserve.contract.values import Ints
from tests.slidingserve.scenes import LIMITS, Decision, Scene, decoding, prompt, source_with
from tests.slidingserve.traps import LINEAR, bent, in_paper, to_prompts
from tests.strategies import feed


class TestChunkLongerThanDecodesCanWait:
    """(1) `clamp_chunk`. All splits take the same time, the tie goes to the largest: B, whatever it takes."""

    SCENE = Scene([prompt(6000), *[decoding(0.030)] * 4])

    def test_paper(self) -> None:
        assert in_paper(self.SCENE, LINEAR, max_tokens=2048).predicted_seconds > 0.030
        assert in_paper(self.SCENE, LINEAR, max_tokens=2048, clamp_chunk=True).predicted_seconds <= 0.030 + 1e-9

    def test_robust(self) -> None:
        decision = self.SCENE.decide(LINEAR, max_tokens=2048)
        assert 0.029 < decision.predicted_seconds <= 0.030
        assert self.SCENE.decide(LINEAR, max_tokens=2048, clamp_chunk=False).predicted_seconds > 0.030


class TestNextIterationWithoutDecodes:
    """(2) `clamp_next_budget`. B above B_sum: the next iteration would have a budget below 0, and looks free of charge.

    In `robust` nothing reaches that far, because (1) keeps b to what T_cur buys; so (1) is off in its half.
    """

    SCENE = Scene([prompt(6000), *[decoding(0.030)] * 200])  # T_cur buys 1250 tokens, T_next (50 ms) 2250

    def test_paper(self) -> None:
        decision = in_paper(self.SCENE, LINEAR, max_tokens=3600)
        assert decision.total == 3600, "more than both iterations together may compute"
        assert decision.predicted_seconds > 2 * 0.030
        clamped = in_paper(self.SCENE, LINEAR, max_tokens=3600, clamp_next_budget=True)
        assert clamped.predicted_seconds <= 0.030

    def test_robust(self) -> None:
        assert self.SCENE.decide(LINEAR, max_tokens=3600).predicted_seconds <= 0.030
        assert self.SCENE.decide(LINEAR, max_tokens=3600, clamp_chunk=False).predicted_seconds <= 0.030
        off = self.SCENE.decide(LINEAR, max_tokens=3600, clamp_chunk=False, clamp_next_budget=False)
        assert off.total == 3600


class TestFigureOne:
    """(3) `objective`. 150 ms for two iterations: greedy 900 and 260 tokens, the paper's figure 700 and 700.

    Algorithm 1 fixes the tokens of both (900 + 260) and asks for the least time, so it cannot find more of them.
    """

    # 50 ms for 260 tokens, 75 ms for 700, and from there 125 us each: 100 ms for 900.
    SECONDS = np.interp(np.arange(6001), [0, 260, 700, 6000], [0.030, 0.050, 0.075, 0.075 + 5300 * 125e-6])
    MODEL = LatencyModel("figure/1", "none", {"global": Expert(0.0, (0.0,) * 7)}, tuple(SECONDS.tolist()))

    def both(self, **parameters: Any) -> tuple[int, int]:
        """Tokens of this iteration and of the next, which begins when this one ends."""
        first = Scene([prompt(6000), decoding(0.100 + 1e-9)]).decide(self.MODEL, max_tokens=2048, **parameters)
        left = 0.150 + 2e-9 - first.predicted_seconds  # the decode's next token is due 50 ms after this one's deadline
        after = Scene([prompt(6000 - first.tokens[0], context=first.tokens[0]), decoding(left)])
        second = after.decide(self.MODEL, max_tokens=2048, window=1, step_tokens=20)
        assert first.predicted_seconds + second.predicted_seconds <= 0.150 + 1e-8
        return first.total, second.total

    def test_most_tokens_is_the_figures(self) -> None:
        assert self.both(objective="max_tokens", step_tokens=25) == (700, 700)

    def test_greedy_is_the_figures(self) -> None:
        assert self.both(window=1, step_tokens=20) == (900, 260)

    def test_least_time_computes_no_more_than_b_sum_at_first(self) -> None:
        first, _ = self.both()
        assert self.SECONDS[first] + self.SECONDS[1160 - first] < self.SECONDS[900] + self.SECONDS[260]


class TestNextIterationSeesTheSamePrompts:
    """(4) `advance_queue`. A chunk reads its prompt's context: 20000 tokens, 10 ms. Cut in two it is read twice.

    The queue that is not advanced has the first prompt in the next iteration again, so it counts both times anyway and
    the split looks best near the middle, before the prompt's end.
    """

    MODEL = bent(4e-9, context=5e-7, decode_context=-5e-7)
    SCENE = Scene([prompt(1500, context=20_000), prompt(6000), *[decoding(0.042, tbt=0.030)] * 4])

    def test_paper(self) -> None:
        assert 0 < in_paper(self.SCENE, self.MODEL, max_tokens=4096).tokens[0] < 1500
        assert in_paper(self.SCENE, self.MODEL, max_tokens=4096, advance_queue=True).tokens[0] == 1500

    def test_robust(self) -> None:
        assert self.SCENE.decide(self.MODEL, max_tokens=4096).tokens[0] == 1500
        assert 0 < self.SCENE.decide(self.MODEL, max_tokens=4096, advance_queue=False).tokens[0] < 1500


class TestDecodeThatIsLostAnyway:
    """(5) `skip_lost_decodes`. A token due in 3 ms while the decodes alone take 5.2 ms stops every prompt."""

    SCENE = Scene([prompt(6000), *[decoding(0.040)] * 9, decoding(0.003)])

    def test_paper(self) -> None:
        # B_cur is the 10 decodes: with B above B_sum a small b is the least time.
        assert in_paper(self.SCENE, LINEAR, max_tokens=3000).total <= 30
        assert in_paper(self.SCENE, LINEAR, max_tokens=3000, skip_lost_decodes=True).total == 3000

    def test_robust(self) -> None:
        assert 0.039 < self.SCENE.decide(LINEAR, max_tokens=3000).predicted_seconds <= 0.040
        assert self.SCENE.decide(LINEAR, max_tokens=3000, skip_lost_decodes=False).total == 10

    def test_all_lost_bound_nothing(self) -> None:
        scene = Scene([prompt(6000), *[decoding(-0.5)] * 4])
        assert scene.decide(LINEAR, max_tokens=2048).total == 2048


class TestLightLoad:
    """(10) Everything fits into T_cur, and the least time is to compute none of it.

    B_sum is far more than there is, so the next iteration costs the same whatever is left to it. Each of three switches
    is enough for `paper`, and `robust` can do without each of them, unless (13) makes it worth while to leave some to
    the next iteration: then it needs `take_all_that_fits`.
    """

    SCENE = Scene([prompt(900), *[decoding(0.030)] * 4])

    def test_paper(self) -> None:
        assert to_prompts(in_paper(self.SCENE, LINEAR, max_tokens=1024), self.SCENE) == 0

    @pytest.mark.parametrize("switch", ["take_all_that_fits", "clamp_budget_sum", "advance_queue"])
    def test_one_switch_is_enough_for_paper(self, switch: str) -> None:
        decision = in_paper(self.SCENE, LINEAR, max_tokens=1024, **{switch: True})
        assert to_prompts(decision, self.SCENE) == 900

    def test_robust(self) -> None:
        for off in ({}, {"clamp_budget_sum": False}, {"advance_queue": False}, {"take_all_that_fits": False}):
            assert to_prompts(self.SCENE.decide(LINEAR, max_tokens=1024, **off), self.SCENE) == 900
        off = {"take_all_that_fits": False, "expected_decodes": True}
        assert to_prompts(self.SCENE.decide(LINEAR, max_tokens=1024, **off), self.SCENE) < 30

    def test_robust_without_all_three(self) -> None:
        """B far above what there is, or (14) would leave the next iteration no room."""
        switches = ("take_all_that_fits", "clamp_budget_sum", "advance_queue")
        off: dict[str, Any] = {"max_tokens": 4096, **dict.fromkeys(switches, False)}
        assert to_prompts(self.SCENE.decide(LINEAR, **off), self.SCENE) == 0
        for switch in switches:
            assert to_prompts(self.SCENE.decide(LINEAR, **{**off, switch: True}), self.SCENE) == 900, switch


class ModelTimer:
    """Iterations take exactly what `LINEAR` predicts."""

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        return 0.005 + 20e-6 * int(chunk[:count].sum())


@pytest.mark.parametrize(
    ("how", "starves"),
    [
        ({"mode": "paper"}, True),
        ({"mode": "paper", "take_all_that_fits": True}, False),
        ({}, False),
        ({"take_all_that_fits": False, "expected_decodes": True}, True),
    ],
    ids=str,
)
def test_light_load_on_an_engine(how: dict[str, Any], starves: bool) -> None:
    """(10) A prompt of 900 tokens (23 ms) comes while four requests decode, which they do until 0.53 s."""
    requests = feed([*[(0.0, 10, 100)] * 4, (0.2, 900, 1)], ttft=10.0, tbt=0.05)
    outcome = SimulatedEngine(requests, LIMITS, ModelTimer(), source_with(LINEAR, LIMITS, max_tokens=1024, **how)).run()
    waited = outcome.first_token_seconds[4] - 0.2
    if starves:
        assert waited > 10 * 0.023, "some of it, or all, is put off again and again until the decodes have ended"
    else:
        assert waited <= 0.006 + 0.024, "the iteration under way, and its own"


class TestWindows:
    """(12) `window`. What does not fit at once is spread over as many iterations as are looked at."""

    MODEL = bent(2e-8)
    SCENE = Scene([prompt(2000), *[decoding(0.060, tbt=0.030)] * 4])

    def test_greedy_takes_what_t_cur_buys(self) -> None:
        decision = self.SCENE.decide(self.MODEL, max_tokens=4096, window=1)
        assert 0.058 < decision.predicted_seconds <= 0.060

    def test_longer_windows_take_less_at_once(self) -> None:
        totals = [
            to_prompts(self.SCENE.decide(self.MODEL, max_tokens=4096, window=window), self.SCENE)
            for window in (1, 2, 3, 4)
        ]
        assert totals == sorted(totals, reverse=True)
        assert len(set(totals)) == 4
        # The next iterations may take 30 ms, not 60, and 890 tokens: four times 500 would be best.
        assert [round(2000 / total, 1) for total in totals] == [1.4, 2.0, 2.8, 4.5]

    @pytest.mark.parametrize("window", [1, 2, 3, 4])
    @pytest.mark.parametrize("missing", [300, 1450, 2000, 6000])
    def test_each_keeps_within_what_decodes_can_wait(self, window: int, missing: int) -> None:
        scene = Scene([prompt(missing), *[decoding(0.060, tbt=0.030)] * 4])
        decision = scene.decide(self.MODEL, max_tokens=4096, window=window)
        assert to_prompts(decision, scene) > 0
        assert decision.predicted_seconds <= 0.060


class TestPromptsThatWillDecode:
    """(13) `expected_decodes`. Eighty prompts of 40 tokens: each that is completed costs 0.3 ms in the next iteration.

    They are part of what (4) advances, so in `paper` that has to be on, too.
    """

    MODEL = bent(4e-9, decodes=3e-4)
    SCENE = Scene([*[prompt(40)] * 80, *[decoding(0.050, tbt=0.030)] * 4])

    def real_seconds(self, first: Decision) -> float:
        """Both iterations, the next one with the prompts that have become decodes, and what is left of them."""
        decodes = sum(first.tokens.get(place, 0) == 40 for place in range(80))
        features = np.zeros(ROW)
        for _ in range(4):
            add_decode(features, 1.0, 101.0)
        for _ in range(decodes):
            add_decode(features, 1.0, 40.0)
        for place in range(80):
            done = first.tokens.get(place, 0)
            if done < 40:
                add_chunk(features, 40.0 - done, float(done))
        return first.predicted_seconds + float(self.MODEL.predict(features[None])[0])

    def test_paper(self) -> None:
        advanced: dict[str, Any] = {"max_tokens": 4096, "advance_queue": True, "clamp_budget_sum": True}
        without, counted = (in_paper(self.SCENE, self.MODEL, **advanced, expected_decodes=on) for on in (False, True))
        assert counted.total < without.total - 300
        assert self.real_seconds(counted) < self.real_seconds(without)

    def test_robust(self) -> None:
        counted, without = (self.SCENE.decide(self.MODEL, max_tokens=4096, expected_decodes=on) for on in (True, False))
        assert counted.total < without.total - 300
        assert self.real_seconds(counted) < self.real_seconds(without)


class TestAlwaysTheNextIteration:
    """(14) `cap_next_budget`. The next iteration may hold more than B, so leaving everything to it takes least time.

    5 ms more for an iteration with prompts than for decodes alone; B is 1024 tokens, both iterations' 2048.
    """

    WEIGHTS = (0.0, 0.0, 0.0, 20e-6, 0.0, 20e-6, 0.0)
    MODEL = LatencyModel("two/1", "none", {"global": Expert(0.015, WEIGHTS), "decode": Expert(0.010, WEIGHTS)})

    def prompt_tokens(self, iterations: int, **parameters: Any) -> list[int]:
        """Tokens that the prompt gets in each of some iterations that follow each other."""
        done, given = 0, []
        for _ in range(iterations):
            scene = Scene([prompt(6000 - done, context=done, running=True), *[decoding(0.200, tbt=0.200)] * 4])
            given.append(scene.decide(self.MODEL, max_tokens=1024, **parameters).tokens.get(0, 0))
            done += given[-1]
        return given

    def test_paper(self) -> None:
        assert self.prompt_tokens(5, mode="paper") == [0] * 5
        assert self.prompt_tokens(5, mode="paper", cap_next_budget=True) == [1020] * 5

    def test_robust(self) -> None:
        assert self.prompt_tokens(5) == [1020] * 5
        assert self.prompt_tokens(5, cap_next_budget=False) == [0] * 5
