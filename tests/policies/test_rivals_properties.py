"""What holds for every rival whatever the queues: within the limits as it is, decodes first, never idle for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from sidecar.policies.base import Policy
from slidingserve.contract.values import EngineLimits, PauseState
from tests.policies.rivals import made, per_token, qoserve, with_relegation
from tests.policies.sessions import decided, session_of
from tests.slidingserve.scenes import State, states
from tests.strategies import assert_within_limits, batch, mirror_rows

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
RIVALS: dict[str, Callable[[EngineLimits], Policy]] = {
    "orca": lambda limits: made("orca", limits),
    "sarathi": lambda limits: made("sarathi", limits, max_tokens=24),
    "sarathi-edf": lambda limits: made("sarathi-edf", limits, max_tokens=24),
    "sarathi-srpf": lambda limits: made("sarathi-srpf", limits, expired_last=False),
    "qoserve": lambda limits: qoserve(per_token(), limits),
    "qoserve, all rules": lambda limits: qoserve(
        per_token(), limits, relegation="iteration", spare_started=True, skip_lost_decodes=False, max_tokens=24
    ),
    "qoserve, artifact": lambda limits: qoserve(None, limits, constants="artifact"),
    "slidingserve+relegation": lambda limits: with_relegation(per_token(), limits, max_tokens=24),
}
IN_TURN = ("orca", "sarathi")  # the first that finds no place bars the others


class Seen(NamedTuple):
    """Handles of a state's requests by what they are.

    With each decode the tokens that it asks for, with each running prompt the KV blocks of its next token, with each
    waiting one those of all of it.
    """

    decodes: dict[int, int]
    prompts: dict[int, int]
    waiting: dict[int, int]


def seen(policy: Callable[[EngineLimits], Policy], state: State) -> Seen:
    """A state by the rows of a fresh mirror that no decision has advanced."""
    size = state.limits.kv_block_tokens
    session = session_of(policy, state)
    session.mirror.restore(state.full)
    drafts = state.full.requests.speculative_tokens
    queues = Seen({}, {}, {})
    for row in mirror_rows(session):
        if not row.running:
            queues.waiting[row.handle] = -(-(row.prompt + row.output) // size)
        elif row.output > 0 and row.prompt + row.output - row.computed == 1:
            queues.decodes[row.handle] = 1 + int(drafts[row.handle])
        else:
            queues.prompts[row.handle] = max(0, -(-(row.computed + 1) // size) - row.blocks)
    return queues


@pytest.mark.parametrize("name", RIVALS)
@SETTINGS
@given(states())
def test_whatever_the_queues(name: str, state: State) -> None:
    session = session_of(RIVALS[name], state)
    allocation = decided(session, state)
    assert_within_limits(allocation, state.full, state.limits)
    got = dict(batch(allocation))
    assert len(got) == len(allocation.handles)
    queues = seen(RIVALS[name], state)
    preempted = set(allocation.preempted_handles.tolist())
    running = len(queues.decodes) + len(queues.prompts)
    if sum(queues.decodes.values()) <= state.limits.max_tokens_per_iteration:
        assert session.guarded == 0, "budget, seats and KV blocks are kept by the policy itself"
        assert queues.decodes.keys() - preempted <= got.keys()
    assert set(allocation.demoted_handles.tolist()) <= queues.waiting.keys() | queues.prompts.keys()
    if not got and not preempted:
        assert not queues.decodes
        assert not [blocks for blocks in queues.prompts.values() if blocks <= state.full.iteration.free_kv_blocks]
        admits = state.full.iteration.pause_state is PauseState.RUNNING and running < state.limits.max_sequences
        if admits and not queues.prompts and queues.waiting:
            fits = [blocks <= state.full.iteration.free_kv_blocks for blocks in queues.waiting.values()]
            assert not (fits[0] if name in IN_TURN else any(fits))
    again = decided(session_of(RIVALS[name], state), state)
    assert batch(again) == batch(allocation)
    assert again.demoted_handles.tolist() == allocation.demoted_handles.tolist()
