"""What happened in a run of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slidingserve.contract.values import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What happened to the n requests of a feed, as columns in its order; seconds on the engine's clock.

    Attributes:
        arrival_seconds: when each arrived.
        first_token_seconds: when its first token came; NaN: never.
        last_token_seconds: when its latest token came; NaN: never.
        output_tokens: tokens that it got.
        deadline_missed: some token k came later than arrival + TTFT + (k - 1) TBT.
        gap_missed: two tokens were further apart than the TBT SLO.
        finished: it got all its tokens.
        token_gaps: float64[m], every gap between two tokens of one request, of all requests, in the order of time.
        makespan_seconds: when the last iteration ended.
        iterations: how many there were.
        scheduled_requests: requests in all iterations together.
        preemptions: how often a request lost its KV blocks.
        rejected: requests that can never fit into the engine.
        fallbacks: iterations that the engine's own policy decided.
        allocation_digest: SHA-256 over the allocations received: step, count, then handle and tokens of each, as
            little-endian uint32.
    """

    arrival_seconds: Floats
    first_token_seconds: Floats
    last_token_seconds: Floats
    output_tokens: Ints
    deadline_missed: NDArray[np.bool_]
    gap_missed: NDArray[np.bool_]
    finished: NDArray[np.bool_]
    token_gaps: Floats
    makespan_seconds: float
    iterations: int = 0
    scheduled_requests: int = 0
    preemptions: int = 0
    rejected: int = 0
    fallbacks: int = 0
    allocation_digest: str = ""
