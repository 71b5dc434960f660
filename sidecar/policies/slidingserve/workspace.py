"""The buffers that a decision is worked out in, used again in each; nothing is allocated on the way.

`Workspace` is what kernels take: a NamedTuple of arrays, so one argument stands for all of them (about 1 us per call).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor.features import ROW
from predictor.forecast import FILL_ROW
from sidecar.policies.common.intake import PROMPT
from sidecar.queues import Table
from slidingserve.contract.values import Floats, Ints

LINE = np.dtype(
    [
        ("row", np.int64),  # rows of the pool in their order of priority: the order
        ("risk", np.int64),  # places in the order of the prompts at risk, least slack first
        ("member", np.int64),  # places in the order of a knapsack's candidates
        ("weight", np.int64),  # their weights in knapsack steps; negative once taken
        ("value", np.float64),  # their values
    ]
)
"""Lists of at most one entry for each prompt, side by side."""

RULES = np.dtype(
    [
        ("budget", np.int64),  # B, tokens
        ("limit", np.int64),  # the engine's own, tokens
        ("block_tokens", np.int64),
        ("max_sequences", np.int64),
        ("by_deadline", np.bool_),  # the order is not MLPS but that of deadlines
        ("constructor", np.bool_),
        ("alpha", np.float64),
        ("eps_seconds", np.float64),
        ("safety", np.float64),
        ("protect", np.int64),  # index in parameters.PROTECTIONS
        ("tolerance_tokens", np.int64),
        ("window", np.int64),
        ("chunk_here", np.bool_),  # the chunker is Algorithm 1 or greedy
        ("step_tokens", np.int64),
        ("knapsack_step_tokens", np.int64),
        ("max_anchors", np.int64),
        ("max_candidates", np.int64),
        ("clamp_chunk", np.bool_),
        ("clamp_next_budget", np.bool_),
        ("cap_next_budget", np.bool_),
        ("advance_queue", np.bool_),
        ("skip_lost_decodes", np.bool_),
        ("expired_last", np.bool_),
        ("drop_expired_risks", np.bool_),
        ("chunk_if_infeasible", np.bool_),
        ("anchor_within_tbt", np.bool_),
        ("clamp_budget_sum", np.bool_),
        ("take_all_that_fits", np.bool_),
        ("recheck_batch", np.bool_),
        ("anchor_in_sums", np.bool_),
        ("expected_decodes", np.bool_),
        ("fill_remainder", np.bool_),
    ]
)
"""The resolved parameters, one row."""

FACTS = np.dtype(
    [
        ("now_seconds", np.float64),
        ("throughput", np.float64),  # rho, tokens per second
        ("free_blocks", np.int64),  # not needed by decodes
        ("open_blocks", np.int64),  # nor by running prompts; below 0 if those need more than there are
        ("seats", np.int64),  # waiting requests that may be admitted
        ("prompt_tokens", np.int64),  # sum of r over P
        ("decode_seconds", np.float64),  # predicted time of the decodes alone
        ("rows", np.int64),  # prompts that the fill holds
        ("set_aside", np.int64),  # prompts that were taken out of the pool again
        ("slack_seconds", np.float64, 4),  # T_1 .. T_4: what the safe decodes leave to each iteration of the window
    ]
)
"""What is known of this iteration, one row."""


_MOST_CELLS = 1 << 23  # 64 MB that a knapsack may take, whatever budget and number of requests a client has


class Workspace(NamedTuple):
    """Buffers for one session; n is the mirror's capacity.

    Attributes:
        pool: PROMPT[n], the prompts of this iteration in the order in which they were found.
        keys: int64[2, n], sort keys, and room for sorting them.
        lines: LINE[n], columns of what is listed along the way.
        fill: float64[n + 1, 10], decodes and prompts in their order, see `predictor.forecast`.
        batch: float64[8], the features of the batch that is decided.
        scratch: float64[8], the features of whatever is being predicted.
        best: float64[candidates + 1, cells + 1], a knapsack's values by candidates seen and capacity.
    """

    pool: Table
    keys: Ints
    lines: Table
    fill: Floats
    batch: Floats
    scratch: Floats
    best: Floats


def make_workspace(capacity: int, rules: Any) -> Workspace:
    """Returns buffers for ``capacity`` live requests under one row of RULES."""
    cells = int(rules["budget"] + rules["step_tokens"]) // int(rules["knapsack_step_tokens"]) + 1
    most = min(capacity, _MOST_CELLS // (cells + 1) - 1)
    candidates = min(int(rules["max_candidates"]) or most, most)
    return Workspace(
        pool=np.zeros(capacity, PROMPT),
        keys=np.zeros((2, capacity), np.int64),
        lines=np.zeros(capacity, LINE),
        fill=np.zeros((capacity + 1, FILL_ROW)),
        batch=np.zeros(ROW),
        scratch=np.zeros(ROW),
        best=np.zeros((candidates + 1, cells + 1)),
    )
