"""What the ledger writes down: a request as the sidecar believes it to be, a plan, names by number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from engine_adapter.vllm.slos import RequestTerms
from slidingserve.contract.values import Floats, Ints

MOST_NAMES = 4096
"""Classes, and tenants, that are told apart; later ones have no name."""
UNTOLD = -1
"""Handle of a request that the sidecar does not know."""


class Known:
    """One live request: vLLM's object, who it is to the sidecar, and how far the sidecar believes it to be."""

    __slots__ = (
        "arrival_seconds",
        "computed",
        "handle",
        "output",
        "request",
        "served_iteration",
        "served_seconds",
        "terms",
        "waiting",
    )

    def __init__(self, request: Any, terms: RequestTerms, arrival_seconds: float) -> None:
        self.request = request
        self.terms = terms
        self.arrival_seconds = arrival_seconds
        self.served_seconds = 0.0
        self.served_iteration = 0
        self.handle = UNTOLD
        self.computed = 0
        self.output = 0
        self.waiting = True

    @property
    def told(self) -> bool:
        """Whether the sidecar knows the request."""
        return self.handle != UNTOLD


class EnginePlan(NamedTuple):
    """An allocation in vLLM's terms.

    Attributes:
        caps: most tokens by request id, in the order in which vLLM is to take them.
        victims: ids of those to be preempted first, if blocks are short.
        complete: every handle of the allocation is a live request.
    """

    caps: dict[str, int]
    victims: tuple[str, ...]
    complete: bool


class Names:
    """Numbers names in the order of their first use; 0 is none."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {"": 0}
        self._sent = 0

    def index(self, name: str) -> int:
        """Returns the number of a name; 0 if there are too many."""
        if name not in self._index and len(self._index) <= MOST_NAMES:
            self._index[name] = len(self._index)
        return self._index.get(name, 0)

    def new(self, *, everything: bool = False) -> tuple[str, ...]:
        """Returns the names that were not sent before, or all, as sent."""
        names = tuple(self._index)[1 if everything else 1 + self._sent :]
        self._sent = len(self._index) - 1
        return names


def progress_of(request: Any) -> tuple[int, int]:
    """Returns (computed, output) tokens of a request as the contract counts them: what is in flight has happened.

    vLLM counts launched tokens as computed at once. A token that is being sampled is a placeholder of the async
    scheduler and not counted at all by the sync one. Draft tokens count as rejected until vLLM says otherwise.
    """
    output = int(request.num_output_tokens)
    in_flight = int(request.num_output_placeholders)
    if not in_flight and request.num_in_flight_tokens and not request.is_prefill_chunk:
        in_flight = 1
    output += in_flight
    total = int(request.num_prompt_tokens) + output
    return min(int(request.num_computed_tokens), total - 1 if output else total), output


def ints(values: Iterable[int]) -> Ints:
    """Returns a column of whole numbers."""
    return np.array(list(values), np.int64)


def floats(values: Iterable[float]) -> Floats:
    """Returns a column of real numbers."""
    return np.array(list(values), np.float64)
