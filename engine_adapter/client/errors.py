"""Errors of the client.

ClientError
├── SidecarUnavailable   nobody answers at the address
└── SessionRefused       the sidecar answers, and does not want this session

Only `SchedulerClient.open` raises them.
"""

from __future__ import annotations

from slidingserve.contract.values import SessionError


class ClientError(Exception):
    """Base of the client's errors."""


class SidecarUnavailable(ClientError):
    """No session came about in time."""


class SessionRefused(ClientError):
    """The sidecar refused OpenSession; ``error`` is its answer and the message is the answer's."""

    def __init__(self, error: SessionError) -> None:
        super().__init__(error.message or f"{error.field} = {error.value}: {error.reason.name}; {error.remedy}")
        self.error = error
