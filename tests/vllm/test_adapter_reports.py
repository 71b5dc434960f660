"""What the adapter says in vLLM's log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from engine_adapter.client import ClientSettings, FallbackReason, SchedulerClient
from engine_adapter.vllm.advisor import Advisor
from engine_adapter.vllm.reports import Reporter
from slidingserve.contract.values import Mode


class Scene:
    """A reporter with counters that a test sets."""

    def __init__(self, every_seconds: float = 60.0) -> None:
        self.advisor: Any = SimpleNamespace(
            planned=0,
            shadowed=0,
            own=0,
            mode=Mode.ACTIVE,
            policy_version="slidingserve/1-robust",
            watchdog=SimpleNamespace(rescues=0),
        )
        self.client = SchedulerClient(ClientSettings("unix:/nobody"))
        self.nonsense: dict[str, int] = {}
        self.said: list[str] = []
        self.warned: list[str] = []
        self.reporter = Reporter(
            cast(Advisor, self.advisor),
            self.client,
            self.nonsense,
            "unix:/nobody",
            every_seconds,
            self.said.append,
            self.warned.append,
        )
        self.reporter.tick(0.0)

    def at(self, seconds: float) -> str:
        before = len(self.said) + len(self.warned)
        self.reporter.tick(seconds)
        lines = self.said + self.warned
        return lines[-1] if len(lines) > before else ""


def test_the_first_report_comes_soon_and_the_others_by_the_minute() -> None:
    scene = Scene()
    scene.advisor.planned = 5
    assert scene.at(9.9) == ""
    assert scene.at(10.0) == "slidingserve: active by slidingserve/1-robust: 5 iterations by plan"
    scene.advisor.planned = 7
    assert scene.at(69.9) == ""
    assert "2 iterations by plan" in scene.at(70.0)


def test_nothing_is_said_of_an_idle_engine_or_where_nothing_is_to_be() -> None:
    assert Scene().at(1000.0) == ""
    silent = Scene(every_seconds=0.0)
    silent.advisor.planned = 5
    assert silent.at(1e9) == ""


def test_reasons_starvation_nonsense_and_waits_are_told() -> None:
    scene = Scene()
    scene.advisor.planned, scene.advisor.own, scene.advisor.watchdog.rescues = 97, 3, 1
    scene.client.counters.fallbacks[FallbackReason.DEADLINE] = 3
    scene.client.counters.round_trips.add(0.001)
    scene.nonsense["ttft_slo_ms out of range"] = 4
    assert scene.at(10.0) == (
        "slidingserve: active by slidingserve/1-robust: 97 iterations by plan, 3 by vLLM alone (3 x deadline), a "
        "decision held the loop for 1.00 ms (p50), 1.00 ms (p99); 1 times a starving request was put before the plan; "
        "SLOs that could not be used: 4 x ttft_slo_ms out of range"
    )


def test_shadow_says_that_nothing_was_obeyed() -> None:
    scene = Scene()
    scene.advisor.mode, scene.advisor.shadowed = Mode.SHADOW, 11
    assert "shadow by slidingserve/1-robust: 11 iterations decided and not obeyed" in scene.at(10.0)


def test_a_sidecar_that_is_not_there_is_a_warning_with_what_to_do() -> None:
    scene = Scene()
    scene.advisor.own = 12
    scene.client.counters.fallbacks[FallbackReason.DISCONNECTED] = 12
    line = scene.at(10.0)
    assert scene.warned == [line]
    assert "all 12 iterations alone (12 x disconnected)" in line
    assert "unix:/nobody" in line
    assert "slidingserve doctor --vllm" in line
