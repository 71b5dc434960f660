"""The clairvoyant optimum: how many requests of a small instance any schedule can meet, all knowing.

Arrivals and output lengths are known beforehand, and the schedule may idle, postpone decodes, and abandon requests at
no cost; iterations are not preempted and take what the timer says; the engine's limits hold. A request is met by the
deadline rule: token k by arrival + TTFT + (k - 1) TBT, the last by arrival + TTLT too.

Two numbers come out, both proven:

- ``met_at_most``: no schedule of the engine meets more, whatever its chunks (any number of tokens) and whatever tokens
  of other requests it computes besides. Found by a search over progress rounded up to multiples of a granularity, in
  which every iteration takes the least time of any batch that does as much (`progress`, `floor`). It holds for
  schedules that preempt too if ``preempts``; by default that is so where not all requests fit into the KV blocks and
  the running queue at once, as otherwise preemption is never needed.
- ``met_at_least``: ``schedule`` meets that many, with real iteration times. It is the best among the schedules whose
  chunks end at multiples of the granularity or at the prompt's end, without preemption and without tokens of requests
  that it does not meet, if ``best_on_grid``.

Where they are the same number it is the optimum over all schedules; otherwise it lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine_adapter.simulated.state import blocks_of
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.floor import cheapest_seconds, cover_seconds
from evaluation.bounds.hitting import MAX_REQUESTS, largest_feasible
from evaluation.bounds.progress import Track, tracks
from evaluation.bounds.search import (
    FEASIBLE,
    INFEASIBLE,
    UNKNOWN,
    Memory,
    Rules,
    make_memory,
    make_rules,
    make_tasks,
    search,
    way_to_goal,
)
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits, Ints

DEFAULT_GRANULARITIES = (64, 32, 16)
DIVE_STEPS = 2_000_000
DEFAULT_STEPS = 20_000_000


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a schedule: when it runs (seconds), and what (request, tokens) it holds."""

    start_seconds: float
    end_seconds: float
    batch: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Optimum:
    """What is known of the optimum; see the module's words.

    Attributes:
        met_at_least, met_at_most: requests.
        best_on_grid: no schedule of the finest grid whose search ended meets more than ``met_at_least``.
        met: the requests that ``schedule`` meets.
        schedule: its iterations, without the requests that it abandons.
        conflicts: sets of requests that no schedule can meet together.
        steps: of the search.
    """

    met_at_least: int
    met_at_most: int
    best_on_grid: bool
    met: tuple[int, ...]
    schedule: tuple[Iteration, ...]
    conflicts: tuple[tuple[int, ...], ...]
    steps: int

    @property
    def settled(self) -> bool:
        """Whether the optimum is known."""
        return self.met_at_least == self.met_at_most

    def __str__(self) -> str:
        """Says what is known."""
        if self.settled:
            return f"{self.met_at_most}"
        return f"not settled: between {self.met_at_least} and {self.met_at_most}"


def clairvoyant_optimum(
    workload: Workload,
    timer: ProfileTimer,
    limits: EngineLimits,
    *,
    granularities_tokens: Sequence[int] = DEFAULT_GRANULARITIES,
    preempts: bool | None = None,
    max_steps: int = DEFAULT_STEPS,
) -> Optimum:
    """Returns the most requests that any schedule can meet, or bounds of it.

    Args:
        workload: up to 16 requests; an SLO of 0 is none.
        timer: times of iterations; nothing is added for the CPU.
        limits: of the engine.
        granularities_tokens: of chunks, tried in this order until the optimum is settled: finer ones bring the bounds
            closer together and take longer.
        preempts: see the module; None: as the limits require.
        max_steps: of each of the two searches of a granularity; what is known by then counts. A million steps take
            about 0.05 s.

    Complexity: at most 2**n sets for each granularity, each searched in at most prod(positions) states (see `search`).

    Raises:
        ValueError: too many requests or states, or a granularity below 1.
    """
    count = len(workload)
    if not 1 <= count <= MAX_REQUESTS:
        raise ValueError(f"{count} requests; the exact search takes 1 to {MAX_REQUESTS}, use upper_bound for more")
    if not granularities_tokens or min(granularities_tokens) < 1:
        raise ValueError(f"granularities {tuple(granularities_tokens)}; give at least one, of 1 token or more")
    if preempts is None:
        preempts = not _all_fit(workload, limits)
    problem = _Problem(workload, timer, limits, preempts, max_steps)
    # What no schedule can meet is a conflict at every granularity, and on every grid.
    conflicts: list[tuple[int, ...]] = [(row,) for row in range(count) if not _is_accepted(workload, row, limits)]
    at_most, steps, best_on_grid = count, 0, False
    rows: tuple[int, ...] = ()
    schedule: tuple[Iteration, ...] = ()
    for g in granularities_tokens:
        any_chunks = _Searcher(problem, g, exact=False)
        at_most = min(at_most, len(largest_feasible(count, any_chunks.test, conflicts).rows))
        on_grid = _Searcher(problem, g, exact=True)
        best = largest_feasible(count, on_grid.test, list(conflicts))
        found = best.rows if best.proven else on_grid.best_known()
        steps += any_chunks.steps + on_grid.steps
        if len(found) > len(rows) or not best_on_grid:
            best_on_grid = best.proven
        if len(found) > len(rows):
            rows, schedule = found, on_grid.schedule(found)
        if len(rows) == at_most:
            break
    return Optimum(len(rows), at_most, best_on_grid, rows, schedule, tuple(conflicts), steps)


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is searched for, and how long; see `clairvoyant_optimum`."""

    workload: Workload
    timer: ProfileTimer
    limits: EngineLimits
    preempts: bool
    max_steps: int


class _Searcher:
    """Tests sets of requests, on the grid (exact) or for any chunks, and remembers the answers."""

    def __init__(self, problem: _Problem, g: int, *, exact: bool) -> None:
        workload, timer, limits = problem.workload, problem.timer, problem.limits
        cheapest = cheapest_seconds(timer, limits)
        cover = cover_seconds(int(workload.prompt_tokens.sum() + workload.output_tokens.sum()), cheapest)
        self._tracks: list[Track] = tracks(workload, timer, cheapest, g, rounded_up=not exact)
        self._rules: Rules = make_rules(timer.model, cheapest, cover, limits, exact, problem.preempts and not exact)
        self._timer, self._max_steps = timer, problem.max_steps
        self._memory: Memory = make_memory()
        self._searches = 0
        self._ways: dict[tuple[int, ...], list[Ints]] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self.steps = 0

    def test(self, rows: tuple[int, ...]) -> int:
        """Returns INFEASIBLE, FEASIBLE or UNKNOWN."""
        if rows not in self._known:
            self._known[rows] = self._search(rows)
        return self._known[rows]

    def _search(self, rows: tuple[int, ...]) -> int:
        if any(self._tracks[row].must[0] < self._tracks[row].arrival for row in rows):
            return INFEASIBLE
        order = self._order(rows)
        tasks = make_tasks([self._tracks[row] for row in order])
        for dive, most_steps in ((True, DIVE_STEPS), (False, self._max_steps)):
            allowed = min(most_steps, self._max_steps - self.steps)
            if allowed <= 0:
                return UNKNOWN
            self._searches += 1
            result, taken = search(tasks, self._rules, self._memory, self._searches, dive, allowed)
            self.steps += taken
            if result != UNKNOWN:
                break
        if result == FEASIBLE:
            self._ways[rows] = way_to_goal(tasks, self._memory, self._searches)
        return int(result)

    def _order(self, rows: tuple[int, ...]) -> list[int]:
        """Returns the rows, the most urgent first, which is what a dive serves first."""
        return sorted(rows, key=lambda row: self._tracks[row].must[0])

    def best_known(self) -> tuple[int, ...]:
        """Returns the largest set that was found FEASIBLE; none: the empty one."""
        return max(self._ways, key=len, default=())

    def schedule(self, rows: tuple[int, ...]) -> tuple[Iteration, ...]:
        """Returns the iterations that meet a set that was found FEASIBLE, each as early as it can be."""
        if not rows:
            return ()
        order = self._order(rows)
        iterations, now = [], 0.0
        way = self._ways[rows]
        for before, after in pairwise(way):
            moved = [i for i in range(len(order)) if after[i] > before[i]]
            chosen = [self._tracks[order[i]] for i in moved]
            context = np.array([t.most[before[i]] for i, t in zip(moved, chosen, strict=True)], np.int64)
            reached = np.array([t.most[after[i]] for i, t in zip(moved, chosen, strict=True)], np.int64)
            chunk = reached - context
            start = max(now, *(t.arrival for t in chosen))
            now = start + self._timer.seconds(chunk, context, len(moved))
            batch = tuple((order[i], int(tokens)) for i, tokens in zip(moved, chunk, strict=True))
            iterations.append(Iteration(start, now, batch))
        return tuple(iterations)


def _is_accepted(workload: Workload, row: int, limits: EngineLimits) -> bool:
    """Says whether the engine takes a request at all."""
    longest = limits.kv_blocks * limits.kv_block_tokens
    if limits.max_model_tokens:
        longest = min(longest, limits.max_model_tokens)
    return bool(workload.prompt_tokens[row] + workload.output_tokens[row] <= longest)


def _all_fit(workload: Workload, limits: EngineLimits) -> bool:
    """Says whether all requests can run at once, so that no preemption is ever needed."""
    tokens = workload.prompt_tokens + workload.output_tokens
    blocks = sum(blocks_of(int(n), limits.kv_block_tokens) for n in tokens)
    return len(workload) <= limits.max_sequences and blocks <= limits.kv_blocks
