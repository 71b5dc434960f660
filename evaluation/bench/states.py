"""States of an engine to decide on, and a session that is put into the same one again and again.

A timed decision is that of a `Step`, as an engine sends it: the mirror applies the batch of the iteration before, the
policy decides, the guard checks. A `Snapshot`, which is not timed, leads back each time. New requests are held back in
it (PAUSED_NEW), so the iteration before the timed one computes the decodes alone and the prompts are all there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evaluation.bench.loads import LONGEST_PROMPT, OUTPUT_TOKENS, SHORTEST_PROMPT, TBT_SLO_SECONDS
from sidecar.session.machine import Session
from slidingserve.contract.values import (
    NO_INTS,
    BatchAllocation,
    EngineLimits,
    Floats,
    Ints,
    IterationState,
    OpenSession,
    PauseState,
    ProgressColumns,
    Request,
    RequestColumns,
    SessionError,
    Snapshot,
    Step,
)

ANCHORS = 8
"""Requests at risk in the state that a batch is constructed for: as many as `robust` looks at."""
BLOCK_TOKENS = 16
MOST_TOKENS = 2048

NOW_SECONDS = 100.0  # of the timed decision
_LAST_SECONDS = 0.02  # what the iteration before it took
_ARRIVED_TOKENS = 300
_ANCHOR_TOKENS = (8, 25)
_FAR_SECONDS = 20.0
_BLOCKS_PER_REQUEST = 1000  # decodes of 16,000 tokens
_SEARCH_STEPS = 24


class BenchFailed(RuntimeError):
    """A measurement could not be made; says why."""


class Scene(NamedTuple):
    """A state, and what happens between the iteration that it starts and the timed one.

    ``arrived`` has one request, whose handle is set anew each time.
    """

    snapshot: Snapshot
    finished: Ints = NO_INTS
    arrived: RequestColumns | None = None


class Rewinder:
    """A session that decides the same iteration as often as one likes.

    Attributes:
        session: the session, for tests that look at its mirror.

    Raises:
        BenchFailed: the session refused something; holds its words.
    """

    def __init__(self, opening: OpenSession) -> None:
        self.session = Session("bench")
        self._epoch = 0
        opened = self.session.handle(opening)
        if isinstance(opened, SessionError):
            raise BenchFailed(opened.message)

    def rewind(self, scene: Scene) -> BatchAllocation:
        """Puts the session at the scene's beginning; returns its decision there."""
        self._epoch += 1
        iteration = scene.snapshot.iteration._replace(epoch=self._epoch)
        return self._decide(scene.snapshot._replace(iteration=iteration))

    def decide(self, scene: Scene) -> BatchAllocation:
        """Returns the decision of the iteration after the scene's beginning, where `rewind` has put the session."""
        before = scene.snapshot.iteration
        iteration = IterationState(self._epoch, 1, NOW_SECONDS, before.free_kv_blocks, _LAST_SECONDS)
        arrived = scene.arrived
        if arrived is not None:  # handles ascend, also from rewind to rewind
            arrived = arrived._replace(handles=arrived.handles + self._epoch)
        return self._decide(Step(iteration, finished_handles=scene.finished, arrived=arrived))

    def _decide(self, message: Request) -> BatchAllocation:
        answer = self.session.handle(message)
        if not isinstance(answer, BatchAllocation):
            raise BenchFailed(answer.message if isinstance(answer, SessionError) else str(answer))
        return answer


def engine_limits(requests: int) -> EngineLimits:
    """Returns limits of an engine that has room for ``requests``."""
    return EngineLimits(max(MOST_TOKENS, 2 * requests), requests, _BLOCKS_PER_REQUEST * requests, BLOCK_TOKENS)


def decoding_scene(requests: int) -> Scene:
    """Returns ``requests`` that decode, with enough time."""
    return Scene(_snapshot(requests, NO_INTS, np.zeros(0), 1.0))


def prompts_scene(
    requests: int, decode_slack: float, risk_slacks: Floats | None = None, turnover: bool = False
) -> Scene:
    """Returns a scene whose timed decision finds ``requests``: half of them decode, the others wait for their prompt.

    Lengths are drawn as in `loads`.

    Args:
        requests: an even number, at least 4 x ANCHORS.
        decode_slack: seconds that the most pressing decode has; the others have up to half a second more.
        risk_slacks: seconds that the first ANCHORS prompts, short ones, have; None: as all others, 20 s.
        turnover: in between one of the decodes finishes and one prompt arrives.
    """
    random = np.random.default_rng(0)
    waiting = requests // 2 - turnover
    prompts = random.integers(SHORTEST_PROMPT, LONGEST_PROMPT, waiting)
    prompts[:ANCHORS] = random.integers(*_ANCHOR_TOKENS, ANCHORS)
    slacks = np.full(waiting, _FAR_SECONDS)
    if risk_slacks is not None:
        slacks[:ANCHORS] = risk_slacks
    decodes = requests // 2 + turnover
    snapshot = _snapshot(decodes, prompts, slacks, decode_slack)
    if not turnover:
        return Scene(snapshot)
    return Scene(
        snapshot,
        finished=np.array([decodes - 1]),
        arrived=RequestColumns(
            np.array([requests]),
            np.array([NOW_SECONDS]),
            np.array([_ARRIVED_TOKENS]),
            ttft_slo_seconds=np.array([_FAR_SECONDS]),
            tbt_slo_seconds=np.array([TBT_SLO_SECONDS]),
        ),
    )


def risky_scene(requests: int, rewinder: Rewinder) -> Scene:
    """Returns a scene with ANCHORS prompts that a full batch would make late, and that a smaller one can save.

    How long a full batch takes is found from outside, whatever policy and model: by bisection of the slack at which
    the policy's path changes. The prompts at risk, and the most pressing decode, are then given a time between that of
    the decodes alone and that of a full batch. Where no slack changes the path they have 30 to 40 ms.
    """

    def path_at(slack: float) -> str:
        scene = prompts_scene(requests, _FAR_SECONDS, np.full(ANCHORS, slack))
        rewinder.rewind(scene)
        return rewinder.decide(scene).decision_path

    low, high = 1e-3, 0.5 * _FAR_SECONDS
    safe = path_at(high)
    if path_at(low) == safe:
        return prompts_scene(requests, 0.05, np.linspace(0.03, 0.04, ANCHORS))
    for _ in range(_SEARCH_STEPS):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if path_at(middle) == safe else (middle, high)
    decodes = rewinder.rewind(prompts_scene(requests, _FAR_SECONDS)).predicted_seconds
    between = decodes + (low - decodes) * np.linspace(0.7, 0.9, ANCHORS)
    return prompts_scene(requests, float(between[-1]), between)


def _snapshot(decodes: int, prompts: Ints, slacks: Floats, decode_slack: float) -> Snapshot:
    """Returns decodes and waiting prompts; slacks in seconds are those at the timed decision."""
    random = np.random.default_rng(1)
    running = random.integers(SHORTEST_PROMPT, LONGEST_PROMPT, decodes)
    output = random.integers(1, 2 * OUTPUT_TOKENS, decodes)
    spare = random.uniform(0.0, 0.5, decodes)
    spare[0] = 0.0
    ttft = np.concatenate([np.full(decodes, 2.0), np.full(len(prompts), _FAR_SECONDS)])
    # Each decode gets a token before the timed decision.
    due = np.concatenate([decode_slack + spare - (output + 1) * TBT_SLO_SECONDS, slacks])
    count = decodes + len(prompts)
    columns = RequestColumns(
        np.arange(count),
        NOW_SECONDS + due - ttft,
        np.concatenate([running, prompts]),
        ttft_slo_seconds=ttft,
        tbt_slo_seconds=np.full(count, TBT_SLO_SECONDS),
    )
    computed = np.concatenate([running + output - 1, 0 * prompts])
    progress = ProgressColumns(NO_INTS, computed, np.concatenate([output, 0 * prompts]))
    held = int((-(-computed // BLOCK_TOKENS)).sum()) + decodes
    iteration = IterationState(
        0,
        0,
        NOW_SECONDS - _LAST_SECONDS,
        engine_limits(count).kv_blocks - held,
        pause_state=PauseState.PAUSED_NEW,
    )
    return Snapshot(iteration, columns, decodes, progress)
