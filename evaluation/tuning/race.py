"""Which settings are best for a traffic: every policy as it comes and with each cap, by successive halving.

1. Every policy as it comes, with few requests from two places of the tuning part.
2. Every policy with each cap, the same requests, looking first where (1) found the best goodput: a rate that is too
   high fails early and costs little.
3. The two best settings of each policy, with more requests.
4. The best setting of the best policies, and the default, with all requests of the tuning part (`climb`).

Everything runs on the same arrivals and lengths. The order in which runs end changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from evaluation.goodput.points import Point, RunKey, base_policy, with_cap
from evaluation.goodput.runner import Limit
from evaluation.goodput.sweep import Report, has_cap
from evaluation.goodput.task import Found, Place, Search, run_keys, run_search
from evaluation.tuning.climb import Climb, Climbed, run_climb
from evaluation.tuning.promise import Promise, promise
from evaluation.tuning.traffic import Traffic

CAPS = (128, 256, 384, 512, 1024, 2048)
"""Tokens of an iteration, decodes included, that are tried beside a policy's default, where the engine has more."""

SCREEN_SECONDS, HALVING_SECONDS = 75.0, 380.0
"""How long the windows of the first rounds last at the hardware's capacity, from each place."""

LEAST_SCREEN, LEAST_HALVING = 300, 1500
"""Requests of these windows at least."""

CLIMB_LOOKS = 8.0
"""Runs of a climb, about."""

CAPS_UNTIL, HALVING_UNTIL = 0.4, 0.55
"""Shares of the time limit by which the caps, and the second round, have to be through."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run: requests and seeds of the rounds before the last, caps, and who goes on.

    ``keep`` settings of each policy go into the third round, the best settings of ``finalists`` policies into the last.
    """

    screen_requests: int
    halving_requests: int
    screen_seeds: tuple[int, ...] = (0, 1)
    caps: tuple[int, ...] = CAPS
    keep: int = 2
    finalists: int = 2


def effort_for(capacity: float) -> Effort:
    """Returns the effort for hardware that can serve about so many requests/s.

    A window has to last: in ten seconds no policy can get far behind, whatever the rate. How long it takes to run one
    depends little on how many requests fill it.
    """
    screen, halving = round(capacity * SCREEN_SECONDS), round(capacity * HALVING_SECONDS)
    return Effort(max(LEAST_SCREEN, screen), max(LEAST_HALVING, halving))


@dataclass(frozen=True, slots=True)
class Course:
    """What is raced for: hardware, traffic, the share of requests that may miss, and the policy that is the default."""

    profile: str
    traffic: Traffic
    policies: tuple[str, ...]
    default: str
    effort: Effort
    limit: float = 0.01
    most_tokens: int = 2048

    @property
    def caps(self) -> tuple[int, ...]:
        """The caps that are tried: those below the engine's own limit, ``most_tokens``."""
        return tuple(cap for cap in self.effort.caps if cap < self.most_tokens)


@dataclass(frozen=True, slots=True)
class Contender:
    """One setting in the last round, and what it allows to promise."""

    policy: str
    climbed: Climbed
    promise: Promise


@dataclass(frozen=True, slots=True)
class Standings:
    """How the race ended.

    Attributes:
        contenders: of the last round, the best promise first; the default is among them.
        screened: goodput of every setting that was looked at in the first round, requests/s.
        left_out: settings that were not looked at (any further) because the time was up.
    """

    contenders: tuple[Contender, ...]
    screened: Mapping[str, float]
    left_out: tuple[str, ...]

    def of(self, policy: str) -> Contender:
        """Returns a contender by its policy's text."""
        return next(contender for contender in self.contenders if contender.policy == policy)


class Race:
    """Runs the rounds on a pool of processes.

    Args:
        course: what is raced for.
        place: where runs are kept.
        pool: of processes.
        report: told the share that is done, and what was just finished.
        seconds: time limit; 0: none. When it is up, settings that are not begun are left out, but never the best so
            far and the default, so it may end later.
    """

    def __init__(
        self, course: Course, place: Place, pool: ProcessPoolExecutor, report: Report, seconds: float = 0.0
    ) -> None:
        self._course, self._place, self._pool, self._report = course, place, pool, report
        self._seconds, self._started = seconds, time.monotonic()
        self._done, self._total = 0.0, _planned_work(course)
        self._left_out: list[str] = []

    def run(self) -> Standings:
        """Runs all rounds. Raises what `run_point` raises."""
        screened = self._screen()
        halved = self._halve(screened)
        finalists = self._finalists(halved)
        contenders = self._climb(finalists, halved)
        contenders.sort(key=lambda contender: (-contender.promise.rate, -contender.promise.goodput, contender.policy))
        goodputs = {policy: result.goodput for policy, result in screened.items()}
        return Standings(tuple(contenders), goodputs, tuple(dict.fromkeys(self._left_out)))

    def _screen(self) -> dict[str, Found]:
        """Rounds 1 and 2: by the policy's text, default settings first."""
        effort = self._course.effort
        requests = min(effort.screen_requests, self._course.traffic.tuning_requests)
        first = [
            self._search(policy, requests, effort.screen_seeds)
            for policy in dict.fromkeys((*self._course.policies, self._course.default))
        ]
        found = self._searched(first)
        hint = max((f.bracket.meets for f in found.values() if f.bracket.meets is not None), default=None)
        second = [
            replace(search, policy=with_cap(search.policy, cap), hint=hint)
            for search in first
            if search.policy in self._course.policies and has_cap(search.policy)
            for cap in self._course.caps
        ]
        return found | self._searched(second, until=CAPS_UNTIL)

    def _halve(self, screened: Mapping[str, Found]) -> dict[str, Found]:
        """Round 3: the best of each policy, once more; where the time is up, what round 2 found."""
        effort, again = self._course.effort, []
        requests = min(effort.halving_requests, self._course.traffic.tuning_requests)
        for settings in _by_policy(screened).values():
            kept = _best(screened, settings)[: effort.keep]
            for policy in dict.fromkeys((*kept, *(p for p in settings if p == self._course.default))):
                hint = screened[policy].bracket.meets
                again.append(self._search(policy, requests, (0,), hint))
        found = self._searched(again, until=HALVING_UNTIL)
        if len(found) == len(again):
            return found
        return {search.policy: screened[search.policy] for search in again}

    def _finalists(self, found: Mapping[str, Found]) -> list[str]:
        """Returns the default and the best setting of the best policies."""
        leaders = [_best(found, settings)[0] for settings in _by_policy(found).values()]
        best = sorted(leaders, key=lambda policy: (-found[policy].goodput, policy))
        default = self._course.default
        return list(dict.fromkeys((best[0], default, *best[1 : self._course.effort.finalists])))

    def _climb(self, finalists: Sequence[str], found: Mapping[str, Found]) -> list[Contender]:
        """Round 4: with all requests. The first and the default are climbed however late it is, the slowest first."""
        course, traffic = self._course, self._course.traffic
        must = [policy for policy in finalists if policy in (finalists[0], course.default)]
        order = sorted(must, key=lambda policy: found[policy].goodput) + [p for p in finalists if p not in must]
        climbs = [
            Climb(
                profile=course.profile,
                workload=traffic.tuning,
                policy=policy,
                requests=traffic.tuning_requests,
                hint=_hint(found[policy]),
                limit=course.limit,
            )
            for policy in order
        ]
        futures = {self._pool.submit(run_climb, climb, self._place): place for place, climb in enumerate(climbs)}
        done = self._collect(
            futures,
            lambda place: f"{climbs[place].policy}, {climbs[place].requests} requests",
            lambda place: CLIMB_LOOKS * climbs[place].requests,
            1.0,
            len(must),
        )
        self._left_out += [climb.policy for place, climb in enumerate(climbs) if place not in done]
        return [_contender(done[place]) for place in sorted(done)]

    def tuning_key(self, policy: str, rate: float) -> RunKey:
        """Returns what identifies a run over the whole part that is chosen on."""
        traffic = self._course.traffic
        return RunKey(self._course.profile, traffic.tuning, policy, rate, 0, traffic.tuning_requests)

    def held_out_key(self, policy: str, rate: float) -> RunKey:
        """Returns what identifies a run over the part that is tested on."""
        traffic = self._course.traffic
        seed, requests = traffic.held_out_seed, traffic.held_out_requests
        return RunKey(self._course.profile, traffic.held_out, policy, rate, seed, requests)

    def make_runs(self, keys: Sequence[RunKey]) -> list[Point]:
        """Makes runs to their end, in parallel."""
        futures = {self._pool.submit(run_keys, (key,), self._place): place for place, key in enumerate(keys)}
        done = self._collect(
            futures, lambda place: f"{keys[place].policy} at {keys[place].rate:g}/s", lambda place: keys[place].requests
        )
        return [done[place][0] for place in range(len(keys))]

    def search_held_out(self, policy: str, hint: int) -> Found:
        """Searches the goodput over the part that is tested on."""
        course, traffic = self._course, self._course.traffic
        search = Search(
            profile=course.profile,
            workload=traffic.held_out,
            policy=policy,
            requests=traffic.held_out_requests,
            seeds=(traffic.held_out_seed,),
            resolution=1,
            limit=Limit(course.limit),
            hint=hint,
        )
        return self._searched([search])[policy]

    def _search(self, policy: str, requests: int, seeds: tuple[int, ...], hint: int | None = None) -> Search:
        """Every search tells neighbouring rates apart: else settings would differ by where a search began."""
        course = self._course
        return Search(
            profile=course.profile,
            workload=course.traffic.tuning,
            policy=policy,
            requests=requests,
            seeds=seeds,
            resolution=1,
            limit=Limit(course.limit),
            hint=hint,
        )

    def _searched(self, searches: Sequence[Search], until: float = 0.0) -> dict[str, Found]:
        """Searches in parallel. With ``until`` what is not begun by that share of the time limit is left out."""
        futures = {self._pool.submit(run_search, s, self._place): place for place, s in enumerate(searches)}
        done = self._collect(
            futures,
            lambda place: f"{searches[place].policy}, {searches[place].requests} requests",
            lambda place: _work(searches[place]),
            until,
        )
        self._left_out += [s.policy for place, s in enumerate(searches) if place not in done]
        return {searches[place].policy: done[place] for place in sorted(done)}

    def _collect(
        self,
        futures: dict[Future[Value], int],
        name: Callable[[int], str],
        work: Callable[[int], float],
        until: float = 0.0,
        certain: int = 0,
    ) -> dict[int, Value]:
        done: dict[int, Value] = {}
        pending = set(futures)
        while pending:
            if self._is_late(until):
                pending = {future for future in pending if futures[future] < certain or not future.cancel()}
            finished, pending = wait(pending, self._left_seconds(until), FIRST_COMPLETED)
            for future in finished:
                place = futures[future]
                done[place] = future.result()
                self._done += work(place)
                self._report(min(0.99, self._done / self._total), name(place))
        return done

    def _left_seconds(self, until: float) -> float | None:
        if not self._seconds or not until or self._is_late(until):
            return None
        return max(0.1, self._seconds * until - (time.monotonic() - self._started))

    def _is_late(self, until: float) -> bool:
        return bool(self._seconds and until) and time.monotonic() - self._started > self._seconds * until


def _contender(climbed: Climbed) -> Contender:
    made = promise(climbed.curve, climbed.goodput, climbed.climb.limit)
    return Contender(climbed.climb.policy, climbed, made)


def _hint(found: Found) -> int:
    """Returns the grid point to look at first; of a policy that met nowhere the lowest that was looked at."""
    step = found.bracket.fails if found.bracket.meets is None else found.bracket.meets
    assert step is not None
    return step


def _by_policy(settings: Mapping[str, Found]) -> dict[str, list[str]]:
    """Groups settings by the policy without its cap."""
    groups: dict[str, list[str]] = {}
    for policy in settings:
        groups.setdefault(base_policy(policy)[0], []).append(policy)
    return groups


def _best(found: Mapping[str, Found], settings: Sequence[str]) -> list[str]:
    """Sorts settings by goodput; of equal ones the default comes first, then the smaller cap."""
    return sorted(settings, key=lambda policy: (-found[policy].goodput, base_policy(policy)[1] or 0))


def _work(search: Search) -> float:
    """Work of a search in requests, about: a hint saves the slow runs at low rates."""
    looks = 5.0 if search.hint is not None else 9.0
    return looks * search.requests * len(search.seeds)


def _planned_work(course: Course) -> float:
    """Work of the race in requests, about, with the runs that follow it."""
    effort, requests = course.effort, course.traffic.tuning_requests
    screen = min(effort.screen_requests, requests) * len(effort.screen_seeds)
    capped = sum(has_cap(policy) for policy in course.policies)
    halving = min(effort.halving_requests, requests)
    finalists = min(len(course.policies), effort.finalists) + 1
    return (
        9.0 * screen * (len(course.policies) + 1)
        + 5.0 * screen * capped * len(course.caps)
        + 5.0 * halving * (len(course.policies) * effort.keep + 1)
        + CLIMB_LOOKS * requests * finalists
        + 3.0 * requests
    )
