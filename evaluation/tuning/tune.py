"""`slidingserve tune` from a request to an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_adapter.simulated.profiles import load_profile
from evaluation.goodput.caps import quick_effort
from evaluation.goodput.points import Point
from evaluation.goodput.provenance import claim, provenance
from evaluation.goodput.rates import step_at
from evaluation.goodput.run import check
from evaluation.goodput.runner import base_workload, estimated_capacity
from evaluation.goodput.sweep import Report, Sweep, worker_pool
from evaluation.goodput.task import Place
from evaluation.screen import slo_summary
from evaluation.tuning.answer import Answer, Contestant, Lead, Trial
from evaluation.tuning.cautions import cautions
from evaluation.tuning.race import Contender, Course, Race, Standings, effort_for
from evaluation.tuning.traffic import Traffic, claim_trace, traffic_of
from evaluation.workloads import WorkloadSpec
from slidingserve.contract.values import Floats

DEFAULT = "vllm"
"""What an engine does without a sidecar."""

CANDIDATES = (DEFAULT, "sarathi-edf", "qoserve", "slidingserve", "slidingserve+relegation")


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """What is asked for.

    Attributes:
        spec: the traffic, SLOs included.
        profile: the hardware.
        policies: candidates, as they are written on the command line; one without a cap is tried with each.
        results: folder that runs are kept in; the same request goes on from there.
        requests: most requests of each part; None: see `traffic_of`.
        limit: share of requests that may miss.
        minutes: time limit, about; 0: none.
        jobs: processes; 0: one for each core.
        data: folder of the recorded traces.
    """

    spec: WorkloadSpec
    profile: str
    results: Path
    policies: tuple[str, ...] = CANDIDATES
    requests: int | None = None
    limit: float = 0.01
    minutes: float = 0.0
    jobs: int = 0
    data: Path | None = None


def tune(request: TuneRequest, report: Report) -> Answer:
    """Chooses settings on one part of the traffic, and tests their promise on the other.

    Raises:
        ProfileError, WorkloadError, TraceError, UnknownPolicyError, PolicyParameterError, PolicySpecError,
        UnknownProfileError: what they say, before anything is run.
        StoreError: the folder holds results of other code, hardware or traffic, or cannot be written.
        KeyboardInterrupt: interrupted; the same request goes on where it stopped.
    """
    traffic = traffic_of(request.spec, request.requests, request.data)
    _check(request, traffic)
    origin = provenance((request.profile,))
    claim(request.results, origin)
    claim_trace(request.results, request.spec, request.data)
    most_tokens = load_profile(request.profile).max_tokens_per_iteration
    capacity = estimated_capacity(request.profile, traffic.tuning, min(600, traffic.tuning_requests), request.data)
    effort = effort_for(capacity)
    course = Course(request.profile, traffic, request.policies, DEFAULT, effort, request.limit, most_tokens)
    place = Place(request.results, data=request.data)
    with worker_pool(request.jobs) as pool:
        race = Race(course, place, pool, report, 60.0 * request.minutes)
        standings = race.run()
        best = standings.contenders[0]
        tested, at_promise = _test(race, standings, course)
    report(1.0, "done")
    workload = base_workload(request.profile, traffic.tuning, 0, traffic.tuning_requests, request.data)
    return Answer(
        profile=request.profile,
        traffic=traffic,
        slos=slo_summary(workload),
        least_ttft_seconds=_least(workload.ttft_slo_seconds),
        least_tbt_seconds=_least(workload.tbt_slo_seconds),
        limit=request.limit,
        best=_contestant(best),
        default=_contestant(standings.of(DEFAULT), best),
        others=tuple(_contestant(other, best) for other in standings.contenders[1:]),
        tested=tested,
        engines=_engines(traffic, best.promise.rate),
        warnings=tuple(cautions(standings, course, at_promise)),
        screened=standings.screened,
        left_out=standings.left_out,
        origin=origin,
    )


def _check(request: TuneRequest, traffic: Traffic) -> None:
    """Looks whether everything exists and the SLOs can be met at all."""
    for workload, requests in (
        (traffic.tuning, traffic.tuning_requests),
        (traffic.held_out, traffic.held_out_requests),
    ):
        check(Sweep((request.profile,), (workload,), request.policies, quick_effort(requests)), request.data)


def _test(race: Race, standings: Standings, course: Course) -> tuple[Trial | None, Point | None]:
    """Runs the promise over the part that is held out, the default at the same rate, and once over the tuning part."""
    best = standings.contenders[0]
    rate = best.promise.rate
    if rate <= 0:
        return None, None
    ours, default, tuned = race.make_runs(
        [
            race.held_out_key(best.policy, rate),
            race.held_out_key(course.default, rate),
            race.tuning_key(best.policy, rate),
        ]
    )
    held = ours.violation <= course.limit
    holds = rate if held else min(rate, race.search_held_out(best.policy, step_at(rate)).goodput)
    return Trial(ours.key.requests, ours.violation, held, default.violation, holds), tuned


def _contestant(contender: Contender, best: Contender | None = None) -> Contestant:
    made = contender.promise
    lead = None if best is None or best is contender else _lead(best.promise.samples, made.samples)
    return Contestant(
        contender.policy, made.rate, made.goodput, made.low, made.high, contender.climbed.lowest_rate, lead
    )


def _lead(ours: Floats, theirs: Floats) -> Lead:
    """Returns the lead in the same futures; unknown where the other has no goodput in some of the 95 %."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(theirs > 0, ours / theirs, math.inf) - 1.0
    low, median, high = np.percentile(ratio, [2.5, 50, 97.5], method="nearest").tolist()
    return Lead(*(value if math.isfinite(value) else None for value in (median, low, high)))


def _least(slo_seconds: Floats) -> float:
    """Returns the tightest SLO; one that no request has is a day, the most that a sidecar takes."""
    given = slo_seconds[slo_seconds > 0]
    return float(given.min()) if given.size else 86_400.0


def _engines(traffic: Traffic, rate: float) -> int | None:
    if traffic.recorded_rate is None or rate <= 0:
        return None
    return math.ceil(traffic.recorded_rate / rate - 1e-9)
