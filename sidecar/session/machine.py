"""The protocol as a state machine without I/O: one message in, one answer out.

    state           OpenSession      Snapshot            Step
    NEW             open -> SYNCED   out of turn         out of turn
    SYNCED          out of turn      restore -> SYNCED   decide -> SYNCED; not the expected one -> LOST, resync required
    LOST            out of turn      restore -> SYNCED   resync required

A refused message changes nothing in the mirror. After a refused Step or Snapshot the engine has gone on with its own
policy, so the mirror is wrong whatever it holds: the session is LOST and only a Snapshot leads back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Protocol

import numpy as np

from predictor.counters import ErrorCounters
from sidecar.guard import enforce_limits
from sidecar.policies import registry
from sidecar.policies.base import Plan, Policy, PolicyContext
from sidecar.queues import FREE, Queues
from sidecar.session import checks
from sidecar.session.mirror import Mirror
from sidecar.session.refusal import Refusal
from slidingserve import __version__
from slidingserve.contract.values import (
    NO_INTS,
    PROTOCOL_VERSION,
    BatchAllocation,
    ErrorReason,
    Ints,
    IterationState,
    Mode,
    OpenSession,
    PauseState,
    PhaseTimings,
    Request,
    Response,
    ResyncReason,
    ResyncRequired,
    SessionOpened,
    SloDefaults,
    Snapshot,
    Step,
)


class State(IntEnum):
    """Where a session stands; an IntEnum, as it hashes three times as fast as an Enum."""

    NEW = auto()
    SYNCED = auto()
    LOST = auto()


# A look-up of an enum's member costs 0.2 us, several times in each decision.
_OFF, _PAUSED_ALL = Mode.OFF, PauseState.PAUSED_ALL

# Paths that are counted each by itself; a policy may make up new ones for ever.
_MOST_PATHS = 64
_OTHER_PATHS = "other"


@dataclass(frozen=True, slots=True)
class SessionDefaults:
    """What the sidecar decides where a session leaves it open.

    Attributes:
        policy: name of the policy.
        policy_parameters: its settings, as text; used only where the session names no policy.
        slos: SLOs in seconds for requests for which neither they nor their session bring any.
        profile: hardware profile or model for the predictor.
        mode: what sessions open in, whatever they ask for; UNSPECIFIED: as they ask.
    """

    policy: str = "vllm"
    policy_parameters: dict[str, str] = field(default_factory=dict)
    slos: SloDefaults = field(default_factory=lambda: SloDefaults(1.0, 0.05))
    profile: str = ""
    mode: Mode = Mode.UNSPECIFIED


class PolicyBuilder(Protocol):
    """Builds a session's policy; `registry.build` is the one in use."""

    def __call__(self, name: str, parameters: dict[str, str], context: PolicyContext) -> Policy:
        """Raises as `registry.build` does."""


class Session:
    """One engine's session.

    Args:
        name: names the session in answers, logs and journals.
        defaults: see `SessionDefaults`.
        build_policy: see `PolicyBuilder`.
        clock: seconds, for phase timings only; no decision depends on it.

    Attributes:
        mode: how far the engine is to obey; before the session opens, what it will open in (UNSPECIFIED: as it asks).
        opening: what the engine opened the session with; None before.
        opened: what was answered to that; None before.
        guarded: plan rows that the guard had to change.
        answered: messages that were answered with an allocation.
        paths: decisions by their path through the policy.
    """

    def __init__(
        self,
        name: str = "",
        defaults: SessionDefaults | None = None,
        build_policy: PolicyBuilder = registry.build,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.state = State.NEW
        self.draining = False
        self.failure: BaseException | None = None  # what was behind the last refusal, if it was not the message
        self.guarded = 0
        self.answered = 0
        self.paths: dict[str, int] = {}
        self.opening: OpenSession | None = None
        self.opened: SessionOpened | None = None
        self._defaults = defaults or SessionDefaults()
        self.mode = self._defaults.mode
        self._build_policy = build_policy
        self._clock = clock
        self._epoch = 0
        self._next_step = 0
        self._now_seconds = 0.0
        self._decisions = 0
        self._cut = False  # the guard changed the last plan

    def handle(self, message: Request | None) -> Response:
        """Returns the answer to one message; None is a message that holds nothing. Never raises `Refusal`.

        Time: that of the policy, plus linear in what the message and the batch hold.
        """
        transition = _TRANSITIONS[self.state].get(type(message), Session._out_of_turn)
        try:
            return transition(self, message)
        except Refusal as refusal:
            self.failure = refusal.__cause__
            if isinstance(message, Step | Snapshot):
                self.lose()
                return refusal.as_error(message.iteration.epoch, message.iteration.step)
            return refusal.as_error()

    def lose(self) -> None:
        """Makes the session ask for a snapshot, after a failure that left its mirror in doubt."""
        if self.state is State.SYNCED:
            self.state = State.LOST

    def switch_mode(self, mode: Mode) -> Mode:
        """Makes the engine obey so far from the next answer on; returns the mode before.

        A session that is not open yet will open in it. The mirror follows the engine in each mode, so every switch is
        possible at any time and needs no snapshot.
        """
        old, self.mode = self.mode, mode
        return old

    @property
    def last_step(self) -> int:
        """Number of the step that was answered last; 0 if none was."""
        return max(0, self._next_step - 1)

    @property
    def mirror(self) -> Mirror:
        """The mirror of the engine's queues; there is one once the session is open."""
        return self._mirror

    @property
    def prediction_errors(self) -> ErrorCounters | None:
        """How far the policy's predictions were off; None if it predicts nothing."""
        errors = getattr(self._policy, "prediction_errors", None) if self.state is not State.NEW else None
        return errors if isinstance(errors, ErrorCounters) else None

    def _open(self, message: OpenSession) -> SessionOpened:
        checks.check_open(message)
        policy_name = message.policy or self._defaults.policy
        own = dict(message.policy_parameters)
        parameters = own if message.policy else {**self._defaults.policy_parameters, **own}
        context = PolicyContext(message.limits, message.profile or self._defaults.profile)
        self._policy = self._policy_named(policy_name, parameters, context)
        self._versions = (self._policy.version, self._policy.model_version)
        slos = fill_slos(message.slo_defaults, self._defaults.slos)
        self._limits = limits = message.limits
        self._bounds = (limits.max_tokens_per_iteration, limits.max_sequences, limits.kv_block_tokens)
        self._mirror = Mirror(message.limits, slos)
        self._plan = Plan(self._mirror.queues.capacity)
        self.mode = self.mode or message.mode or Mode.ACTIVE  # UNSPECIFIED is 0
        self.state = State.SYNCED
        self.opening = message
        self.opened = SessionOpened(
            session=self.name,
            protocol_version=PROTOCOL_VERSION,
            sidecar_version=__version__,
            policy=policy_name,
            policy_version=self._policy.version,
            model_version=self._policy.model_version,
            limits=message.limits,
            slo_defaults=slos,
            mode=self.mode,
        )
        return self.opened

    def _policy_named(self, name: str, parameters: dict[str, str], context: PolicyContext) -> Policy:
        try:
            return self._build_policy(name, parameters, context)
        except registry.UnknownPolicyError as error:
            raise Refusal(ErrorReason.UNKNOWN_POLICY, "open_session.policy", name, str(error)) from error
        except registry.UnknownProfileError as error:
            raise Refusal(ErrorReason.UNKNOWN_PROFILE, "open_session.profile", context.profile, str(error)) from error
        except registry.PolicyParameterError as error:
            raise Refusal(
                ErrorReason.INVALID_POLICY_PARAMETER,
                f"open_session.policy_parameters[{error.name!r}]",
                error.value,
                error.remedy,
            ) from error

    def _step(self, message: Step) -> BatchAllocation | ResyncRequired:
        iteration = message.iteration
        if iteration.epoch != self._epoch or iteration.step != self._next_step:
            self.state = State.LOST
            wrong_epoch = iteration.epoch != self._epoch
            return self._resync(iteration, ResyncReason.EPOCH_MISMATCH if wrong_epoch else ResyncReason.STEP_MISMATCH)
        started = self._clock()
        checks.check_iteration(iteration, "step.iteration", self._limits, self._now_seconds)
        self._mirror.update(message, self._plan)
        return self._decide(iteration, started, message.applied_exactly and not self._cut)

    def _restore(self, message: Snapshot) -> BatchAllocation:
        iteration = message.iteration
        started = self._clock()
        checks.check_numbers(iteration, "snapshot.iteration", self._epoch)
        checks.check_iteration(iteration, "snapshot.iteration", self._limits, 0.0)
        self._mirror.restore(message)
        self._epoch = iteration.epoch
        self.state = State.SYNCED
        return self._decide(iteration, started, executed=False)

    def _resync_after_error(self, message: Step) -> ResyncRequired:
        return self._resync(message.iteration, ResyncReason.AFTER_ERROR)

    def _resync(self, iteration: IterationState, reason: ResyncReason) -> ResyncRequired:
        text = (
            f"step {iteration.step} of epoch {iteration.epoch} does not follow; expected was step {self._next_step} of "
            f"epoch {self._epoch}; send a Snapshot with an epoch above {self._epoch}"
        )
        return ResyncRequired(iteration.epoch, iteration.step, reason, self._epoch, self._next_step, text)

    def _out_of_turn(self, message: Request | None) -> Response:
        kind = _FIELD_NAMES.get(type(message), "")
        if not kind:
            raise Refusal(ErrorReason.INVALID_FIELD, "payload", "nothing", "set one field of ScheduleRequest.payload")
        remedy = (
            "send open_session first"
            if self.state is State.NEW
            else "the session is open; close the stream to start anew"
        )
        raise Refusal(ErrorReason.OUT_OF_TURN, "payload", kind, remedy)

    def _decide(self, iteration: IterationState, started: float, executed: bool) -> BatchAllocation:
        queues = self._mirror.queues
        plan = self._plan
        if len(plan.entries) != len(queues.requests):
            plan = self._plan = Plan(queues.capacity)
        plan.clear()
        plan.executed = executed
        mirrored = self._clock()
        if self.mode is not _OFF and iteration.pause_state is not _PAUSED_ALL:
            try:
                self._policy.decide(queues, iteration, plan)
            except Exception as error:
                plan.clear()
                remedy = (
                    f"policy {self._policy.version!r} failed ({error!r}); this is a mistake of the policy, report it"
                )
                raise Refusal(ErrorReason.INTERNAL, "", "", remedy) from error
            decided = self._clock()
            handles, tokens, victims = self._guard(iteration)
            self._count_path(plan.path)
        else:
            decided = mirrored
            handles = tokens = victims = NO_INTS
        self.answered += 1
        self._next_step = iteration.step + 1
        self._now_seconds = iteration.now_seconds
        return BatchAllocation(
            iteration.epoch,
            iteration.step,
            handles,
            tokens,
            victims,
            live_handles(queues, plan.demoted[: plan.demoted_count]) if plan.demoted_count > 0 else NO_INTS,
            plan.predicted_seconds if 0.0 <= plan.predicted_seconds <= checks.LARGEST_SECONDS else 0.0,
            *self._versions,
            plan.path,
            self.mode,
            PhaseTimings(0.0, mirrored - started, decided - mirrored, self._clock() - decided),
            self.draining,
        )

    def _count_path(self, path: str) -> None:
        try:
            self.paths[path] += 1
        except KeyError:
            known = path if len(self.paths) < _MOST_PATHS else _OTHER_PATHS
            self.paths[known] = self.paths.get(known, 0) + 1

    def _guard(self, iteration: IterationState) -> tuple[Ints, Ints, Ints]:
        """Holds the plan against the limits; returns handles and tokens of the batch, and the victims' handles."""
        plan = self._plan
        count, victim_count = plan.count, plan.victim_count
        size = len(plan.entries)
        if not (0 <= count <= size and 0 <= victim_count <= size):  # kernels do not check bounds
            count, victim_count = max(0, min(count, size)), max(0, min(victim_count, size))
        handles = np.empty(count, np.int64)
        tokens = np.empty(count, np.int64)
        victims = np.empty(victim_count, np.int64) if victim_count else NO_INTS
        self._decisions += 1
        plan.count, plan.victim_count, changed = enforce_limits(
            *self._mirror.queues.arrays,
            plan.entries,
            count,
            plan.victims,
            victim_count,
            handles,
            tokens,
            victims,
            self._decisions,
            iteration.free_kv_blocks,
            iteration.may_admit,
            *self._bounds,
        )
        self._cut = changed > 0
        if not changed:
            return handles, tokens, victims
        self.guarded += changed
        return handles[: plan.count].copy(), tokens[: plan.count].copy(), victims[: plan.victim_count].copy()


def live_handles(queues: Queues, slots: Ints) -> Ints:
    """Returns the handles of those slots that hold a request. Linear in ``slots``."""
    inside = slots[(slots >= 0) & (slots < queues.capacity)]
    handles: Ints = queues.requests["handle"][inside[queues.requests["state"][inside] != FREE]]
    return handles


def fill_slos(own: SloDefaults, default: SloDefaults) -> SloDefaults:
    """Returns ``own`` with each SLO that is 0 taken from ``default``."""
    return replace(
        own,
        ttft_slo_seconds=own.ttft_slo_seconds or default.ttft_slo_seconds,
        tbt_slo_seconds=own.tbt_slo_seconds or default.tbt_slo_seconds,
        ttlt_slo_seconds=own.ttlt_slo_seconds or default.ttlt_slo_seconds,
    )


_FIELD_NAMES: dict[type, str] = {OpenSession: "open_session", Snapshot: "snapshot", Step: "step"}

# Anything that is not in this table is out of turn.
_TRANSITIONS: dict[State, dict[type, Callable[..., Response]]] = {
    State.NEW: {OpenSession: Session._open},
    State.SYNCED: {Step: Session._step, Snapshot: Session._restore},
    State.LOST: {Step: Session._resync_after_error, Snapshot: Session._restore},
}


def one_decision(message: Snapshot, opening: OpenSession, defaults: SessionDefaults | None = None) -> BatchAllocation:
    """Returns the decision for a full state, without a session that lasts.

    Raises:
        Refusal: the message is wrong.
    """
    session = Session("", defaults)
    session._open(opening)
    session._epoch = message.iteration.epoch - 1
    return session._restore(message)
