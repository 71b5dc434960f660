"""How a stream begins: silence, policies that have to be compiled first, addresses that are open to the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from sidecar.addresses import is_reachable_from_outside
from sidecar.services import scheduler
from sidecar.services.scheduler import SchedulerService
from sidecar.session.machine import SessionDefaults
from sidecar.warming import PolicyCannotDecide
from slidingserve.contract.codec import decode_response, encode_request
from slidingserve.contract.values import OpenSession, Response, SessionError, SessionOpened
from slidingserve.scheduler.v1 import scheduler_pb2 as pb
from tests.strategies import LIMITS


class Context:
    """What the service uses of a call."""

    def peer(self) -> str:
        return "unix:"


async def ask(service: SchedulerService, *openings: OpenSession, silent: bool = False) -> list[Response | None]:
    async def requests() -> AsyncIterator[pb.ScheduleRequest]:
        if silent:
            await asyncio.Event().wait()
        for opening in openings:
            yield encode_request(opening)

    return [decode_response(answer) async for answer in service.Schedule(requests(), cast(Any, Context()))]


def test_a_silent_stream_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_MESSAGE_SECONDS", 0.05)

    async def run() -> None:
        service = SchedulerService(SessionDefaults(), max_sessions=1)
        assert await ask(service, silent=True) == []
        assert service.open_sessions == 0
        assert isinstance((await ask(service, OpenSession(LIMITS)))[0], SessionOpened)

    asyncio.run(run())


def test_another_policy_is_compiled_once_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[SessionDefaults] = []

    def warm_up(defaults: SessionDefaults) -> None:
        compiled.append(defaults)
        if defaults.policy != "vllm":
            raise PolicyCannotDecide("there is none")

    monkeypatch.setattr(scheduler, "warm_up", warm_up)

    async def run() -> None:
        service = SchedulerService(SessionDefaults("other"), max_sessions=1)
        opening = OpenSession(LIMITS, policy="vllm", policy_parameters={"max_tokens": "64"}, profile="h100-tp1")
        for _ in range(2):
            assert isinstance((await ask(service, opening))[0], SessionOpened)
        assert compiled == [SessionDefaults("vllm", {"max_tokens": "64"}, service._defaults.slos, "h100-tp1")]
        assert isinstance((await ask(service, OpenSession(LIMITS, policy="none")))[0], SessionError)

    asyncio.run(run())


def test_only_the_owner_may_read_a_journal(tmp_path: Path) -> None:
    service = SchedulerService(SessionDefaults(), max_sessions=1, journal_dir=tmp_path)
    asyncio.run(ask(service, OpenSession(LIMITS)))
    (journal,) = tmp_path.iterdir()
    assert journal.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("address", "open_to_others"),
    [
        ("unix:/tmp/x.sock", False),
        ("127.0.0.1:50051", False),
        ("localhost:1", False),
        ("[::1]:50051", False),
        ("0.0.0.0:50051", True),
        ("[::]:50051", True),
        ("10.1.2.3:50051", True),
        ("sidecar.local:50051", True),
    ],
)
def test_which_addresses_are_open_to_the_network(address: str, open_to_others: bool) -> None:
    assert is_reachable_from_outside(address) is open_to_others
