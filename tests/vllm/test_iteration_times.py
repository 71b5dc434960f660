"""How iterations are measured: without overlap, one ahead, and where a result had been waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.vllm.timing import IterationTimes, Sample


class Loop:
    """An engine's loop on a clock of its own; outputs are plain objects."""

    def __init__(self, warmup_iterations: int = 0) -> None:
        self.times = IterationTimes(warmup_iterations)
        self.now = 100.0
        self.outputs: list[object] = []
        self.step = 0

    def launch(self, tokens: int = 8, predicted: float = 0.0) -> None:
        output = object()
        self.outputs.append(output)
        self.times.launched(output, tokens, self.step, predicted, self.now)
        self.step += 1

    def finish(self) -> Sample | None:
        self.times.finished(self.outputs.pop(0), self.now)
        return self.times.take()


def test_without_overlap_it_is_the_time_from_launch_to_result() -> None:
    loop = Loop()
    for step, seconds in enumerate((0.02, 0.03)):
        loop.launch()
        loop.now += seconds
        assert loop.finish() == pytest.approx((step, seconds, False))
        loop.now += 0.5  # the loop's own work is no part of it
    assert loop.times.take() is None


def test_one_ahead_counts_from_the_end_of_the_one_before() -> None:
    loop = Loop()
    loop.launch()
    loop.now += 0.001
    loop.launch()
    loop.now += 0.019
    assert loop.finish() == pytest.approx((0, 0.020, False))
    loop.launch()
    loop.now += 0.010  # the second began 10 ms ago, when the first ended
    assert loop.finish() == pytest.approx((1, 0.010, False))


def test_a_result_that_had_been_waiting_is_an_upper_bound() -> None:
    loop = Loop()
    loop.launch()
    loop.launch()
    loop.now += 0.020
    assert loop.finish() == pytest.approx((0, 0.020, False))
    loop.now += 0.030  # a long decision: the second has ended meanwhile
    loop.launch()
    loop.now += 0.0002  # what handing a batch over takes
    sample = loop.finish()
    assert sample is not None
    assert sample.censored
    assert loop.times.typical_seconds == pytest.approx(0.020)


def test_a_short_iteration_that_was_waited_for_is_not_censored() -> None:
    loop = Loop()
    loop.launch()
    for _ in range(20):
        loop.launch()
        loop.now += 0.004
        sample = loop.finish()
        assert sample is not None
        assert not sample.censored


def test_warm_up_and_empty_batches_are_not_reported() -> None:
    loop = Loop(warmup_iterations=2)
    for tokens, reported in ((8, False), (0, False), (8, False), (8, True)):
        loop.launch(tokens)
        loop.now += 3.0
        assert (loop.finish() is not None) is reported


def test_results_without_a_launch_are_ignored() -> None:
    loop = Loop()
    loop.times.finished(object(), loop.now)
    assert loop.times.take() is None
    loop.launch()
    loop.launch()
    del loop.outputs[0]  # its result never came
    loop.now += 0.01
    assert loop.finish() == pytest.approx((1, 0.01, False))
    assert loop.times.in_flight == 0


def test_the_end_of_what_runs_is_expected_by_plan_then_by_experience() -> None:
    loop = Loop()
    assert loop.times.expected_end_seconds(loop.now) == loop.now
    loop.launch(predicted=0.05)
    loop.now += 0.01
    assert loop.times.expected_end_seconds(loop.now) == pytest.approx(100.05)
    loop.launch()
    assert loop.times.expected_end_seconds(loop.now) == pytest.approx(100.05)  # nothing is known of it
    loop.now += 0.05
    loop.finish()
    assert loop.times.expected_end_seconds(loop.now) == pytest.approx(100.06 + loop.times.typical_seconds)


@given(st.lists(st.tuples(st.floats(0.0005, 1.0), st.floats(0.0, 0.1)), min_size=1, max_size=30))
def test_one_ahead_the_samples_add_up_to_the_time_that_passed(turns: list[tuple[float, float]]) -> None:
    loop = Loop()
    loop.launch()
    started, total = loop.now, 0.0
    for wait, own_work in turns:
        loop.launch()
        loop.now += wait
        sample = loop.finish()
        assert sample is not None
        total += sample.seconds
        assert total == pytest.approx(loop.now - started)
        loop.now += own_work
