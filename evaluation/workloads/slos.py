"""The rules by which requests get their SLOs.

- relative (SlidingServe): TTFT is a multiple of the prompt's solo TTFT plus a floor, TBT belongs to the class;
- absolute: TTFT 1 s below 2500 prompt tokens, 4 s from there on; TBT 50 ms;
- qoserve (QoServe, evaluation): thirds at random of TTFT 6 s + TBT 50 ms, time to last token 600 s, and 1800 s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from evaluation.workloads.classes import Stream, random_stream
from slidingserve.contract.values import Floats, Ints

SloRule = Literal["relative", "absolute", "qoserve"]

LONG_PROMPT_TOKENS = 2500
SHORT_TTFT_SECONDS = 1.0
LONG_TTFT_SECONDS = 4.0
TBT_SECONDS = 0.050


@dataclass(frozen=True, slots=True)
class QoserveClass:
    """One of QoServe's classes; seconds, 0: none."""

    name: str
    ttft_seconds: float = 0.0
    tbt_seconds: float = 0.0
    ttlt_seconds: float = 0.0


QOSERVE = (
    QoserveClass("interactive", ttft_seconds=6.0, tbt_seconds=TBT_SECONDS),
    QoserveClass("ttlt-600s", ttlt_seconds=600.0),
    QoserveClass("ttlt-1800s", ttlt_seconds=1800.0),
)


@dataclass(frozen=True, slots=True, eq=False)
class SloColumns:
    """SLOs in seconds (0: none) and classes (from 1 into the names) of n requests."""

    ttft_slo_seconds: Floats
    tbt_slo_seconds: Floats
    ttlt_slo_seconds: Floats
    class_index: Ints
    class_names: tuple[str, ...]

    def overridden(self, ttft_seconds: float | None, tbt_seconds: float | None) -> SloColumns:
        """Returns them with the given SLOs for every request instead."""
        count = self.class_index.size
        return replace(
            self,
            ttft_slo_seconds=self.ttft_slo_seconds if ttft_seconds is None else np.full(count, ttft_seconds),
            tbt_slo_seconds=self.tbt_slo_seconds if tbt_seconds is None else np.full(count, tbt_seconds),
        )


def absolute_slos(prompt_tokens: Ints, class_index: Ints, class_names: tuple[str, ...]) -> SloColumns:
    """Returns the absolute SLOs; the classes stay those of the lengths. O(n)."""
    count = prompt_tokens.size
    ttft = np.where(prompt_tokens < LONG_PROMPT_TOKENS, SHORT_TTFT_SECONDS, LONG_TTFT_SECONDS)
    return SloColumns(ttft, np.full(count, TBT_SECONDS), np.zeros(count), class_index, class_names)


def qoserve_slos(requests: int, seed: int) -> SloColumns:
    """Returns QoServe's SLOs and classes, drawn independently of the lengths. O(requests)."""
    kind = random_stream(seed, Stream.SLO_CLASSES).integers(len(QOSERVE), size=requests)
    ttft, tbt, ttlt = np.array([(c.ttft_seconds, c.tbt_seconds, c.ttlt_seconds) for c in QOSERVE]).T
    return SloColumns(ttft[kind], tbt[kind], ttlt[kind], kind + 1, tuple(c.name for c in QOSERVE))
