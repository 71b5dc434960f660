"""A sweep: the goodput of policies x caps x workloads x profiles, spread over processes.

A cell is one policy on one workload and profile. Its caps go through rounds (see `caps`); the rounds of different cells
overlap, so that all processes have work. Results do not depend on how many there are.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from evaluation.goodput.caps import Effort, planned_requests, survivors
from evaluation.goodput.points import CAP_PARAMETER, with_cap
from evaluation.goodput.runner import FOLLOW, Limit
from evaluation.goodput.task import FINAL_LOWEST_LOAD, LOWEST_LOAD, Found, Place, Search, run_search
from sidecar.policies import registry

OVERLOADS = (1.5, 2.0)
"""Multiples of the goodput at which the best cap is run as well."""

Report = Callable[[float, str], None]
"""Told the share that is done, and what was just finished."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is compared: names as they are written on the command line. ``limit``: share of requests that may miss."""

    profiles: tuple[str, ...]
    workloads: tuple[str, ...]
    policies: tuple[str, ...]
    effort: Effort
    limit: float = 0.01
    overloads: tuple[float, ...] = OVERLOADS


@dataclass(slots=True)
class Cell:
    """One policy on one workload and profile, and what is known of its caps.

    Attributes:
        variant_of: the policy that this one counts as, where it is another only by its settings on this workload.
        screened: goodput by cap in the first round; empty for a policy without a cap.
        final: what the last round found, by cap (None: the policy has none, or one in its text).
    """

    profile: str
    workload: str
    policy: str
    caps: tuple[int, ...]
    variant_of: str = ""
    screened: dict[int, float] = field(default_factory=dict)
    final: dict[int | None, Found] = field(default_factory=dict)
    latest: dict[int, Found] = field(default_factory=dict)

    @property
    def family(self) -> tuple[str, str]:
        """The profile and what counts as the same policy on all workloads; they have one common cap."""
        return self.profile, self.variant_of or self.policy

    def text(self, cap: int | None) -> str:
        """Returns the policy's text with this cap."""
        return with_cap(self.policy, cap)

    @property
    def best(self) -> int | None:
        """The cap with the highest goodput; of equal ones the smaller."""
        return min(self.final, key=lambda cap: (-self.final[cap].goodput, cap or 0))

    @property
    def goodput(self) -> float:
        """Requests/s with the best cap."""
        return self.final[self.best].goodput


def has_cap(policy: str) -> bool:
    """Says whether a policy has a cap that its text leaves open; raises what `registry.find` raises."""
    name, parameters = registry.parse_spec(policy)
    known = {entry.name for entry in fields(registry.find(name).parameters)}
    return CAP_PARAMETER in known and CAP_PARAMETER not in parameters


def cells_of(sweep: Sweep, shard: tuple[int, int] | None = None) -> list[Cell]:
    """Returns the cells of a sweep; with a shard (k, n) every n-th, in the order of a digest of their names.

    So shards have as many cells as each other, give or take one, and each a mixture of workloads and policies.
    """
    cells = [
        Cell(profile, workload, policy, sweep.effort.caps if has_cap(policy) else ())
        for profile in sweep.profiles
        for workload in sweep.workloads
        for policy in sweep.policies
    ]
    if shard is None:
        return cells
    part, parts = shard
    mixed = sorted(cells, key=_digest)[part - 1 :: parts]
    return [cell for cell in cells if any(cell is chosen for chosen in mixed)]


def _digest(cell: Cell) -> str:
    return hashlib.sha256(f"{cell.profile}|{cell.workload}|{cell.policy}".encode()).hexdigest()


def search_cells(
    sweep: Sweep,
    cells: Sequence[Cell],
    place: Place,
    pool: ProcessPoolExecutor,
    report: Report = lambda share, text: None,
) -> None:
    """Fills in the cells: each policy's best cap, and the one that is best over all workloads.

    Raises what `run_point` raises. Every finished run is kept either way.
    """
    crew = _Crew(sweep, cells, place, pool, report)
    crew.search_all()
    crew.search_common_caps()


@contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Gives processes to run in, ``jobs`` or one for each core; an error or an interruption ends them at once.

    Ctrl-C reaches every process of a terminal; they leave it to this one, which then ends them. SIGTERM, which reaches
    only this one, interrupts it likewise.
    """
    context = multiprocessing.get_context("spawn")
    processes = jobs or len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(processes, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        with _interrupted_by_sigterm():
            yield pool
    except BaseException:
        workers = multiprocessing.active_children()
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()  # runs are written whole, so nothing finished is lost
        raise
    pool.shutdown()


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Crew:
    """Hands searches out and takes their results in, until every cell has its goodput."""

    def __init__(
        self, sweep: Sweep, cells: Sequence[Cell], place: Place, pool: ProcessPoolExecutor, report: Report
    ) -> None:
        self._sweep, self._cells, self._place, self._pool, self._report = sweep, cells, place, pool, report
        self._pending: dict[Future[Any], tuple[Cell, int | None, int]] = {}
        self._done = 0.0
        self._total = sum(planned_requests(sweep.effort, bool(cell.caps)) for cell in cells) or 1.0

    def search_all(self) -> None:
        """Takes every cell through its rounds."""
        for cell in self._cells:
            for cap in cell.caps or (None,):
                self._submit(cell, cap, 0 if cell.caps else len(self._sweep.effort.rounds) - 1)
        self._take_results()

    def search_common_caps(self) -> None:
        """Finds the one cap that does best over all workloads, and its goodput where it is not known yet."""
        for cells in self._by_policy().values():
            cap = common_cap(cells)
            for cell in cells if cap is not None else ():
                if cap not in cell.final:
                    self._submit(cell, cap, len(self._sweep.effort.rounds) - 1)
        self._take_results()

    def _by_policy(self) -> dict[tuple[str, str], list[Cell]]:
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in self._cells:
            groups.setdefault(cell.family, []).append(cell)
        return groups

    def _submit(self, cell: Cell, cap: int | None, number: int) -> None:
        entry = self._sweep.effort.rounds[number]
        is_final = number == len(self._sweep.effort.rounds) - 1
        before = None if cap is None else cell.latest.get(cap)
        search = Search(
            profile=cell.profile,
            workload=cell.workload,
            policy=cell.text(cap),
            requests=entry.requests,
            seeds=entry.seeds,
            resolution=entry.resolution,
            limit=Limit(self._sweep.limit, FOLLOW if is_final else 1.0),
            hint=None if before is None else before.bracket.meets,
            lowest_load=FINAL_LOWEST_LOAD if is_final else LOWEST_LOAD,
        )
        self._pending[self._pool.submit(run_search, search, self._place)] = (cell, cap, number)

    def _take_results(self) -> None:
        while self._pending:
            finished, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in finished:
                cell, cap, number = self._pending.pop(future)
                found: Found = future.result()
                self._take(cell, cap, number, found)
                self._done += self._sweep.effort.rounds[number].cost
                text = f"{cell.workload} {found.search.policy}: {found.goodput:g}/s, {found.search.requests} requests"
                self._report(min(0.99, self._done / self._total), text)

    def _take(self, cell: Cell, cap: int | None, number: int, found: Found) -> None:
        rounds = self._sweep.effort.rounds
        if cap is not None:
            cell.latest[cap] = found
            if number == 0:
                cell.screened[cap] = found.goodput
        if number == len(rounds) - 1:
            cell.final[cap] = found
            return
        if any(other is cell and at == number for other, _, at in self._pending.values()):
            return
        size = rounds[number].requests
        goodputs = {c: f.goodput for c, f in cell.latest.items() if f.search.requests == size}
        for cap_left in survivors(goodputs, rounds[number].keep):
            self._submit(cell, cap_left, number + 1)


def common_cap(cells: Sequence[Cell]) -> int | None:
    """Returns the cap whose geometric mean of goodputs over the cells' workloads is best in the first round."""
    shared = set.intersection(*(set(cell.screened) for cell in cells)) if cells else set()

    def mean(cap: int) -> float:
        return sum(math.log(max(cell.screened[cap], 1e-9)) for cell in cells)

    return min(shared, key=lambda cap: (-mean(cap), cap)) if shared else None


class Clock:
    """Tells how long is left, from the share that is done."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def left_seconds(self, share: float) -> float:
        """Returns the time left if the rest goes on as before; infinite before anything is done."""
        spent = time.monotonic() - self._started
        return spent * (1 - share) / share if share > 0 else math.inf
