"""What can be set, what each setting means, and which of them `paper` and `robust` choose.

The published algorithms leave holes (numbered below as in docs/policies.md). ``paper`` follows them to the letter,
``robust`` corrects each; every correction is a switch of its own, so an ablation is a command line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

MODES = ("robust", "paper")
OBJECTIVES = ("min_time", "max_tokens")
ORDERS = ("mlps", "deadline")
PROTECTIONS = ("none", "priority", "running")
MOST_WINDOWS = 4
MOST_TOKENS = 1_000_000


CORRECTIONS = (
    "clamp_chunk",
    "clamp_next_budget",
    "cap_next_budget",
    "advance_queue",
    "skip_lost_decodes",
    "expired_last",
    "drop_expired_risks",
    "chunk_if_infeasible",
    "anchor_within_tbt",
    "recheck_batch",
    "clamp_budget_sum",
    "take_all_that_fits",
    "prefill_throughput",
)
"""Switches that are on in ``robust`` and off in ``paper``."""

PRESETS: dict[str, dict[str, Any]] = {
    "robust": {
        "step_tokens": 16,
        "knapsack_step_tokens": 16,
        "max_anchors": 8,
        "max_candidates": 32,
        "anchor_in_sums": False,
        **dict.fromkeys(CORRECTIONS, True),
    },
    "paper": {
        "step_tokens": 1,
        "knapsack_step_tokens": 1,
        "max_anchors": 0,
        "max_candidates": 0,
        "anchor_in_sums": True,
        **dict.fromkeys(CORRECTIONS, False),
    },
}
"""What each mode says of the settings that are left out."""

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, MOST_TOKENS),
    "max_stretch": (1.0, 1000.0),
    "alpha": (0.0, 1e6),
    "eps_seconds": (1e-6, 60.0),
    "throughput_window": (1, 10_000),
    "safety": (0.5, 10.0),
    "tolerance_tokens": (2, 100_000),
    "window": (1, MOST_WINDOWS),
    "step_tokens": (1, 4096),
    "knapsack_step_tokens": (1, 4096),
    "max_anchors": (0, 100_000),
    "max_candidates": (0, 100_000),
}


@dataclass(frozen=True, slots=True)
class SlidingServeParameters:
    """Settings of the policy. A switch or number that is left out is what ``mode`` says (`PRESETS`).

    Attributes:
        mode: ``robust``, or ``paper``: the published algorithms to the letter.
        model: latency model: a built-in profile's name or a .json file; empty: the one of the session's profile.
        max_tokens: B, most tokens of an iteration, decodes included; 0: as ``max_stretch`` says, by the model. Never
            above the engine's own limit.
        max_stretch: an iteration with prompts takes at most about so many times as long as one of decodes alone. A
            request that arrives during an iteration waits for its end, so this bounds what an arrival may lose.
        order: of the prompts: ``mlps``, or ``deadline``, the earliest first, for comparisons without MLPS.
        constructor: false leaves the BatchConstructor out, for comparisons: the chunker always decides.
        alpha: urgency above which a prompt goes first: remaining tokens / (throughput x slack). 1: all of the recent
            throughput would be just enough.
        eps_seconds: least slack in that formula.
        throughput_window: recent iterations that the throughput (rho) is measured over.
        protect: who has the protection flag g: ``none``; ``priority``: requests whose priority is below 0 (smaller is
            more important); ``running``: prompts that have been started.
        safety: predicted times are multiplied by it before they are held against a slack; above 1 trades throughput
            for certainty.
        tolerance_tokens: the ternary search ends when its interval is this short.
        window: iterations that the chunks are spread over: 1 is greedy, 2 the paper's, up to 4.
        objective: of the chunker: ``min_time`` of a fixed number of tokens (Algorithm 1), or ``max_tokens`` in the time
            that the decodes leave (the paper's Figure 1) (3).
        step_tokens: budgets looked at by TimeToBudget are multiples of it.
        knapsack_step_tokens: knapsack weights are rounded up to multiples of it (9).
        max_anchors: most requests at risk that a batch is constructed around, the least slack first; 0: all (9).
        max_candidates: most requests that compete for a constructed batch; 0: all that a table of 64 MB holds (9).
        clamp_chunk: a chunk may not take longer than the decodes can wait (1).
        clamp_next_budget: the next iteration's budget holds at least the decodes (2).
        cap_next_budget: B binds the next iteration too; without, all prompts may be left to it, again and again (14).
        advance_queue: the next iteration's prediction sees prompts as this one leaves them (4).
        skip_lost_decodes: decodes that even a decode-only iteration cannot save bound nothing (5).
        expired_last: requests whose deadline has passed go last, shortest first (6).
        drop_expired_risks: they are not at risk of anything any more (7).
        chunk_if_infeasible: if no request at risk can be saved, chunk as usual (7).
        anchor_within_tbt: a constructed batch may not take longer than the decodes can wait (8).
        recheck_batch: a constructed batch is predicted as it is, and prompts of least value leave it until it is in
            time; TimeToBudget has priced the prompts in their order, not those that were chosen (15).
        clamp_budget_sum: no more tokens are spread over the window than there are (10).
        take_all_that_fits: everything goes at once if the decodes can wait for it (10).
        anchor_in_sums: the request at risk counts in the sums of its candidates' values (11).
        expected_decodes: prompts that this iteration completes decode in the next (13).
        fill_remainder: what a constructed batch leaves of its budget goes to other prompts, in their order.
        prefill_throughput: rho is prompt tokens per second of the iterations that had any, instead of all tokens of all
            iterations: a stretch of decodes says nothing about how fast a prompt is computed.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    mode: str = "robust"
    model: str = ""
    max_tokens: int = 0
    max_stretch: float = 2.0
    order: str = "mlps"
    constructor: bool = True
    alpha: float = 4.0
    eps_seconds: float = 0.001
    throughput_window: int = 64
    protect: str = "priority"
    safety: float = 1.0
    tolerance_tokens: int = 30
    window: int = 2
    objective: str = "min_time"
    step_tokens: int | None = None
    knapsack_step_tokens: int | None = None
    max_anchors: int | None = None
    max_candidates: int | None = None
    clamp_chunk: bool | None = None
    clamp_next_budget: bool | None = None
    cap_next_budget: bool | None = None
    advance_queue: bool | None = None
    skip_lost_decodes: bool | None = None
    expired_last: bool | None = None
    drop_expired_risks: bool | None = None
    chunk_if_infeasible: bool | None = None
    anchor_within_tbt: bool | None = None
    recheck_batch: bool | None = None
    clamp_budget_sum: bool | None = None
    take_all_that_fits: bool | None = None
    anchor_in_sums: bool | None = None
    expected_decodes: bool = False
    fill_remainder: bool = False
    prefill_throughput: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", MODES),
            ("order", ORDERS),
            ("objective", OBJECTIVES),
            ("protect", PROTECTIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(name, f"give one of {', '.join(known)}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(name, f"give a number from {low:g} to {high:g}")
        if self.objective == "max_tokens" and self.window != 2:
            raise ValueError("objective", "max_tokens looks two iterations ahead; leave window at 2")

    def resolved(self) -> dict[str, Any]:
        """Returns every setting by name, with what the mode says where nothing was given."""
        preset = PRESETS[self.mode]
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: preset[name] if value is None else value for name, value in values.items()}
