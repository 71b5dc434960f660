"""A message that the session does not accept, and why."""

from __future__ import annotations

from slidingserve.contract.values import ErrorReason, SessionError

LONGEST_TEXT = 500
"""Characters of a field, a value or a remedy that go into an answer (gRPC drops a status of more than 16 kB)."""


def shortened(text: str) -> str:
    """Returns a text of at most `LONGEST_TEXT` characters."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


class Refusal(Exception):
    """Raised before anything is changed; becomes a `SessionError` for the engine.

    Attributes:
        reason: kind of mistake.
        field: path of the field in the message.
        value: its value as text.
        remedy: what to do.
    """

    def __init__(self, reason: ErrorReason, field: str, value: object, remedy: str) -> None:
        self.reason = reason
        self.field, self.value, self.remedy = shortened(field), shortened(str(value)), shortened(remedy)
        super().__init__(f"{self.field} = {self.value}: {self.remedy}" if field else self.remedy)

    def as_error(self, epoch: int = 0, step: int = 0) -> SessionError:
        """Returns the answer that tells the engine."""
        return SessionError(self.reason, self.field, self.value, self.remedy, str(self), epoch, step)
