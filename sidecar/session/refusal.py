"""A message that the session does not accept, and why."""

from __future__ import annotations

from slidingserve.contract.values import ErrorReason, SessionError


class Refusal(Exception):
    """Raised before anything is changed; becomes a `SessionError` for the engine.

    Attributes:
        reason: kind of mistake.
        field: path of the field in the message.
        value: its value as text.
        remedy: what to do.
    """

    def __init__(self, reason: ErrorReason, field: str, value: object, remedy: str) -> None:
        self.reason, self.field, self.value, self.remedy = reason, field, str(value), remedy
        super().__init__(f"{field} = {value}: {remedy}" if field else remedy)

    def as_error(self, epoch: int = 0, step: int = 0) -> SessionError:
        """Returns the answer that tells the engine."""
        return SessionError(self.reason, self.field, self.value, self.remedy, str(self), epoch, step)
