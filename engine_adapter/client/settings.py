"""Settings of the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_adapter.client.breaker import BreakerSettings

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the sidecar is and how long to wait for it; seconds on the machine's monotonic clock."""

    target: str
    """``unix:/path/of.sock`` or ``host:port``."""
    deadline_seconds: float | None = 0.004
    """Longest wait for one decision when the step does not bring its own (``iteration.answer_within_seconds``). None:
    no limit, for simulation in virtual time. 4 ms is 10 % of a 40 ms iteration."""
    credentials: grpc.ChannelCredentials | None = None
    """TLS for ``host:port``, for a proxy before the sidecar; None: plain text, the only form that a sidecar speaks."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    """When to leave the sidecar alone."""
    connect_wait_seconds: float = 10.0
    """How long `SchedulerClient.open` waits for a sidecar to come up."""
    open_timeout_seconds: float = 30.0
    """How long one OpenSession may take; a policy that is compiled first takes seconds."""
    stall_seconds: float = 5.0
    """A sidecar that owes an answer for so long gets a new stream."""
    first_retry_seconds: float = 0.02
    """Pause before the first attempt to connect again; it doubles up to the longest."""
    longest_retry_seconds: float = 0.25
    """Pause between attempts while the sidecar is down; bounds how late its return is noticed."""
    refused_retry_seconds: float = 5.0
    """Pause after the sidecar has refused the session for a reason that will hardly pass."""

    def __post_init__(self) -> None:
        if not (self.target.startswith("unix:") and len(self.target) > 5) and not self._is_host_port():
            raise ValueError(f"target = {self.target!r}: give unix:/path/of.sock or host:port")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0:
            raise ValueError(f"deadline_seconds = {self.deadline_seconds}: must be positive, or None for no limit")
        for name in (
            "connect_wait_seconds",
            "open_timeout_seconds",
            "stall_seconds",
            "first_retry_seconds",
            "longest_retry_seconds",
            "refused_retry_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")

    @property
    def is_unix_socket(self) -> bool:
        """Whether the target is a Unix socket."""
        return self.target.startswith("unix:")

    def _is_host_port(self) -> bool:
        host, _, port = self.target.rpartition(":")
        return bool(host) and port.isdecimal() and 0 < int(port) < 65536
