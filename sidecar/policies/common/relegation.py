"""Who is put behind all others for good: QoServe's eager relegation (ASPLOS 2026)."""

from __future__ import annotations

from sidecar.policies.common.history import recognise
from sidecar.queues import Table
from slidingserve.jit import kernel

RELEGATIONS = ("off", "violated", "iteration", "throughput")
"""Nobody; whose deadline has passed; or lies within this iteration (the paper); or before what is missing can be
computed at the recent throughput (its artifact)."""
_OFF, _VIOLATED, _ITERATION, _THROUGHPUT = range(4)


@kernel
def will_be_late(slack: float, service_seconds: float, iteration_seconds: float, relegation: int) -> bool:
    """Says whether a rule (index in RELEGATIONS) relegates a prompt that still needs ``service_seconds``."""
    if relegation == _ITERATION and slack < iteration_seconds:
        return True
    if relegation == _THROUGHPUT and slack < service_seconds:
        return True
    return bool(relegation != _OFF and slack <= 0.0)


@kernel
def relegate(requests: Table, pool: Table, prompts: int, known: Table) -> None:
    """Relegates the prompts that are ``expired`` in the pool, and then marks those there that ever were, no others.

    Of priority above 0 (less important than the default) all of them; of the others each only if no less important one
    is left that is not relegated: else the last of those is, once for each that is spared so. O(prompts).
    """
    spare = 0
    for row in range(prompts):
        slot = pool[row].slot
        recognise(requests, known, slot)
        if requests[slot].priority > 0:
            known[slot].relegated |= pool[row].expired
            spare += not known[slot].relegated
    candidate = prompts - 1
    for row in range(prompts):
        about = known[pool[row].slot]
        if not pool[row].expired or about.relegated:
            continue
        if spare == 0:
            about.relegated = True
        elif not about.spared:
            about.spared = True
            while not _may_go(requests, known, pool[candidate].slot):
                candidate -= 1
            known[pool[candidate].slot].relegated = True
            spare -= 1
    for row in range(prompts):
        pool[row].expired = known[pool[row].slot].relegated


@kernel
def _may_go(requests: Table, known: Table, slot: int) -> bool:
    return bool(requests[slot].priority > 0 and not known[slot].relegated)
