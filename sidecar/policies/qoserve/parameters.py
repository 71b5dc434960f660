"""What can be set, what each setting means, and what the paper and its artifact choose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sidecar.policies.common.checking import CAP, OUTPUT_TOKENS, SECONDS, check_ranges
from sidecar.policies.common.relegation import RELEGATIONS

CONSTANTS = ("paper", "artifact")

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"max_tokens": 2500, "skip_lost_decodes": True},
    "artifact": {"max_tokens": 2552, "skip_lost_decodes": False},
}
"""What each set of constants says of the settings that are left out."""


@dataclass(frozen=True, slots=True)
class QoServeParameters:
    """Settings of the policy. One that is left out is what ``constants`` says (`PRESETS`).

    Attributes:
        constants: ``paper``, or ``artifact``: predictor, budgets and deadlines of the published code (A100).
        model: latency model: a built-in profile's name or a .json file; empty: the one of the session's profile.
            ``artifact`` brings its own.
        max_tokens: most tokens of an iteration, decodes included; 0: the engine's limit, which it never exceeds.
        alpha_seconds_per_token: by how much a missing prompt token puts a request off; 0 is EDF.
        alpha_of_service: the same for each second that it takes at the recent throughput; used instead if above 0.
        relegation: what makes a request go last for good: ``off``: nothing; ``violated``: its deadline has passed;
            ``iteration``, the paper: or lies within this iteration; ``throughput``, its artifact: or the recent
            throughput is too low for it. The default is the better one, as measured.
        skip_lost_decodes: decodes that even a decode-only iteration cannot save bound no chunk; else there are 128
            tokens for an iteration while any decode is late.
        spare_started: the paper's selective preemption: a started prompt that would be late if it went without this
            iteration goes first. Off, as measured: at tight TTFT SLOs it costs short prompts more than it saves.
        safety: predicted times are multiplied by it before they are held against a slack; ``artifact`` has its own 1.2.
        throughput_window: recent iterations that the throughput is measured over; not in ``artifact``.
        output_tokens: what a request with only a TTLT SLO is taken to generate until its class has ended some; in
            ``artifact`` always, unless it brings max_output_tokens.
        seconds_per_output: how long each of those tokens is taken to need in ``artifact``.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    constants: str = "paper"
    model: str = ""
    max_tokens: int | None = None
    alpha_seconds_per_token: float = 0.008
    alpha_of_service: float = 0.0
    relegation: str = "throughput"
    skip_lost_decodes: bool | None = None
    spare_started: bool = False
    safety: float = 1.0
    throughput_window: int = 64
    output_tokens: float = 15.0
    seconds_per_output: float = 0.4

    def __post_init__(self) -> None:
        for name, known in (("constants", CONSTANTS), ("relegation", RELEGATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(name, f"give one of {', '.join(known)}")
        check_ranges(
            self,
            {
                "max_tokens": CAP,
                "alpha_seconds_per_token": SECONDS,
                "alpha_of_service": (0.0, 1e6),
                "safety": (0.5, 10.0),
                "throughput_window": (1, 10_000),
                "output_tokens": OUTPUT_TOKENS,
                "seconds_per_output": SECONDS,
            },
        )

    def resolved(self) -> dict[str, Any]:
        """Returns every setting by name, with what the constants say where nothing was given."""
        preset = PRESETS[self.constants]
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: preset[name] if value is None else value for name, value in values.items()}
