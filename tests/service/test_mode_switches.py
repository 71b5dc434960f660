"""A session whose mode is switched: its mirror follows the engine in each mode."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter.simulated.engine import SimulatedEngine
from evaluation.inprocess import InProcessSource
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import BatchAllocation, Mode, OpenSession, SessionOpened
from tests.strategies import LIMITS, LinearTimer, assert_mirrors, columns, decide, opened, random_feed, step

MODES = (Mode.OFF, Mode.SHADOW, Mode.ACTIVE)


@pytest.mark.parametrize("seed", range(5))
def test_mirror_equals_the_engine_through_random_switches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = InProcessSource()
    source.open(OpenSession(LIMITS))
    engine = SimulatedEngine(random_feed(seed, 60, 60, 12, 0.05), LIMITS, LinearTimer(), source)
    decide_of = source.decide

    def checked(message, snapshot):  # type: ignore[no-untyped-def]
        if rng.random() < 0.2:
            source.session.switch_mode(MODES[rng.integers(3)])
        answer = decide_of(message, snapshot)
        assert_mirrors(source.session, snapshot(), LIMITS)
        assert answer.mode is source.session.mode
        assert (len(answer.handles) == 0) or answer.mode is not Mode.OFF
        return answer

    source.decide = checked  # type: ignore[method-assign]
    outcome = engine.run()
    assert outcome.finished.all()
    assert outcome.preemptions > 0
    assert 0 < outcome.fallbacks < outcome.iterations
    assert source.session.answered == outcome.iterations


def test_mode_before_the_opening_wins_over_the_one_asked_for() -> None:
    for defaults, before, asked, expected in (
        (Mode.UNSPECIFIED, None, Mode.UNSPECIFIED, Mode.ACTIVE),
        (Mode.UNSPECIFIED, None, Mode.SHADOW, Mode.SHADOW),
        (Mode.OFF, None, Mode.ACTIVE, Mode.OFF),
        (Mode.OFF, Mode.ACTIVE, Mode.SHADOW, Mode.ACTIVE),
    ):
        session = Session("", SessionDefaults(mode=defaults))
        if before is not None:
            assert session.switch_mode(before) is defaults
        answer = session.handle(OpenSession(LIMITS, mode=asked))
        assert isinstance(answer, SessionOpened)
        assert answer.mode is session.mode is expected


def test_counts_of_a_session() -> None:
    session = opened()
    assert (session.answered, session.last_step, session.paths) == (0, 0, {})
    decide(session, step(0, arrived=columns([1], [9])))
    session.switch_mode(Mode.OFF)
    decide(session, step(1, free=38))
    assert (session.answered, session.last_step, session.paths) == (2, 1, {"fcfs": 1})


def test_paths_that_never_repeat_do_not_fill_the_memory() -> None:
    class Chatty:
        version, model_version = "chatty/1", ""

        def decide(self, queues, iteration, plan) -> None:  # type: ignore[no-untyped-def]
            plan.path = f"path {iteration.step}"

    session = Session("", build_policy=lambda name, parameters, context: Chatty())
    session.handle(OpenSession(LIMITS))
    for number in range(200):
        answer = session.handle(step(number))
        assert isinstance(answer, BatchAllocation)
        assert answer.decision_path == f"path {number}"
    assert len(session.paths) == 65
    assert session.paths["other"] == 200 - 64
