"""What to beware of in an answer."""

from __future__ import annotations

from collections.abc import Iterator

from evaluation.goodput.points import Point
from evaluation.tuning.race import Contender, Course, Standings

FEW_REQUESTS = 1000
"""Below this 1 % is so few requests that chance decides."""

OFF_PREDICTIONS = 0.10
"""Mean relative error of predicted iteration times above which they are called off."""

CONCENTRATED = 0.5
"""Share of the misses in two blocks above which rushes are said to decide."""

FAR_BEYOND = 3.0
"""Goodput over recorded rate above which the trace is squeezed so much that it is another traffic."""


def cautions(standings: Standings, course: Course, at_promise: Point | None) -> Iterator[str]:
    """Yields sentences. ``at_promise``: the run of the chosen settings at the promised rate."""
    best = standings.contenders[0]
    yield from _too_few(course)
    if not best.climbed.has_top and best.promise.goodput > 0:
        yield f"no rate up to {best.promise.goodput:.3g} requests/s fails; more may be possible."
    yield from _squeezed(best, course)
    yield from _concentrated(best, course)
    yield from _off_predictions(at_promise)
    if standings.left_out:
        yield (
            f"the time was up: {len(standings.left_out)} settings were not looked at (any further): "
            f"{', '.join(standings.left_out)}. The same command with more --minutes goes on from here."
        )


def _too_few(course: Course) -> Iterator[str]:
    requests = course.traffic.tuning_requests
    if requests < FEW_REQUESTS:
        yield (
            f"{100 * course.limit:g} % of the {requests} requests that were chosen on are "
            f"{int(course.limit * requests)}, so chance has a large part in the answer; record {2 * FEW_REQUESTS} "
            "requests or more."
        )


def _squeezed(best: Contender, course: Course) -> Iterator[str]:
    recorded, goodput = course.traffic.recorded_rate, best.promise.goodput
    if recorded is not None and goodput > FAR_BEYOND * recorded:
        yield (
            f"the goodput is {goodput / recorded:.0f} times the recorded rate, so the trace was squeezed as much: its "
            f"rushes became shorter, and all of it lasts only {course.traffic.tuning_requests / goodput:.0f} s. One "
            "engine is enough; for the figure itself record the traffic of more engines."
        )


def _concentrated(best: Contender, course: Course) -> Iterator[str]:
    """Warns if what was missed at the goodput lies in two of the blocks, unless it is next to nothing."""
    at_goodput = next((p for p in best.climbed.curve if p.key.rate == best.climbed.goodput), None)
    if at_goodput is None or at_goodput.missed < course.limit * at_goodput.key.requests / 2:
        return
    blocks = sorted(at_goodput.missed_by_block, reverse=True)
    share = sum(blocks[:2]) / at_goodput.missed
    if share >= CONCENTRATED:
        yield (
            f"{100 * share:.0f} % of the misses at the goodput fall into two of {len(blocks)} stretches of the "
            "traffic: rushes decide what can be promised, and one far worse than those recorded would break it."
        )


def _off_predictions(at_promise: Point | None) -> Iterator[str]:
    error = None if at_promise is None else at_promise.prediction_error
    if error is not None and error > OFF_PREDICTIONS:
        yield (
            f"the policy's predictions of iteration times were off by {100 * error:.0f} % on average; fit a latency "
            "model to this hardware (`slidingserve predictor fit`, `slidingserve profile`) and tune again."
        )
