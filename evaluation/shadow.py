"""What would have been met: the sessions of journals as they went, and simulated under other policies.

The requests of each session (`shadow_reading`) are fed to the simulated engine with the session's limits; how long an
iteration takes, a latency model says. Simulated twice: under the policy that really decided, whose result must be near
to what happened or nothing of this is to be believed (the calibration), and under those that the reader asks about (the
forecast). All requests that got a token are load; scored are those that were followed from their arrival to their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.timing import ModelTimer
from evaluation.inprocess import InProcessSource
from evaluation.scores import Scores, score
from evaluation.shadow_reading import SessionRecord, ShadowError, read_session
from evaluation.workloads import Workload
from predictor.files import ModelError, load_model, model_names
from predictor.model import LatencyModel
from sidecar.policies import registry
from sidecar.session.machine import SessionDefaults
from sidecar.warming import warm_up
from slidingserve.contract.values import Mode, OpenSession

ENGINES_OWN = "vllm"
"""The policy of an engine that does not obey."""

TRUSTED_POINTS = 5.0
"""How far the calibration may be off, in percentage points of requests that met their deadlines."""

_MIXED = 0.05
_FEW_REQUESTS = 100

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Column:
    """One way that things went, or would have gone.

    ``policy`` is empty where it is what happened, or where each session has its own. ``role`` is ``actual``,
    ``calibration`` or ``forecast``; ``met_by_class`` the share of requests that met their deadlines, by class.
    """

    role: str
    policy: str
    scores: Scores
    met_by_class: dict[str, float]

    @property
    def met(self) -> float:
        """Share of the requests that met their SLOs by the deadline rule."""
        return 1.0 - self.scores.violations.deadline


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """The report.

    Attributes:
        sessions: what was read.
        models: version of the latency model of each session.
        columns: what happened, the calibration, the forecasts.
        requests: how many are scored.
        unfinished: how many are not, as they had not finished, or left without a token.
        unfollowed: how many are not, as some of their tokens came while nobody listened.
        warnings: in words, for people.
    """

    sessions: tuple[SessionRecord, ...]
    models: tuple[str, ...]
    columns: tuple[Column, ...]
    requests: int
    unfinished: int
    unfollowed: int
    warnings: tuple[str, ...]

    @property
    def calibration_points(self) -> float:
        """How far the simulation of what ran is off, in percentage points; positive: it met more."""
        actual, calibration = self.columns[0], self.columns[1]
        return 100 * (calibration.met - actual.met)

    @property
    def is_trusted(self) -> bool:
        """Whether the calibration is near enough."""
        return abs(self.calibration_points) <= TRUSTED_POINTS


def shadow_report(journals: Sequence[Path], policies: Sequence[str] = (), model: str | None = None) -> ShadowReport:
    """Reads journals and simulates their sessions.

    Args:
        journals: one or more, each simulated by itself and counted together.
        policies: to be forecast beside those of the sessions; ``name`` or ``name:key=value,key=value``.
        model: latency model for iteration times, and for what policies predict by that name none of their own; None:
            that of each session.

    Raises:
        JournalError, ShadowError: a journal cannot be used, or there is nothing to score.
        ModelError: there is no such model.
        UnknownPolicyError, PolicyParameterError, UnknownProfileError, PolicySpecError: a policy.
        PolicyCannotDecide, DecisionRefused: a policy fails.
    """
    for text in policies:
        name, parameters = registry.parse_spec(text)
        registry.parse_parameters(name, registry.find(name).parameters, parameters)
    read = [read_session(path) for path in journals]
    rows = np.concatenate([session.requests for session in read])
    counted = int(np.count_nonzero(rows["followed"] & rows["finished"]))
    if not counted:
        names = ", ".join(str(path) for path in journals)
        raise ShadowError(
            f"{names}: no request was followed from its arrival to its end; record longer, or give other journals"
        )
    sessions = tuple(session for session in read if _load(session).any())
    models = [_model(session, model) for session in sessions]
    report = ShadowReport(
        sessions,
        tuple(entry.version for entry in models),
        tuple(_columns(sessions, models, policies, model)),
        counted,
        int(np.count_nonzero(rows["followed"] & ~rows["finished"])),
        int(np.count_nonzero(~rows["followed"])),
        (),
    )
    return replace(report, warnings=tuple(_warnings(report)))


def _columns(
    sessions: Sequence[SessionRecord], models: Sequence[LatencyModel], policies: Sequence[str], given: str | None
) -> Iterable[Column]:
    """Yields what happened, what ran simulated, and each forecast."""

    def simulated(specs: Sequence[str]) -> list[Outcome]:
        entries = zip(sessions, specs, models, strict=True)
        return [_simulated(session, spec, timing, given) for session, spec, timing in entries]

    ran = [_ran(session) for session in sessions]
    common = ran[0] if len(set(ran)) == 1 else ""
    yield _column("actual", "", sessions, [_actual(session) for session in sessions])
    yield _column("calibration", common, sessions, simulated(ran))
    for text in _distinct([ENGINES_OWN, *(spec_of(session.opening) for session in sessions), *policies]):
        if text != common:
            yield _column("forecast", text, sessions, simulated([text] * len(sessions)))


def spec_of(opening: OpenSession) -> str:
    """Returns a session's policy as text: name or name:key=value,key=value."""
    parameters = ",".join(f"{name}={value}" for name, value in sorted(opening.policy_parameters.items()))
    return f"{opening.policy}:{parameters}" if parameters else opening.policy


def _ran(session: SessionRecord) -> str:
    """Returns the policy that really decided, most of the time."""
    return spec_of(session.opening) if session.was_active else ENGINES_OWN


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _model(session: SessionRecord, given: str | None) -> LatencyModel:
    """Returns the model of the session's iteration times."""
    if given is not None:
        return load_model(given)
    named = session.opening.policy_parameters.get("model") or session.opening.profile
    if not named:
        raise ShadowError(
            f"{session.path}: its session names no hardware profile, so nobody knows how long its iterations take; "
            f"give --model, one of {', '.join(model_names())} or a .json file"
        )
    try:
        return load_model(named)
    except ModelError as error:
        raise ShadowError(f"{session.path}: {error}, with --model") from error


def _load(session: SessionRecord) -> Bools:
    """Returns which requests took part in the session's load, bool[n]."""
    took_part: Bools = session.requests["output"] > 0
    return took_part


def _workload(session: SessionRecord) -> Workload:
    """Returns the session's load, with the first arrival at 0 s."""
    rows = session.requests[_load(session)]
    arrivals = rows["arrival"] - rows["arrival"][0]
    seconds = float(arrivals[-1])
    return Workload(
        name=session.path.name,
        arrival_seconds=arrivals,
        prompt_tokens=rows["prompt"].copy(),
        output_tokens=rows["output"].copy(),
        ttft_slo_seconds=rows["ttft"].copy(),
        tbt_slo_seconds=rows["tbt"].copy(),
        ttlt_slo_seconds=rows["ttlt"].copy(),
        class_index=rows["class_index"].copy(),
        class_names=session.class_names[1:],
        rate=(len(rows) - 1) / seconds if seconds > 0 else 0.0,
    )


def _actual(session: SessionRecord) -> Outcome:
    """Returns what happened to the session's load; seconds after the first arrival."""
    rows = session.requests[_load(session)]
    start = rows["arrival"][0]
    return Outcome(
        arrival_seconds=rows["arrival"] - start,
        first_token_seconds=rows["first"] - start,
        last_token_seconds=rows["last"] - start,
        output_tokens=rows["output"].copy(),
        deadline_missed=rows["late"].copy(),
        gap_missed=rows["gap_missed"].copy(),
        finished=rows["finished"].copy(),
        token_gaps=session.token_gaps,
        makespan_seconds=max(session.last_seconds - session.first_seconds, 1e-9),
    )


def _simulated(session: SessionRecord, policy: str, model: LatencyModel, given: str | None) -> Outcome:
    """Returns what happens to the session's load under a policy."""
    opening = _opening(session, policy, given)
    warm_up(SessionDefaults(opening.policy, dict(opening.policy_parameters), profile=opening.profile))
    source = InProcessSource()
    source.open(opening)
    engine = SimulatedEngine(
        _workload(session),
        opening.limits,
        ModelTimer(model),
        source,
        cpu_seconds_per_iteration=session.overhead_seconds,
    )
    return engine.run()


def _opening(session: SessionRecord, policy: str, given: str | None) -> OpenSession:
    """Returns how the simulated session opens: as the real one, with the policy and the model that are asked for."""
    name, parameters = registry.parse_spec(policy)
    profile = session.opening.profile
    if given is not None and "model" not in parameters:
        profile = given if given in model_names() else ""
        if not profile and "model" in {entry.name for entry in fields(registry.find(name).parameters)}:
            parameters = {**parameters, "model": given}
    elif given is not None:
        profile = ""
    return replace(session.opening, policy=name, policy_parameters=parameters, profile=profile, mode=Mode.ACTIVE)


def _column(role: str, policy: str, sessions: Sequence[SessionRecord], outcomes: Sequence[Outcome]) -> Column:
    """Scores one way of all sessions together."""
    workloads = [_workload(session) for session in sessions]
    scored = [session.scored[_load(session)] for session in sessions]
    classes = [np.array(session.class_names)[session.requests["class_index"][_load(session)]] for session in sessions]
    by_class = {}
    for name in sorted(set(np.concatenate([of[mask] for of, mask in zip(classes, scored, strict=True)]).tolist())):
        part = [mask & (of == name) for of, mask in zip(classes, scored, strict=True)]
        by_class[name] = 1.0 - score(*_together(workloads, outcomes, part)).violations.deadline
    return Column(role, policy, score(*_together(workloads, outcomes, scored)), by_class)


def _together(
    workloads: Sequence[Workload], outcomes: Sequence[Outcome], masks: Sequence[Bools]
) -> tuple[Workload, Outcome]:
    """Returns the chosen requests of several sessions as one run; gaps between tokens are those of all requests."""
    first, begun = workloads[0], outcomes[0]

    def chosen(parts: Sequence[Any], name: str) -> Any:
        return np.concatenate([getattr(part, name)[mask] for part, mask in zip(parts, masks, strict=True)])

    per_request = [entry.name for entry in fields(Workload) if isinstance(getattr(first, entry.name), np.ndarray)]
    workload = replace(first, **{name: chosen(workloads, name) for name in per_request})
    columns = [entry.name for entry in fields(Outcome) if isinstance(getattr(begun, entry.name), np.ndarray)]
    columns.remove("token_gaps")
    outcome = replace(
        begun,
        **{name: chosen(outcomes, name) for name in columns},
        token_gaps=np.concatenate([part.token_gaps for part in outcomes]),
        makespan_seconds=math.fsum(part.makespan_seconds for part in outcomes),
    )
    return workload, outcome


def _warnings(report: ShadowReport) -> Iterable[str]:
    """Yields what a reader has to know before believing the report."""
    if not report.is_trusted:
        yield (
            f"the simulation is off by {report.calibration_points:+.1f} points for what really ran: do not trust the "
            "forecast. Fit a latency model to this engine and give it with --model"
        )
    for session in report.sessions:
        modes = session.decisions.modes
        share = modes[Mode.ACTIVE] / max(1, modes.total())
        if _MIXED < share < 1 - _MIXED:
            yield (
                f"{session.path.name}: its engine obeyed in {100 * share:.0f} % of the iterations, so what happened is "
                "no single policy's; record one mode at a time"
            )
    if report.requests < _FEW_REQUESTS:
        yield f"only {report.requests} requests: each is worth {100 / report.requests:.1f} points; record longer"
    left_out = report.unfinished + report.unfollowed
    if left_out > report.requests:
        yield f"{left_out} requests were left out, more than were counted; record longer, or whole sessions"
