"""Synchronous gRPC client of a sidecar, for an engine's loop; needs only grpcio, protobuf and numpy.

`SchedulerClient.decide` never raises and never waits longer than its deadline. The parts: `client` (one decision),
`stream` (one session: asking and matching answers), `keeper` (the background thread that opens sessions and reads),
`breaker` (when not to ask), `counters`, `settings`, `channel`.
"""

from engine_adapter.client.breaker import BreakerSettings, BreakerState, CircuitBreaker
from engine_adapter.client.client import SchedulerClient
from engine_adapter.client.counters import ClientCounters, FallbackReason, RoundTrips
from engine_adapter.client.errors import ClientError, SessionRefused, SidecarUnavailable
from engine_adapter.client.settings import ClientSettings

__all__ = [
    "BreakerSettings",
    "BreakerState",
    "CircuitBreaker",
    "ClientCounters",
    "ClientError",
    "ClientSettings",
    "FallbackReason",
    "RoundTrips",
    "SchedulerClient",
    "SessionRefused",
    "SidecarUnavailable",
]
