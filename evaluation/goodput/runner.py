"""Runs a policy at a rate, in this process, and ends early where the answer is known.

Workloads and profiles are kept from run to run: the requests of a seed are the same at every rate and for every policy,
only their arrival times are scaled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import HardwareProfile, load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.goodput.points import BLOCKS, Point, RunKey
from evaluation.goodput.rates import rounded
from evaluation.inprocess import open_policy
from evaluation.recording import RecordingSource
from evaluation.scores import Bools, missed_deadlines, score
from evaluation.simulate import engine_limits
from evaluation.workloads import Workload, WorkloadError, make_workload, parse_workload, solo_ttft
from slidingserve.contract.values import Floats

FOLLOW = 6.0
"""Runs that count are followed until they miss so many times the limit; beyond, they are of no use for intervals."""

_LOOK_EVERY = 256
"""Iterations between two looks at how many requests have missed."""

_DECODES_AT_ONCE = 48


def run_point(key: RunKey, allowed: int | None = None, data: Path | None = None) -> Point:
    """Makes one run; ends it once more than ``allowed`` requests have missed a deadline for certain.

    Raises:
        ProfileError, WorkloadError, TraceError: what they say.
        UnknownPolicyError, PolicyParameterError, DecisionRefused: the policy cannot be had.
    """
    profile = hardware(key.profile)
    workload = base_workload(key.profile, key.workload, key.seed, key.requests, data).at_rate(key.rate)
    source = opened_source(key)
    engine = SimulatedEngine(workload, engine_limits(profile), ProfileTimer(profile), source)
    started = time.perf_counter()
    while engine.step():
        if allowed is not None and engine.iterations % _LOOK_EVERY == 0 and engine.missed_deadlines() > allowed:
            return Point(key, False, engine.missed_deadlines(), wall_seconds=time.perf_counter() - started)
    return _point(key, workload, engine.outcome(), source, time.perf_counter() - started)


def opened_source(key: RunKey) -> RecordingSource:
    """Returns the policy of a run as an open source of decisions in this process; raises as `run_point`."""
    return RecordingSource(open_policy(key.policy, key.profile, engine_limits(hardware(key.profile))))


@lru_cache(maxsize=8)
def hardware(name: str) -> HardwareProfile:
    """Returns a profile, read once; raises ProfileError."""
    return load_profile(name)


@lru_cache(maxsize=12)
def base_workload(profile: str, workload: str, seed: int, requests: int, data: Path | None = None) -> Workload:
    """Returns the requests of a workload at 1 request/s; raises WorkloadError where a trace has fewer of them."""
    solo = partial(solo_ttft, ProfileTimer(hardware(profile)))
    spec = parse_workload(workload)
    work = make_workload(spec, rate=1.0, requests=requests, seed=seed, solo_ttft_seconds=solo, data=data)
    if len(work) < requests:
        raise WorkloadError(
            f"workload {workload!r} has only {len(work)} requests; ask for at most so many (--requests)"
        )
    return work


def estimated_capacity(profile: str, workload: str, requests: int, data: Path | None = None) -> float:
    """Returns about how many requests/s the hardware can serve at all, whatever the policy.

    One over the mean time that a request takes of a busy engine: its prompt in full chunks, and its share of iterations
    in which so many others decode. Only where to look first follows from it.
    """
    work = base_workload(profile, workload, 0, requests, data)
    timer = ProfileTimer(hardware(profile))
    context = int((work.prompt_tokens * work.output_tokens).sum() / work.output_tokens.sum())
    chunk, contexts = np.ones(_DECODES_AT_ONCE, np.int64), np.full(_DECODES_AT_ONCE, max(1, context), np.int64)
    token_seconds = timer.seconds(chunk, contexts, _DECODES_AT_ONCE) / _DECODES_AT_ONCE
    seconds = solo_ttft(timer, work.prompt_tokens).mean() + work.output_tokens.mean() * token_seconds
    return float(1.0 / seconds)


def _point(key: RunKey, workload: Workload, outcome: Outcome, source: RecordingSource, wall_seconds: float) -> Point:
    missed = missed_deadlines(workload, outcome)
    scores = score(workload, outcome)
    decisions = source.decision_seconds()
    error = source.mean_relative_error()
    blocks = np.array_split(missed, BLOCKS)
    return Point(
        key=key,
        complete=True,
        missed=int(missed.sum()),
        violations={
            "deadline": scores.violations.deadline,
            "gap": scores.violations.gap,
            "tpot": scores.violations.tpot,
        },
        class_violations=_by_class(workload, missed),
        ttft_quantiles=_quantiles(outcome.first_token_seconds - outcome.arrival_seconds),
        tbt_quantiles=_quantiles(outcome.token_gaps),
        missed_by_block=tuple(int(block.sum()) for block in blocks),
        block_sizes=tuple(block.size for block in blocks),
        decision_seconds=_tail(decisions),
        decision_share=float(decisions.sum() / source.busy_seconds) if source.busy_seconds > 0 else 0.0,
        prediction_error=None if np.isnan(error) else rounded(error),
        iterations=outcome.iterations,
        preemptions=outcome.preemptions,
        utilisation=rounded(min(1.0, source.busy_seconds / outcome.makespan_seconds)),
        wall_seconds=rounded(wall_seconds),
    )


def _by_class(workload: Workload, missed: Bools) -> Mapping[str, float]:
    shares = {}
    for index, name in enumerate(workload.class_names, start=1):
        of_class = missed[workload.class_index == index]
        if of_class.size:
            shares[name] = float(of_class.mean())
    return shares


def _quantiles(seconds: Floats) -> tuple[float, ...]:
    known = seconds[~np.isnan(seconds)]
    return tuple(rounded(value) for value in np.percentile(known, range(101)).tolist()) if known.size else ()


def _tail(seconds: Floats) -> Mapping[str, float]:
    if not seconds.size:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"p50": rounded(p50), "p99": rounded(p99)}


@dataclass(frozen=True, slots=True)
class Limit:
    """How many requests may miss, and how far beyond that a run is followed before it is ended."""

    share: float = 0.01
    follow: float = 1.0


def meets_at(run: Callable[[RunKey, int | None], Point], keys: tuple[RunKey, ...], limit: Limit) -> bool:
    """Says whether at most the allowed share of all requests of these runs (one for each seed) miss.

    The runs are made one after the other; once the answer is known no further run is made.
    """
    allowed = int(limit.share * sum(key.requests for key in keys) + 1e-9)
    missed = 0
    for key in keys:
        stop = (
            max(allowed - missed, int(limit.follow * limit.share * key.requests))
            if limit.follow > 1.0
            else allowed - missed
        )
        missed += run(key, stop).missed
        if missed > allowed:
            return False
    return True
