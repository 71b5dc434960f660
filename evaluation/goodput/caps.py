"""Which caps are looked at, and how thoroughly: successive halving.

All caps are tried with few requests; the best third goes on to more, and the best of all to the full number. What a
policy without a cap, or with one in its text, needs is the last round only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CAPS = (64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048)
"""Most tokens of an iteration, decodes included, out of which every policy gets its best."""

QUICK_CAPS = (128, 256)


@dataclass(frozen=True, slots=True)
class Round:
    """One round: requests of a run, seeds, grid points between the rates told apart, caps that go on from it."""

    requests: int
    seeds: tuple[int, ...]
    resolution: int
    keep: int

    @property
    def cost(self) -> float:
        """Requests of one look at a rate, about: further seeds are not asked once the first has failed."""
        return float(self.requests * len(self.seeds)) * (0.6 if len(self.seeds) > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """The rounds of a search, the last one being the one whose goodput counts."""

    caps: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def final(self) -> Round:
        """The round that counts."""
        return self.rounds[-1]


def full_effort(requests: int = 3000, seeds: int = 3, caps: tuple[int, ...] = CAPS) -> Effort:
    """Returns three rounds: a fifth of the requests with one seed, two fifths with two, all with all."""
    fifth = max(1, requests // 5)
    return Effort(
        caps,
        (
            Round(fifth, (0,), 3, max(2, len(caps) // 3)),
            Round(2 * fifth, tuple(range(min(2, seeds))), 2, 1),
            Round(requests, tuple(range(seeds)), 1, 1),
        ),
    )


def quick_effort(requests: int = 600, seeds: int = 1, caps: tuple[int, ...] = QUICK_CAPS) -> Effort:
    """Returns the last round only."""
    return Effort(caps, (Round(requests, tuple(range(seeds)), 1, 1),))


def planned_requests(effort: Effort, has_caps: bool) -> float:
    """Returns the requests of one look at a rate in each search of a policy on one workload, over all rounds."""
    if not has_caps:
        return effort.final.cost
    kept, work = len(effort.caps), 0.0
    for entry in effort.rounds:
        work += kept * entry.cost
        kept = min(kept, entry.keep)
    return work


def survivors(goodputs: Mapping[int, float], keep: int) -> list[int]:
    """Returns the ``keep`` best caps, ascending; equal ones go to the smaller cap."""
    best = sorted(goodputs, key=lambda cap: (-goodputs[cap], cap))
    return sorted(best[:keep])
