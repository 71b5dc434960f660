"""What deciding costs: real time of each component of the decision core, and of the way to a sidecar and back.

Each policy decides for one simulated engine, in this process and in a sidecar of its own over a Unix socket. Times are
those of a clock, so they are at least the processor's; they are set against the durations of the iterations decided,
which are the profile's. The paper gives no such figures; the limit of 5 % is this project's own.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_adapter.client import ClientSettings, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.timing import ProfileTimer
from engine_adapter.source import DecisionSource
from evaluation.goodput.run import begin
from evaluation.goodput.runner import base_workload, estimated_capacity, hardware
from evaluation.goodput.sweep import Report, Sweep
from evaluation.inprocess import InProcessSource
from evaluation.recording import RecordingSource
from evaluation.reproduce import paper
from evaluation.reproduce.choice import Chosen, chosen
from evaluation.reproduce.paper import OVERHEAD_LIMIT
from evaluation.reproduce.result import Claim, Reproduced, percent, table
from evaluation.reproduce.runs import Setup, one_round
from evaluation.reproduce.verdicts import Gain, Verdict
from evaluation.sidecar_process import SidecarProcess
from evaluation.simulate import NoDecision, drive, engine_limits, open_client
from predictor.counters import ErrorSummary
from sidecar.policies import registry
from sidecar.session.machine import SessionDefaults
from sidecar.warming import warm_up
from slidingserve.contract.values import BatchAllocation, Floats, OpenSession, SessionOpened, Snapshot, Step

WORKLOAD = "mixed-v1"
USUAL_LOAD = 0.6
"""Share of the estimated capacity to run at, where no goodput run tells a goodput."""

CORE = ("mirror", "policy", "guard")
"""The components of the decision core: its copy of the queues, the policy, and what holds plans against limits."""

COMPONENTS = ("decode", *CORE, "round trip")
"""Decode and round trip only over the wire; the latter is all that the engine waits for: codec, socket, the core."""

INPROCESS, WIRE = TRANSPORTS = ("inprocess", "grpc")


class PhaseRecorder:
    """Passes everything on to another source, and keeps for each decision what it took, and its iteration."""

    def __init__(self, source: DecisionSource) -> None:
        self._source = source
        self._seconds = {name: array("d") for name in COMPONENTS}
        self._iteration_seconds = array("d")

    def open(self, message: OpenSession) -> SessionOpened:
        """See `DecisionSource.open`."""
        return self._source.open(message)

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        """See `DecisionSource.decide`."""
        self._iteration_seconds.append(step.iteration.last_iteration_seconds)
        started = time.perf_counter()
        allocation = self._source.decide(step, snapshot)
        waited = time.perf_counter() - started
        timings = None if allocation is None else allocation.phase_timings
        if timings is None:
            raise NoDecision("an iteration was left undecided, so there is no time to tell; see the warnings above")
        for name, seconds in zip(COMPONENTS, (*timings, waited), strict=True):
            self._seconds[name].append(seconds)
        return allocation

    def close(self) -> None:
        """See `DecisionSource.close`."""
        self._source.close()

    def seconds(self) -> dict[str, Floats]:
        """Returns the seconds of each component in each decision, and those of its iteration (``iteration``).

        The last decision is left out: how long its iteration took is not told any more.
        """
        columns = {name: np.array(values)[:-1] for name, values in self._seconds.items()}
        return {**columns, "iteration": np.array(self._iteration_seconds)[1:]}


@dataclass(frozen=True, slots=True)
class Component:
    """Seconds of a component by quantile, and its share of the iterations: of all time, and the 99th percentile."""

    name: str
    p50_seconds: float
    p99_seconds: float
    share: float
    p99_share: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What one policy's decisions cost over one transport; ``components`` ends with what counts as the whole."""

    profile: str
    policy: Chosen
    transport: str
    rate: float
    iterations: int
    components: tuple[Component, ...]
    prediction: ErrorSummary

    @property
    def whole(self) -> Component:
        """The core in this process, or with what it takes to read the message over the wire."""
        return self.components[-1]


def reproduce_overhead(setup: Setup, policies: Sequence[str], report: Report) -> Reproduced:
    """Runs each policy once over each transport, one after the other.

    Raises:
        ProfileError, WorkloadError, UnknownPolicyError, PolicyParameterError, StoreError: what they say.
        SidecarFailed, ClientError, NoDecision, DecisionRefused: a decision could not be had.
    """
    sweep = Sweep(setup.profiles, (WORKLOAD,), tuple(policies), one_round(setup))
    origin = begin(sweep, setup.folder, setup.data)
    costs: list[Cost] = []
    total = len(setup.profiles) * len(policies) * len(TRANSPORTS)
    for profile in setup.profiles:
        known = chosen(setup.folder, profile, WORKLOAD, policies, 0)
        settings = [one if one.goodput is not None else Chosen(one.policy, one.policy) for one in known]
        rate = max((one.goodput or 0.0 for one in settings), default=0.0)
        rate = rate or float(f"{USUAL_LOAD * estimated_capacity(profile, WORKLOAD, setup.requests):.3g}")
        for one in settings:
            for transport in TRANSPORTS:
                done = len(costs)

                def watched(finished: int, of: int, done: int = done, text: str = f"{one.text}, {transport}") -> None:
                    report((done + finished / of) / total, text)

                costs.append(measure(profile, one, transport, rate, setup.requests, watched))
    return _compare(setup, origin, costs)


def measure(
    profile: str, policy: Chosen, transport: str, rate: float, requests: int, watched: Callable[[int, int], None]
) -> Cost:
    """Runs a policy and returns what its decisions cost. Raises what `reproduce_overhead` does."""
    known = hardware(profile)
    limits = engine_limits(known)
    name, parameters = registry.parse_spec(policy.text)
    opening = OpenSession(limits, policy=name, policy_parameters=parameters, profile=profile)
    workload = base_workload(profile, WORKLOAD, 0, requests).at_rate(rate)
    with _source(opening, policy.text, transport) as source:
        errors = RecordingSource(source)
        recorder = PhaseRecorder(errors)
        drive(SimulatedEngine(workload, limits, ProfileTimer(known), recorder), requests, watched)
    seconds = recorder.seconds()
    parts = components_of(seconds, transport)
    return Cost(profile, policy, transport, rate, seconds["iteration"].size, parts, errors.prediction_errors.summary())


@contextmanager
def _source(opening: OpenSession, policy: str, transport: str) -> Iterator[DecisionSource]:
    """Gives an open source: the core in this process, or a sidecar."""
    if transport == INPROCESS:
        warm_up(SessionDefaults(opening.policy, dict(opening.policy_parameters), profile=opening.profile))
        core = InProcessSource()
        core.open(opening)
        yield core
        return
    with SidecarProcess(("--policy", policy, "--profile", opening.profile)) as sidecar:
        client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None))
        try:
            open_client(client, opening, sidecar)
            yield client
        finally:
            client.close()


def components_of(seconds: dict[str, Floats], transport: str) -> tuple[Component, ...]:
    """Returns the rows of a table, the last of which is the whole."""
    core = np.sum([seconds[name] for name in CORE], axis=0)
    if transport == INPROCESS:
        columns = {name: seconds[name] for name in CORE} | {"core": core}
    else:
        decode = seconds["decode"]
        columns = {"round trip": seconds["round trip"], "decode": decode, "core": core, "decode + core": decode + core}
    return tuple(component(name, values, seconds["iteration"]) for name, values in columns.items())


def component(name: str, seconds: Floats, iteration_seconds: Floats) -> Component:
    """Returns the quantiles and shares of one component; float64[n] each, in the same order."""
    took = iteration_seconds > 0.0  # nothing was computed in the others
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    shares = seconds[took] / iteration_seconds[took]
    share = float(seconds.sum() / iteration_seconds.sum())
    return Component(name, p50, p99, share, float(np.percentile(shares, 99)))


def judge_share(whole: Component) -> Verdict:
    """Returns the verdict: below the limit over all, and in 99 of 100 iterations (else in part)."""
    if whole.share >= OVERHEAD_LIMIT:
        return Verdict.FAILS
    return Verdict.HOLDS if whole.p99_share < OVERHEAD_LIMIT else Verdict.IN_PART


def _compare(setup: Setup, origin: Any, costs: Sequence[Cost]) -> Reproduced:
    claims = tuple(
        Claim(
            cost.profile,
            cost.policy.text,
            f"{cost.whole.name} ({cost.transport}) below {100 * OVERHEAD_LIMIT:g} % of an iteration",
            "bound",
            judge_share(cost.whole),
            Gain(cost.whole.share),
        )
        for cost in costs
    )
    tables = [_table(profile, [cost for cost in costs if cost.profile == profile]) for profile in setup.profiles]
    return Reproduced(
        name="overhead",
        origin=origin,
        settings={"workload": WORKLOAD, "requests": setup.requests, "limit": OVERHEAD_LIMIT},
        tables=tuple(tables),
        claims=claims,
        sentences=tuple(_sentences(costs, claims)),
        notes=(
            "times are by the clock of a machine that may do other things, so p99 is an upper bound. The paper gives "
            "no decision times; the limit is this project's.",
            "a round trip is codec, socket and sidecar; an engine that asks while an iteration runs waits for none of "
            "it.",
        ),
        figures=tuple(row for cost in costs for row in _figures(cost)),
    )


def _table(profile: str, costs: Sequence[Cost]) -> str:
    rows = []
    for cost in costs:
        for part in cost.components:
            first = part is cost.components[0]
            rows.append(
                (
                    cost.policy.text if first else "",
                    cost.transport if first else "",
                    part.name,
                    f"{1e6 * part.p50_seconds:.1f}",
                    f"{1e6 * part.p99_seconds:.1f}",
                    f"{100 * part.share:.3f} %",
                    f"{100 * part.p99_share:.2f} %",
                )
            )
    title = f"Time of a decision in microseconds, {WORKLOAD} at {costs[0].rate:.3g}/s on {profile}"
    header = ("policy", "transport", "component", "p50", "p99", "of all iterations", "of one, p99")
    return table(title, header, rows)


def _sentences(costs: Sequence[Cost], claims: Sequence[Claim]) -> Iterator[str]:
    for transport in TRANSPORTS:
        mine = [(cost, claim) for cost, claim in zip(costs, claims, strict=True) if cost.transport == transport]
        worst, _ = max(mine, key=lambda pair: pair[0].whole.share)
        fine = all(claim.verdict is not Verdict.FAILS for _, claim in mine)
        where = "In one process" if transport == INPROCESS else "In a sidecar"
        yield (
            f"{where} deciding {'stays' if fine else 'does not stay'} below {100 * OVERHEAD_LIMIT:g} % of the "
            f"iterations for {'every policy' if fine else 'some policies'}; the most is {percent(worst.whole.share)} "
            f"({worst.policy.text} on {worst.profile}), and in one of 100 iterations at least "
            f"{percent(max(cost.whole.p99_share for cost, _ in mine))}."
        )
    for cost in costs:
        if cost.transport == WIRE:
            trip = cost.components[0]
            yield (
                f"{cost.policy.text} on {cost.profile}: an engine that asks a sidecar and waits, waits "
                f"{1e6 * trip.p50_seconds:.0f} us (median), {percent(trip.share)} of all iterations together."
            )
    for cost in costs:
        errors = cost.prediction
        if cost.transport == INPROCESS and errors.iterations:
            published = paper.PREDICTOR.get(cost.profile)
            theirs = "" if published is None else f" (the paper's predictor: {1e3 * published.mae_seconds:.2f} ms)"
            yield (
                f"{cost.policy.text} on {cost.profile} predicts iterations with a mean absolute error of "
                f"{1e3 * errors.mae_seconds:.2f} ms{theirs}, {percent(errors.mape)} of their time."
            )


def _figures(cost: Cost) -> list[dict[str, Any]]:
    return [
        {
            "profile": cost.profile,
            "policy": cost.policy.policy,
            "text": cost.policy.text,
            "transport": cost.transport,
            "rate": cost.rate,
            "iterations": cost.iterations,
            "component": part.name,
            "p50_seconds": part.p50_seconds,
            "p99_seconds": part.p99_seconds,
            "share": part.share,
            "p99_share": part.p99_share,
            "prediction_mae_seconds": cost.prediction.mae_seconds,
        }
        for part in cost.components
    ]
