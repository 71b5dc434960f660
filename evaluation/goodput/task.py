"""One search for a goodput, as it is handed to a worker process; every run it makes goes into the store at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from evaluation.goodput.points import Point, RunKey
from evaluation.goodput.rates import rate_of, step_at
from evaluation.goodput.runner import Limit, estimated_capacity, meets_at, run_point
from evaluation.goodput.search import COARSE, Bracket, search_around, search_upwards
from evaluation.goodput.store import PointStore

FIRST_LOAD, HIGHEST_LOAD = 0.2, 1.6
"""Shares of the estimated capacity: where a search without a hint begins, and where every search ends."""

LOWEST_LOAD, FINAL_LOWEST_LOAD = 0.1, 0.02
"""Shares below which nothing is looked at: while caps are compared, and in the round that counts."""

LIGHT_REQUESTS = 100
"""Requests of a run at least, where it only tells where to look."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs are kept, and where traces are found."""

    folder: Path
    shard: str = ""
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the goodput of one policy (with its cap) on one workload and profile.

    Attributes:
        hint: the grid point where the goodput is expected; None: unknown.
        limit: see `Limit`.
        resolution: grid points between the rates told apart.
        lowest_load: share of the estimated capacity below which nothing is looked at.
    """

    profile: str
    workload: str
    policy: str
    requests: int
    seeds: tuple[int, ...]
    resolution: int
    limit: Limit
    hint: int | None = None
    lowest_load: float = FINAL_LOWEST_LOAD


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    search: Search
    bracket: Bracket

    @property
    def goodput(self) -> float:
        """Requests/s; 0 where no rate that was looked at meets the SLOs."""
        return 0.0 if self.bracket.meets is None else rate_of(self.bracket.meets)


def run_search(search: Search, place: Place) -> Found:
    """Searches; runs that are in the store are not made again.

    Without a hint, coarse steps from a fifth of the estimated capacity upwards come first, with a quarter of the
    requests (a run takes longer the lower the rate, and a policy that stalls when there is little to do misses far more
    than the limit); what seems to fail there is looked at again with all of them. The goodput itself, one coarse step
    below it and the first rate that fails are always looked at with all requests.
    """
    capacity = estimated_capacity(search.profile, search.workload, min(search.requests, 600), place.data)
    lowest, highest = step_at(capacity * search.lowest_load), step_at(capacity * HIGHEST_LOAD)

    def meets(step: int, requests: int = search.requests) -> bool:
        keys = tuple(
            RunKey(search.profile, search.workload, search.policy, rate_of(step), seed, requests)
            for seed in search.seeds
        )
        return meets_at(lambda key, allowed: stored_run(key, allowed, place), keys, search.limit)

    def seems_to_meet(step: int) -> bool:
        return meets(step, max(min(LIGHT_REQUESTS, search.requests), search.requests // 4)) or meets(step)

    hint, first = search.hint, step_at(capacity * FIRST_LOAD)
    if hint is None:
        hint = search_upwards(seems_to_meet, first, highest, COARSE).meets
    if hint is None:
        return Found(search, search_around(meets, first, lowest, highest, search.resolution, checks=()))
    return Found(search, search_around(meets, hint, lowest, highest, search.resolution))


def stored_run(key: RunKey, allowed: int | None, place: Place) -> Point:
    """Returns a run from the store, or makes it; one that was ended early will do if it already missed too many."""
    store = _store(place.folder, place.shard)
    known = store.find(key, complete=allowed is None)
    if known is not None and (allowed is None or known.complete or known.missed > allowed):
        return known
    point = run_point(key, allowed, place.data)
    store.add(point)
    return point


def run_keys(keys: tuple[RunKey, ...], place: Place) -> list[Point]:
    """Makes runs to their end."""
    return [stored_run(key, None, place) for key in keys]


@lru_cache(maxsize=1)
def _store(folder: Path, shard: str) -> PointStore:
    return PointStore(folder, shard)
