"""Makes runs in parallel, in a folder that keeps them, with progress over several parts and a time told beforehand."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.goodput.caps import Effort, Round
from evaluation.goodput.points import Point, RunKey
from evaluation.goodput.provenance import Provenance
from evaluation.goodput.run import begin
from evaluation.goodput.runner import Limit, estimated_capacity, run_point
from evaluation.goodput.store import read_points
from evaluation.goodput.sweep import Report, Sweep, worker_pool
from evaluation.goodput.task import Place, Search, run_search, stored_run

Say = Callable[[str], None]
"""Told, once, how long all of it will take."""

DEFAULT_CAP = 256
"""Cap of an iteration's tokens where no goodput run says which is best."""

LOOKS = 5.0
"""Whole runs that a search for a goodput makes, about; those that are ended early count for what they take."""

_PROBED = 100
_SEARCHED_LOAD, _RAN_LOAD = 0.2, 0.6
"""Loads to measure speed at: most of a search's time goes into low rates, where a request has iterations of its own."""

_SECONDS_PER_START = 6.0  # of a process, kernels in the cache


@dataclass(frozen=True, slots=True)
class Setup:
    """What every reproduction needs to know.

    Attributes:
        requests: of each run.
        seeds: how many.
        cap: of an iteration's tokens, where no goodput run in the folder says which is best.
        jobs: processes; 0: one for each core.
        data: folder of recorded traces.
    """

    profiles: tuple[str, ...]
    folder: Path
    requests: int
    seeds: int
    cap: int = DEFAULT_CAP
    jobs: int = 0
    data: Path | None = None

    @property
    def processes(self) -> int:
        """How many there will be."""
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(slots=True)
class Parts:
    """Tells progress over parts of different length, each of which tells its own from 0 to 1."""

    report: Report
    _start: float = field(default=0.0, init=False)
    _end: float = field(default=0.0, init=False)

    def begin(self, until: float) -> None:
        """Begins a part that ends at this share of the whole."""
        self._start, self._end = self._end, until

    def update(self, share: float, text: str) -> None:
        """Tells the share of this part that is done."""
        self.report(self._start + (self._end - self._start) * share, text)


class Runs:
    """Runs in a folder: those that are there are not made again. Use `opened`."""

    def __init__(self, setup: Setup, origin: Provenance, pool: ProcessPoolExecutor) -> None:
        self.setup, self.origin, self.pool = setup, origin, pool
        self.place = Place(setup.folder, data=setup.data)

    @property
    def seeds(self) -> range:
        """The seeds of all runs."""
        return range(self.setup.seeds)

    def make(self, keys: Sequence[RunKey], report: Report) -> dict[RunKey, Point]:
        """Makes runs to their end. Raises what `run_point` raises."""
        wanted = list(dict.fromkeys(keys))
        futures: dict[Future[Point], RunKey] = {
            self.pool.submit(stored_run, key, None, self.place): key for key in wanted
        }
        found: dict[RunKey, Point] = {}
        total = sum(key.requests for key in wanted) or 1
        done = 0
        for future in as_completed(futures):
            key = futures[future]
            found[key] = future.result()
            done += key.requests
            report(done / total, f"{key.workload} {key.policy}: {key.rate:g}/s, seed {key.seed}")
        return {key: found[key] for key in wanted}

    def search(self, profile: str, workload: str, policy: str, limit: float) -> float:
        """Returns the goodput of a policy with its cap in its text; requests/s, 0 where no rate meets the SLOs."""
        search = Search(profile, workload, policy, self.setup.requests, tuple(self.seeds), 1, Limit(limit))
        return self.pool.submit(run_search, search, self.place).result().goodput

    def missing(self, keys: Sequence[RunKey]) -> list[RunKey]:
        """Returns the runs that are not in the folder yet."""
        known = {point.key for point in read_points(self.setup.folder) if point.complete}
        return [key for key in dict.fromkeys(keys) if key not in known]


@contextmanager
def opened(setup: Setup, workloads: Sequence[str], policies: Sequence[str]) -> Iterator[Runs]:
    """Checks that everything can be run, claims the folder and starts processes.

    Raises:
        ProfileError, WorkloadError, TraceError, UnknownPolicyError, PolicyParameterError, StoreError: what they say.
    """
    sweep = Sweep(setup.profiles, tuple(workloads), tuple(policies), one_round(setup))
    origin = begin(sweep, setup.folder, setup.data)
    with worker_pool(setup.jobs) as pool:
        yield Runs(setup, origin, pool)


def one_round(setup: Setup) -> Effort:
    """Returns the effort of runs without any search."""
    return Effort((), (Round(setup.requests, tuple(range(setup.seeds)), 1, 1),))


@dataclass(slots=True)
class Work:
    """How many requests are to be run, by (profile, workload): in searches for a goodput, and at rates around it."""

    searched: dict[tuple[str, str], float] = field(default_factory=dict)
    ran: dict[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, policy: str, setup: Setup) -> float:
        """Returns about how long that takes, by one policy's speed on this machine as measured just now."""
        parts = ((_SEARCHED_LOAD, self.searched), (_RAN_LOAD, self.ran))
        work = sum(
            count * probed_seconds(*place, policy, load, setup.data)
            for load, requests in parts
            for place, count in requests.items()
            if count > 0
        )
        return work / setup.processes + _SECONDS_PER_START


def probed_seconds(profile: str, workload: str, policy: str, load: float, data: Path | None) -> float:
    """Returns the processor time of a request in a run at a share of the capacity, as measured just now; s."""
    rate = load * estimated_capacity(profile, workload, _PROBED, data)
    run_point(RunKey(profile, workload, policy, rate, 0, 5), None, data)  # compiles
    started = time.process_time()
    run_point(RunKey(profile, workload, policy, rate, 0, _PROBED), None, data)
    return (time.process_time() - started) / _PROBED


def how_long(seconds: float, setup: Setup) -> str:
    """Returns the sentence about it."""
    minutes = seconds / 60
    length = "less than a minute" if minutes < 1 else f"about {math.ceil(minutes)} minutes"
    processes = f"{setup.processes} process{'es' if setup.processes > 1 else ''}"
    return f"this takes {length} on {processes}; runs that are in {setup.folder} are not made again"
