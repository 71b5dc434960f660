"""How far a request can be: its positions, when each is due, and the latest time at which it can still be met.

Positions of one request: prefill positions 0 .. first - 1, then one per generated token (``first``: its first token
has come, with the prompt's last chunk). Two sets of prefill positions are used.

- On the grid: a request is at a multiple of g tokens. These are exactly the schedules whose chunks end at multiples of
  g or at the prompt's end.
- Rounded up: for schedules of any chunks. A request with x tokens computed, not all, is at the next multiple of g
  (``most``) and has at least ``least`` of them; in the last cell there is a position of its own for "all but not yet
  done", so that the last chunk of a prompt is never rounded. From position p to q at least ``least[q] - most[p]``
  tokens are computed, hence what a schedule takes is never overestimated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.floor import FEATURE_COUNT, UNSURE, floor_seconds
from evaluation.workloads import Workload
from slidingserve.contract.values import Floats, Ints

TOLERANCE_SECONDS = 1e-9  # sums in another order differ in the last digits; a bound errs on the policy's side


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """The positions of one request.

    Attributes:
        arrival: seconds.
        prompt: tokens.
        first: position at which the first token has come.
        last: position at which all have.
        least, most: int64[last + 1], tokens computed at a position, at least and at most.
        due: float64[last + 1], when the token of this position is due; infinite in the prefill.
        must: float64[last + 1], the latest time at which it can be here, with the engine to itself, and still be met.
    """

    arrival: float
    prompt: int
    first: int
    last: int
    least: Ints
    most: Ints
    due: Floats
    must: Floats


def deadlines(workload: Workload, row: int) -> Floats:
    """Returns when each output token of a request is due, float64[output tokens]; infinite where no SLO says so."""
    arrival, ttft = workload.arrival_seconds[row], workload.ttft_slo_seconds[row]
    tbt, ttlt = workload.tbt_slo_seconds[row], workload.ttlt_slo_seconds[row]
    due = np.full(int(workload.output_tokens[row]), np.inf)
    if ttft > 0:
        due[0] = arrival + ttft
        if tbt > 0:
            due = arrival + ttft + np.arange(due.size) * tbt
    return np.minimum(due, arrival + ttlt) if ttlt > 0 else due


def tracks(workload: Workload, timer: ProfileTimer, cheapest: Floats, g: int, *, rounded_up: bool) -> list[Track]:
    """Returns the positions of every request. O(requests x positions squared) iteration floors."""
    return [_track(workload, row, timer.model, cheapest, g, rounded_up) for row in range(len(workload))]


def _track(workload: Workload, row: int, model: Floats, cheapest: Floats, g: int, rounded_up: bool) -> Track:
    prompt, outputs = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
    least, most = _prefill_positions(prompt, g, rounded_up)
    first, last = len(least), len(least) + outputs - 1
    generated = prompt + np.arange(outputs)
    due = np.concatenate([np.full(first, np.inf), deadlines(workload, row)])
    track = Track(
        float(workload.arrival_seconds[row]),
        prompt,
        first,
        last,
        np.concatenate([least, generated]).astype(np.int64),
        np.concatenate([most, generated]).astype(np.int64),
        due + TOLERANCE_SECONDS if rounded_up else due,
        np.full(last + 1, np.inf),
    )
    _fill_latest(track, model, cheapest)
    return track


def _prefill_positions(prompt: int, g: int, rounded_up: bool) -> tuple[Ints, Ints]:
    """Returns (least, most) tokens of the positions before the first token."""
    most = np.arange(0, prompt, g, dtype=np.int64)
    if not rounded_up:
        return most, most
    least = np.maximum(0, most - g + 1)
    if most[-1] < prompt - 1:
        least, most = np.append(least, most[-1] + 1), np.append(most, prompt - 1)
    return least, most


def _fill_latest(track: Track, model: Floats, cheapest: Floats) -> None:
    """Backwards from the last token; each step takes at least what the request alone asks of an iteration."""
    one, part = np.ones(1, np.int64), (np.zeros(3, np.int64), np.zeros(3, np.int64))
    context, features = np.zeros(1, np.int64), np.zeros(FEATURE_COUNT)
    for p in range(track.last - 1, -1, -1):
        latest = -np.inf
        for q in range(p + 1, max(p + 1, track.first) + 1):
            one[0] = max(1, track.least[q] - track.most[p])
            context[0] = UNSURE if one[0] == 1 and track.most[p] > 0 else 0
            needed = floor_seconds(one, context, 1, model, cheapest, part, features)
            latest = max(latest, min(track.due[q], track.must[q]) - needed)
        track.must[p] = latest + TOLERANCE_SECONDS
