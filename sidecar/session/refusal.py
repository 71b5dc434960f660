"""A message that the session does not accept, and why."""

from __future__ import annotations

from slidingserve.contract.values import ErrorReason, SessionError

LONGEST_TEXT = 400
"""Bytes of a field, a value or a remedy that go into an answer.

gRPC may drop a status of more than 8 kB. One holds the three of them twice: in a message that takes up to three bytes
for one, and in details that take four for three.
"""


def shortened(text: str) -> str:
    """Returns a text of at most `LONGEST_TEXT` bytes, plus three dots where something is missing."""
    data = text.encode(errors="replace")
    return text if len(data) <= LONGEST_TEXT else data[:LONGEST_TEXT].decode(errors="ignore") + "..."


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
