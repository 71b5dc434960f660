"""Where the sidecar listens: what it takes over, what it refuses, and what it says."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.sidecar_process import SidecarProcess
from sidecar.addresses import AddressError, check_listenable
from tests.service.support import channel_to, health_status, wait_ready, wait_until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ss-") as name:
        yield Path(name)


def test_socket_left_over_by_a_killed_sidecar_is_taken_over(folder: Path) -> None:
    path = folder / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
    assert path.is_socket(), "nobody has tidied up"
    with SidecarProcess(address=f"unix:{path}") as sidecar:
        wait_ready(sidecar)


def test_socket_of_a_living_sidecar_is_refused(sidecar: SidecarProcess) -> None:
    """It is the second of two addresses, so the first has to be given up in order."""
    with SidecarProcess(("--health-listen", "127.0.0.1:0"), address=sidecar.address) as second:
        wait_until(lambda: second.process.poll() is not None, "the second sidecar ends")
        assert second.process.returncode == 2
        said = second.log.splitlines()
        assert said == [f"slidingserve: another process listens at {sidecar.address}; stop it or give another address"]
    with channel_to(sidecar.address) as channel:
        assert health_status(channel, "readiness") == "SERVING"


def test_socket_of_a_stopped_sidecar_is_not_taken_over(folder: Path) -> None:
    """It may come back; and a listener whose queue is full does not even refuse."""
    address = f"unix:{folder}/s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s.sock"))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(folder / "s.sock"))
            with pytest.raises(AddressError, match=r"cannot listen at|another process listens"):
                check_listenable(address)


def test_missing_folder(folder: Path) -> None:
    assert refusal(f"unix:{folder}/no/s.sock") == (
        f"cannot listen at unix:{folder}/no/s.sock: there is no folder {folder}/no; make it or give another path"
    )


def test_what_is_no_socket_is_left_alone(folder: Path) -> None:
    path = folder / "data"
    path.write_text("precious")
    assert "is there and is no socket" in refusal(f"unix:{path}")
    assert path.read_text() == "precious"
    assert "is no socket" in refusal(f"unix:{folder}")


def test_path_too_long(folder: Path) -> None:
    address = f"unix:{folder}/{'x' * 120}.sock"
    assert "too long; give another path" in refusal(address)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may connect to everything")
def test_socket_of_another_user_is_not_taken_over(folder: Path) -> None:
    path = folder / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        assert "Permission denied" in refusal(f"unix:{path}")


def test_port_taken(probes: str, sidecar: SidecarProcess) -> None:
    assert refusal(probes) == (
        f"cannot listen at {probes}: Address already in use; give another address or free this one"
    )


def test_unknown_host() -> None:
    assert "cannot listen at nohost.invalid:5000" in refusal("nohost.invalid:5000")


def test_port_zero_is_told_and_without_engines_the_end_is_quick() -> None:
    with SidecarProcess(("--drain-seconds", "60"), address="127.0.0.1:0") as sidecar:
        wait_until(lambda: sidecar.process.poll() is not None or "serving" in sidecar.log, "it tells where it serves")
        sidecar.check()
        address = sidecar.log.partition("listen=")[2].split()[0]
        assert not address.endswith(":0")
        with channel_to(address) as channel:
            assert health_status(channel, "readiness") == "SERVING"
        sidecar.process.send_signal(signal.SIGINT)
        assert sidecar.process.wait(30) == 0


def refusal(address: str) -> str:
    with pytest.raises(AddressError) as caught:
        check_listenable(address)
    return str(caught.value)
