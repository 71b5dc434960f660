"""Makes a folder of results as `slidingserve goodput` writes it: invented figures of the right form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

POLICIES = ("sarathi-edf", "qoserve", "slidingserve")
GOODPUT = {"sharegpt": 3.3, "arxiv-v1": 0.95, "arxiv-v2": 0.5, "mixed-v1": 1.85, "mixed-v2": 1.55}
FACTORS = {"sarathi-edf": 0.70, "qoserve": 0.88, "slidingserve": 1.0}
PAPER = {"sarathi-edf": 2.30, "qoserve": 3.00, "slidingserve": 3.30}
SEEDS = (0, 1, 2)
REQUESTS = 3000


def write_results(
    folder: Path,
    *,
    workloads: Sequence[str] = tuple(GOODPUT),
    policies: Sequence[str] = POLICIES,
    parquet: bool = True,
    timelines: bool = True,
) -> Path:
    """Writes all files; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for w in workloads for number, p in enumerate(policies) for row in runs(w, p, number)]
    (folder / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if parquet:
        write_parquet(folder / "points.parquet", rows)
    write_json(folder / "goodput.json", summary(workloads, policies))
    if timelines:
        write_json(folder / "timelines.json", [timeline(workloads[0], policy) for policy in policies])
    return folder


def write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document), encoding="utf-8")


def summary(workloads: Sequence[str] = ("mixed-v1",), policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """`goodput.json`: each policy's goodput is its factor of the workload's, its interval 3 % to either side."""
    values = {(w, p): goodput_of(w, p) for w in workloads for p in policies}
    cells = [
        {
            "profile": "rtx3090-tp2",
            "workload": workload,
            "policy": policy,
            "cap": 256,
            "goodput": value,
            "low": value * 0.97,
            "high": value * 1.03,
            "one_cap": {"cap": 512, "goodput": value * 0.9},
            "paper": PAPER.get(policy) if workload == "sharegpt" else None,
            "bound": GOODPUT[workload] * 1.25 if policy == policies[0] else None,
        }
        for (workload, policy), value in values.items()
    ]
    differences = [
        {
            "profile": "rtx3090-tp2",
            "workload": workload,
            "policy": policy,
            "against": against,
            "ratio": values[workload, policy] / values[workload, against],
            "low": values[workload, policy] / values[workload, against] - 0.04,
            "high": values[workload, policy] / values[workload, against] + 0.04,
        }
        for workload in workloads
        for policy in policies
        for against in policies
        if policy != against
    ]
    return {
        "schema": 1,
        "kind": "goodput",
        "commit": "0123456789ab",
        "version": "0.1.0",
        "profiles": {"rtx3090-tp2": "83705c2e"},
        "seeds": list(SEEDS),
        "requests": REQUESTS,
        "violation_limit": 0.01,
        "caps": [64, 128, 256, 512],
        "cells": cells,
        "differences": differences,
    }


def goodput_of(workload: str, policy: str) -> float:
    return round(GOODPUT[workload] * FACTORS.get(policy, 0.8), 2)


def full_text(policy: str) -> str:
    return f"{policy}{',' if ':' in policy else ':'}max_tokens=256"


def runs(workload: str, policy: str, number: int) -> Iterator[dict[str, Any]]:
    """Runs at the policy's best cap: below and at its goodput, two that ended early, and in overload."""
    goodput = goodput_of(workload, policy)
    common = round(GOODPUT[workload] * 0.7, 2)
    loads = {goodput * factor for factor in (0.5, 0.8, 0.9, 1.0, 1.06, 1.15, 1.5, 2.0)}
    for rate in sorted({round(load, 3) for load in loads} | {common}):
        for seed in SEEDS:
            yield run(workload, policy, rate, seed, number)


def run(workload: str, policy: str, rate: float, seed: int, number: int) -> dict[str, Any]:
    load = rate / goodput_of(workload, policy)
    complete = not 1.01 < load < 1.4
    noise = np.random.default_rng([seed, number, round(rate * 1000)]).uniform(0.8, 1.2)
    share = min(1.0, 0.008 * noise * load**2 if load <= 1.01 else (load - 1.0) * 0.45 * noise)
    spread = np.linspace(-2.3, 2.3, 101)
    ttft = 0.4 * (1 + number * 0.2) * np.exp(0.6 * spread * load)
    tbt = 0.03 * (1 + number * 0.1) * np.exp(0.3 * spread)
    return {
        "profile": "rtx3090-tp2",
        "workload": workload,
        "policy": full_text(policy),
        "base_policy": policy,
        "cap": 256,
        "rate": rate,
        "seed": seed,
        "requests": REQUESTS,
        "complete": complete,
        "missed": math.ceil(REQUESTS * (share if complete else 0.0107)),
        "violations": {"deadline": share, "gap": share, "tpot": share} if complete else {},
        "ttft_quantiles": ttft.tolist() if complete else [],
        "tbt_quantiles": tbt.tolist() if complete else [],
        "decision_seconds": {"p50": 2e-5 * (number + 1), "p99": 9e-5 * (number + 1)} if complete else {},
        "decision_share": 0.002 * (number + 1) if complete else 0.0,
        "iterations": 9000 if complete else 0,
        "utilisation": min(1.0, load) if complete else 0.0,
    }


def write_parquet(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = []
    for row in rows:
        values: dict[str, Any] = {}
        for name, value in row.items():
            inner = {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
            values.update(inner)
        flat.append(values)
    names = list(dict.fromkeys(name for values in flat for name in values))
    pq.write_table(pa.table({name: [values.get(name) for values in flat] for name in names}), file)


def timeline(workload: str, policy: str, seconds: float = 12.0) -> dict[str, Any]:
    """A run of iterations: decodes most of the time, a prompt's chunk in every fourth, a pure prefill now and then."""
    random = np.random.default_rng([len(policy), len(workload)])
    rows: list[list[float]] = []
    now, number = 100.0, 0
    while now < 100.0 + seconds:
        decode = 0 if number % 23 == 0 else int(random.integers(20, 60))
        prefill = int(random.integers(100, 256 - decode)) if number % 4 == 0 or not decode else 0
        taken = 0.015 + prefill * 3e-4
        missed = int(random.uniform() < (0.04 if policy == "slidingserve" else 0.12))
        rows.append([now, taken, prefill, decode, missed])
        now += taken
        number += 1
    return {
        "profile": "rtx3090-tp2",
        "workload": workload,
        "policy": full_text(policy),
        "rate": 2.5,
        "seed": 0,
        "limit_seconds": seconds,
        "iterations": rows,
    }
