"""Measured durations reach the error counters and the throughput: those of plans executed to the letter, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.inprocess import InProcessSource
from evaluation.simulate import engine_limits
from predictor.counters import ErrorSummary
from predictor.features import Scenario
from predictor.files import load_model
from sidecar.policies.base import Plan, PolicyContext
from sidecar.policies.common.throughput import Planned, Throughput
from sidecar.policies.slidingserve import SlidingServePolicy
from sidecar.policies.slidingserve.parameters import SlidingServeParameters
from sidecar.queues import Queues
from slidingserve.contract.values import (
    AppliedBatch,
    BatchAllocation,
    EngineLimits,
    IterationState,
    PauseState,
    ResyncRequired,
    Snapshot,
    Step,
)
from tests.slidingserve.scenes import LIMITS, Scene, decoding, linear, make_policy, prompt, session_with, source_with
from tests.strategies import batch, columns, decide, floats, ints, random_feed, snapshot, step

MODEL = linear(0.005, 20e-6)


def tokens_of(number: int) -> int:
    """Step n of a `Script`: a decode for each request before, and all of a prompt of 100 (n + 1) tokens."""
    return number + 100 * (number + 1)


def predicted(number: int) -> float:
    return 0.005 + 20e-6 * tokens_of(number)


class Script:
    """A session, step by step; each step brings a request of 100 tokens more than the last one's."""

    def __init__(self, kind: type[SlidingServePolicy] = SlidingServePolicy, **parameters: Any) -> None:
        def build(limits: EngineLimits) -> SlidingServePolicy:
            chosen = SlidingServeParameters(max_tokens=4096, **parameters)
            self.policy = kind(chosen, PolicyContext(limits, MODEL.profile), MODEL)
            return self.policy

        self.session = session_with(build, LIMITS)
        self.number = 0
        self.epoch = 0

    def step(self, seconds: float = 0.0, depth: int = 0, *, arrives: bool = True, **more: Any) -> BatchAllocation:
        """The next step, which says how long the last finished iteration took."""
        iteration = {"last_iteration_seconds": seconds, "pipeline_depth": depth, **more.pop("iteration", {})}
        now = float(self.number)
        arrived = columns([self.number], [100 * (self.number + 1)], arrival_seconds=floats(now)) if arrives else None
        message = step(self.number, now, free=50_000, epoch=self.epoch, arrived=arrived, iteration=iteration, **more)
        self.number += 1
        return decide(self.session, message)

    def not_as_planned(self) -> dict[str, Any]:
        """What a step says if the engine computed nothing in the last iteration."""
        return {"applied_exactly": False, "applied": AppliedBatch(ints(), ints())}

    def summary(self, scenario: Scenario | None = None) -> ErrorSummary:
        return self.policy.prediction_errors.summary(scenario)


def expected(measured: dict[int, float]) -> ErrorSummary:
    """The errors of steps by their measured seconds."""
    errors = np.array([predicted(number) - seconds for number, seconds in measured.items()])
    return ErrorSummary(
        len(errors),
        pytest.approx(np.abs(errors).mean()),  # type: ignore[arg-type]
        pytest.approx(np.sqrt((errors**2).mean())),  # type: ignore[arg-type]
        pytest.approx(errors.mean()),  # type: ignore[arg-type]
        pytest.approx((np.abs(errors) / np.array(list(measured.values()))).mean()),  # type: ignore[arg-type]
    )


NOTHING = ErrorSummary(0, 0.0, 0.0, 0.0, 0.0)


def test_the_script_is_as_described() -> None:
    script = Script()
    for number in range(5):
        allocation = script.step()
        assert batch(allocation) == [*((handle, 1) for handle in range(number)), (number, 100 * (number + 1))]
        assert allocation.predicted_seconds == pytest.approx(predicted(number))


def test_each_duration_is_that_of_the_step_before() -> None:
    script = Script()
    script.step()
    for seconds in (0.008, 0.007, 0.02):
        script.step(seconds)
    assert script.summary() == expected({0: 0.008, 1: 0.007, 2: 0.02})
    assert script.policy.prediction_errors.ignored == 0


def test_scenarios_are_counted_apart() -> None:
    """Step 0 is a prompt alone, steps 1 and 2 are mixed, step 3 is decodes alone."""
    script = Script()
    script.step()
    script.step(0.008)
    script.step(0.009)
    script.step(0.010, arrives=False)
    script.step(0.011)
    assert script.summary(Scenario.PREFILL) == expected({0: 0.008})
    assert script.summary(Scenario.MIXED) == expected({1: 0.009, 2: 0.010})
    assert script.summary(Scenario.DECODE).iterations == 1
    assert script.summary(Scenario.DECODE).bias_seconds == pytest.approx(0.005 + 3 * 20e-6 - 0.011)


def test_unknown_and_censored_durations_are_left_out() -> None:
    script = Script()
    script.step()
    script.step(0.0)
    script.step(0.5, iteration={"last_iteration_censored": True})
    script.step(0.012)
    assert script.summary() == expected({2: 0.012})


def test_a_plan_that_was_not_executed_to_the_letter_is_left_out() -> None:
    script = Script()
    script.step()
    script.step(0.5, **script.not_as_planned())
    assert script.summary() == NOTHING
    script.step(0.010)
    assert script.summary().iterations == 1, "the next one counts again"


class Greedy(SlidingServePolicy):
    """Asks for a token too many in step 1."""

    def decide(self, queues: Queues, iteration: IterationState, plan: Plan) -> None:
        super().decide(queues, iteration, plan)
        if iteration.step == 1:
            plan.entries["tokens"][plan.count - 1] += 1


def test_a_plan_that_the_guard_changed_is_left_out() -> None:
    """The engine executed what it was told to, which is not what was predicted."""
    script = Script(Greedy)
    script.step()
    script.step(0.008)
    assert script.session.guarded == 1
    script.step(0.5)
    script.step(0.013)
    assert script.summary() == expected({0: 0.008, 2: 0.013})


def test_what_a_resync_leaves_out() -> None:
    """Step 1 was decided and its answer lost; steps 1 and 2 were the engine's own, and then comes a snapshot."""
    script = Script()
    script.step()
    script.step(0.008)
    assert isinstance(script.session.handle(step(3, 3.0, free=50_000)), ResyncRequired)
    full = snapshot([(0, 100, 102, 3), (1, 200, 201, 2)], 2, free=50_000, epoch=1, number=3)
    decide(
        script.session, full._replace(iteration=full.iteration._replace(now_seconds=3.0, last_iteration_seconds=0.7))
    )
    assert script.summary() == expected({0: 0.008})
    script.number, script.epoch = 4, 1
    script.step(0.006)
    assert script.summary().iterations == 2, "the snapshot's own plan was executed"
    assert script.summary(Scenario.DECODE).bias_seconds == pytest.approx(0.005 + 2 * 20e-6 - 0.006)


def test_a_snapshot_for_the_step_that_was_just_decided_takes_its_place() -> None:
    """The answer to step 1 got lost, and the engine asks again, with a snapshot."""
    script = Script()
    script.step()
    script.step(0.008)
    full = snapshot([(0, 100, 100, 1)], 1, free=50_000, epoch=1, number=1)
    decide(script.session, full._replace(iteration=full.iteration._replace(now_seconds=1.0)))
    script.number, script.epoch = 2, 1
    script.step(0.006)
    assert script.summary(Scenario.MIXED) == NOTHING
    assert script.summary(Scenario.DECODE).iterations == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_iterations_in_flight_a_duration_belongs_to_an_earlier_step(depth: int) -> None:
    script = Script()
    for number in range(depth + 1):
        script.step(0.0, depth=number)
    measured = {number: 0.010 + 0.001 * number for number in range(6)}
    for seconds in measured.values():
        script.step(seconds, depth=depth)
    assert script.summary() == expected(measured)


def test_in_flight_a_plan_that_was_not_executed_is_left_out_when_its_turn_comes() -> None:
    """Step 2 hears that step 1 was not as planned, step 3 how long step 1 took."""
    script = Script()
    script.step()
    script.step(0.0, depth=1)
    script.step(0.010, depth=1, **script.not_as_planned())
    script.step(0.5, depth=1)
    script.step(0.012, depth=1)
    counted = script.summary()
    assert counted.iterations == 2
    assert counted.mae_seconds < 0.1, "step 1 is not among them"


def test_a_duration_counts_once() -> None:
    """The last finished iteration is step 0 both times: step 2 begins while step 1 is in flight."""
    script = Script()
    script.step()
    script.step(0.008)
    script.step(0.008, depth=1)
    assert script.summary() == expected({0: 0.008})


def test_a_pause_does_not_hide_that_a_plan_was_not_executed() -> None:
    """Step 1's plan was not executed, which step 2 says; the engine is paused then. Step 3 tells step 1's duration."""
    script = Script()
    script.step()
    script.step(0.008)
    paused = {"pause_state": PauseState.PAUSED_ALL}
    script.step(0.0, depth=1, iteration=paused, arrives=False, **script.not_as_planned())
    script.step(0.5, depth=1, arrives=False)
    assert script.summary() == expected({0: 0.008})


def test_what_is_long_gone_is_ignored() -> None:
    script = Script()
    for _ in range(12):
        script.step()
    script.step(0.5, depth=11)
    assert script.summary() == NOTHING


def test_predictions_of_nothing_are_counted_as_ignored() -> None:
    script = Script()
    script.step(arrives=False)
    script.step(0.004)
    assert script.summary() == NOTHING
    assert script.policy.prediction_errors.ignored == 1


class TestThroughput:
    """rho: tokens per second of the last iterations."""

    def rho(self, script: Script) -> float:
        return script.policy._memory.throughput.tokens_per_second

    def test_first_it_is_the_models(self) -> None:
        """B tokens in the time of a prompt of B tokens beside 16 decodes."""
        assert self.rho(Script()) == pytest.approx(4096 / (0.005 + 20e-6 * (4096 + 16)))

    def test_prompt_tokens_of_iterations_that_had_any(self) -> None:
        script = Script()
        script.step()
        script.step(0.010)
        assert self.rho(script) == pytest.approx(100 / 0.010)
        script.step(0.020, arrives=False)
        assert self.rho(script) == pytest.approx((100 + 200) / 0.030)
        script.step(0.5)
        assert self.rho(script) == pytest.approx((100 + 200) / 0.030), "step 2 held decodes alone"

    @pytest.mark.parametrize("parameters", [{"mode": "paper"}, {"prefill_throughput": False}], ids=str)
    def test_all_tokens_of_all_iterations(self, parameters: dict[str, Any]) -> None:
        script = Script(**parameters)
        script.step()
        script.step(0.010)
        script.step(0.020, arrives=False)
        script.step(0.006)
        assert self.rho(script) == pytest.approx((100 + 201 + 2) / 0.036)

    def test_window(self) -> None:
        script = Script(throughput_window=2)
        script.step()
        for number in range(4):
            script.step(0.010 * (number + 1))
        assert self.rho(script) == pytest.approx((300 + 400) / 0.070)

    def test_what_does_not_count_for_errors_does_not_count_here(self) -> None:
        script = Script()
        before = self.rho(script)
        script.step()
        script.step(0.0)
        script.step(0.5, iteration={"last_iteration_censored": True})
        script.step(0.5, **script.not_as_planned())
        assert self.rho(script) == before

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
    def test_times_that_are_none_change_nothing(self, seconds: float) -> None:
        throughput = Throughput(4, 123.0, prefill_only=False)
        throughput.add(Planned(0, 10.0, 0.0, 0.01), seconds)
        assert throughput.tokens_per_second == 123.0

    def test_sums_do_not_drift_over_a_long_run(self) -> None:
        rng = np.random.default_rng(3)
        throughput = Throughput(16, 1.0, prefill_only=False)
        tokens, seconds = rng.integers(1, 4000, 20_000), rng.uniform(1e-3, 10.0, 20_000)
        for number, (count, duration) in enumerate(zip(tokens.tolist(), seconds.tolist(), strict=True)):
            throughput.add(Planned(number, float(count), 0.0, 0.01), duration)
        assert throughput.tokens_per_second == pytest.approx(tokens[-16:].sum() / seconds[-16:].sum(), rel=1e-9)

    def test_urgency_follows_the_throughput(self) -> None:
        """40000 tokens due in 2 s: urgent (u = 5 > 4) at 4000 tokens/s, and then before shorter ones; not at 16000."""
        scene = Scene([prompt(40_000, 2.0), prompt(100, 50.0), decoding(5.0)])
        for seconds, first in ((1.024, 0), (0.256, 1)):
            policy = make_policy(MODEL, max_tokens=4096)
            for _ in range(2):
                policy._memory.throughput.add(Planned(0, 4096.0, 4096.0, 0.1), seconds)
            assert list(scene.decide_by(policy).tokens)[1] == first


PROFILE = "rtx3090-tp2"
FEED = random_feed(seed=3, count=50, prompt=1500, output=25, gap_seconds=0.25)


class Recording(InProcessSource):
    """Keeps what was answered; asks with a snapshot instead of some steps."""

    def __init__(self, snapshots_at: tuple[int, ...] = (), told: bool = True, **parameters: Any) -> None:
        super().__init__()
        self.session = source_with(load_model(PROFILE), engine_limits(load_profile(PROFILE)), **parameters).session
        self.answers: list[tuple[Any, ...]] = []
        self._snapshots_at = snapshots_at
        self._told = told

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        if not self._told:
            step = step._replace(iteration=step.iteration._replace(last_iteration_seconds=0.0))
        if step.iteration.step in self._snapshots_at:
            full = snapshot()
            self._epoch += 1
            last = step.iteration.last_iteration_seconds
            iteration = full.iteration._replace(epoch=self._epoch, last_iteration_seconds=last)
            answer = self.session.handle(full._replace(iteration=iteration))
            assert isinstance(answer, BatchAllocation), answer
        else:
            answer = super().decide(step, snapshot)
        self.answers.append(
            (
                answer.step,
                batch(answer),
                answer.preempted_handles.tolist(),
                answer.demoted_handles.tolist(),
                answer.predicted_seconds,
                answer.decision_path,
                answer.policy_version,
                answer.model_version,
            )
        )
        return answer


def run(source: Recording) -> Outcome:
    profile = load_profile(PROFILE)
    return SimulatedEngine(FEED, engine_limits(profile), ProfileTimer(profile), source).run()


VARIANTS: list[dict[str, Any]] = [{}, {"mode": "paper"}, {"window": 3}, {"objective": "max_tokens"}]


@pytest.mark.parametrize("parameters", VARIANTS, ids=str)
@pytest.mark.parametrize("snapshots_at", [(), (5, 60, 61, 200)], ids=["steps", "snapshots"])
def test_same_messages_same_answers(parameters: dict[str, Any], snapshots_at: tuple[int, ...]) -> None:
    one, two = Recording(snapshots_at, **parameters), Recording(snapshots_at, **parameters)
    first, second = run(one), run(two)
    assert one.answers == two.answers
    assert first.allocation_digest == second.allocation_digest
    assert one.session.prediction_errors is not None
    counted = one.session.prediction_errors.summary().iterations
    # The last one is never told; neither the engine's own nor the plan before a snapshot is known to be the policy's.
    told = len(one.answers) - 1 - first.fallbacks
    assert told - len(snapshots_at) <= counted <= told
    assert {path for answer in one.answers if (path := answer[5])} >= {"decode", "chunker"}


@pytest.mark.parametrize("parameters", VARIANTS, ids=str)
def test_a_snapshot_that_tells_nothing_new_changes_no_decision(parameters: dict[str, Any]) -> None:
    """Without durations, as the one of the plan before a snapshot is not known to be that of the plan."""
    plain, resynced = Recording(told=False, **parameters), Recording((5, 60, 61, 200), told=False, **parameters)
    run(plain)
    run(resynced)
    assert plain.answers == resynced.answers


def test_sessions_do_not_share_what_they_learn() -> None:
    alone = Recording()
    run(alone)
    other, again = Recording(), Recording()
    run(other)
    run(again)
    assert again.answers == alone.answers
