"""One run of one policy at one rate: what identifies it, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BLOCKS = 20
"""Runs of consecutive requests that the misses are counted in; what intervals resample."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """What is run: names as they are written on the command line, rate in requests/s."""

    profile: str
    workload: str
    policy: str
    rate: float
    seed: int
    requests: int


@dataclass(frozen=True, slots=True)
class Point:
    """What a run came to.

    Attributes:
        key: what was run.
        complete: False if the run was ended early because more requests had missed than it was allowed. Then only
            ``missed`` is known, as a lower bound, and the rest is empty.
        missed: requests that missed an SLO by the deadline rule.
        violations: shares that missed by rule: ``deadline``, ``gap``, ``tpot``.
        class_violations: share that missed a deadline, by class of request.
        ttft_quantiles: seconds at 0, 1, .. 100 %.
        tbt_quantiles: the same of the gaps between tokens.
        missed_by_block: misses in each of `BLOCKS` runs of consecutive requests.
        block_sizes: requests in each of them.
        decision_seconds: real time of a decision, ``p50`` and ``p99``.
        decision_share: real time of all decisions over the virtual time of all iterations.
        prediction_error: mean relative error of predicted iteration times; None where nothing was predicted.
        iterations: how many there were.
        preemptions: how often a request lost its KV blocks.
        utilisation: share of the makespan in which the engine computed.
        wall_seconds: real time that the run took.
    """

    key: RunKey
    complete: bool
    missed: int
    violations: Mapping[str, float] = field(default_factory=dict)
    class_violations: Mapping[str, float] = field(default_factory=dict)
    ttft_quantiles: tuple[float, ...] = ()
    tbt_quantiles: tuple[float, ...] = ()
    missed_by_block: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    decision_seconds: Mapping[str, float] = field(default_factory=dict)
    decision_share: float = 0.0
    prediction_error: float | None = None
    iterations: int = 0
    preemptions: int = 0
    utilisation: float = 0.0
    wall_seconds: float = 0.0

    @property
    def violation(self) -> float:
        """Share of requests that missed a deadline; of a run that was ended early at least so many."""
        return self.missed / self.key.requests


def base_policy(policy: str) -> tuple[str, int | None]:
    """Splits a policy's text into what is left without its cap, and the cap (None: it has none in its text)."""
    name, _, rest = policy.partition(":")
    kept, cap = [], None
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key == CAP_PARAMETER:
            cap = int(value)
        else:
            kept.append(part)
    return f"{name}:{','.join(kept)}" if kept else name, cap


CAP_PARAMETER = "max_tokens"
"""The parameter that caps an iteration's tokens, decodes included; every policy that has a cap calls it so."""


def with_cap(policy: str, cap: int | None) -> str:
    """Returns a policy's text with a cap added; as it is for None."""
    if cap is None:
        return policy
    return f"{policy}{',' if ':' in policy else ':'}{CAP_PARAMETER}={cap}"


def to_row(point: Point) -> dict[str, Any]:
    """Returns a point as JSON values, with the policy split for readers."""
    values = asdict(point)
    base, cap = base_policy(point.key.policy)
    return {**values.pop("key"), "base_policy": base, "cap": cap, **values}


def from_row(row: Mapping[str, Any]) -> Point:
    """Returns the point of a row; raises KeyError, TypeError or ValueError if it is not one."""
    key = RunKey(
        str(row["profile"]),
        str(row["workload"]),
        str(row["policy"]),
        float(row["rate"]),
        int(row["seed"]),
        int(row["requests"]),
    )
    values = {name: row[name] for name in Point.__dataclass_fields__ if name != "key"}
    for name in ("ttft_quantiles", "tbt_quantiles", "missed_by_block", "block_sizes"):
        values[name] = tuple(values[name])
    return Point(key, **values)
