"""Makes the gRPC channel."""

from __future__ import annotations

import grpc

from engine_adapter.client.settings import ClientSettings

_OPTIONS = [
    # A restarted sidecar is found again within 0.2 s; gRPC's own pace is up to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Clients of one process must not share a connection, nor its fate.
    ("grpc.use_local_subchannel_pool", 1),
    # A sidecar is next door: never through the proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]
# A peer that vanishes without a word is noticed within 12 s. A Unix socket tells at once.
_TCP_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # An engine without requests sends nothing for long; after two pings gRPC would then stop asking.
    ("grpc.http2.max_pings_without_data", 0),
]


def make_channel(settings: ClientSettings) -> grpc.Channel:
    """Returns a channel that connects when first used; call it after any fork."""
    options = _OPTIONS if settings.is_unix_socket else _OPTIONS + _TCP_OPTIONS
    # No compression: the messages are small and the peer is near.
    compression = grpc.Compression.NoCompression
    if settings.credentials is None:
        return grpc.insecure_channel(settings.target, options=options, compression=compression)
    return grpc.secure_channel(settings.target, settings.credentials, options=options, compression=compression)
