"""Looks at an address before gRPC listens there.

gRPC takes over another process's Unix socket without a word, and says little of why it cannot bind.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

_PROBE_SECONDS = 1.0


class AddressError(ValueError):
    """Nobody can listen there; the message names the address, why, and the remedy."""


def check_listenable(address: str) -> None:
    """Looks whether this process can listen at ``unix:/path`` or ``host:port``.

    Raises:
        AddressError: somebody else listens there, or the place does not exist or is not ours.
    """
    path = _socket_path(address)
    if path is None:
        _check_port(address)
    else:
        _check_socket(address, path)


def is_reachable_from_outside(address: str) -> bool:
    """Says whether other machines may reach an address: TCP, and not loopback."""
    host = address.rpartition(":")[0].strip("[]")
    return not address.startswith("unix:") and host not in ("localhost", "::1") and not host.startswith("127.")


def _socket_path(address: str) -> Path | None:
    return Path(address.removeprefix("unix:").removeprefix("//")) if address.startswith("unix:") else None


def _check_socket(address: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise AddressError(
            f"cannot listen at {address}: there is no folder {path.parent}; make it or give another path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if path.is_socket():
                return  # left over from a process that is gone; gRPC replaces it
            raise AddressError(
                f"cannot listen at {address}: {path} is there and is no socket; remove it or give another path"
            ) from None
        except OSError as error:
            raise AddressError(f"cannot listen at {address}: {error.strerror or error}; give another path") from error
    raise AddressError(f"another process listens at {address}; stop it or give another address")


def _check_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"cannot listen at {address}: {error.strerror}; give another host or address") from error
    for family, _, _, _, place in places:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise AddressError(
                    f"cannot listen at {address}: {error.strerror}; give another address or free this one"
                ) from error
