"""The decision core as a `DecisionSource` without a sidecar process: same session, no wire."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.policies import registry
from sidecar.session.machine import Session, SessionDefaults
from slidingserve.contract.values import (
    BatchAllocation,
    EngineLimits,
    OpenSession,
    ResyncRequired,
    SessionError,
    SessionOpened,
    SloDefaults,
    Snapshot,
    Step,
)

NO_SLOS = SloDefaults(0.0, 0.0)
"""A workload brings its SLOs; what a request lacks is not to be filled in."""


class DecisionRefused(RuntimeError):
    """The session refused a message; holds its words."""


class InProcessSource:
    """Hands the engine's messages to a session in this process.

    Attributes:
        session: the session, for tests that compare its mirror with the engine.
    """

    def __init__(self, defaults: SessionDefaults | None = None) -> None:
        self.session = Session("in-process", defaults)
        self._epoch = 0

    def open(self, message: OpenSession) -> SessionOpened:
        """Opens the session.

        Raises:
            DecisionRefused: the session said no.
        """
        answer = self.session.handle(message)
        if not isinstance(answer, SessionOpened):
            raise DecisionRefused(answer.message if isinstance(answer, SessionError) else str(answer))
        return answer

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation:
        """Returns the allocation for a step.

        Raises:
            DecisionRefused: the session refused the step; in one process that is a mistake of ours, so it is loud.
        """
        if self._epoch:
            step = step._replace(iteration=step.iteration._replace(epoch=self._epoch))
        answer = self.session.handle(step)
        if isinstance(answer, ResyncRequired):
            self._epoch = answer.expected_epoch + 1
            full = snapshot()
            answer = self.session.handle(full._replace(iteration=full.iteration._replace(epoch=self._epoch)))
        if not isinstance(answer, BatchAllocation):
            raise DecisionRefused(answer.message if isinstance(answer, SessionError) else str(answer))
        return answer

    def close(self) -> None:
        """Nothing is open."""


def open_policy(policy: str, profile: str, limits: EngineLimits) -> InProcessSource:
    """Returns a policy, by its text, as an open source of decisions in this process.

    Raises:
        PolicySpecError: the text has another form.
        DecisionRefused: the policy cannot be had.
    """
    name, parameters = registry.parse_spec(policy)
    source = InProcessSource(SessionDefaults(slos=NO_SLOS))
    source.open(OpenSession(limits, policy=name, policy_parameters=parameters, profile=profile))
    return source
