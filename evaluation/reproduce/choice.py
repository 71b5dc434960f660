"""What a goodput run in the same folder has found: each policy's best settings, and SlidingServe's goodput."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.goodput.points import with_cap
from evaluation.goodput.store import StoreError
from evaluation.goodput.summary import NAME, SCHEMA


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy with its settings. ``goodput``: requests/s, None where the folder does not tell it."""

    policy: str
    text: str
    goodput: float | None = None


def chosen(folder: Path, profile: str, workload: str, policies: Sequence[str], cap: int) -> list[Chosen]:
    """Returns each policy with its best cap (and variant) on this workload, or with ``cap`` where that is not known.

    Raises StoreError if the folder's summary is damaged.
    """
    cells = [cell for cell in _cells(folder) if (cell["profile"], cell["workload"]) == (profile, workload)]
    return [_best(cells, policy) or Chosen(policy, with_cap(policy, cap)) for policy in policies]


def is_known(found: Sequence[Chosen]) -> bool:
    """Says whether a goodput run has told the settings of all of them."""
    return all(one.goodput is not None for one in found)


def _best(cells: Sequence[dict[str, Any]], policy: str) -> Chosen | None:
    mine = [c for c in cells if c["policy"] == policy or str(c["policy"]).startswith(f"{policy}:")]
    if not mine:
        return None
    best = max(mine, key=lambda cell: (cell["goodput"], cell["policy"] == policy))
    text = with_cap(best["policy"], best["cap"])
    return Chosen(policy, text, float(best["goodput"]))


def _cells(folder: Path) -> list[dict[str, Any]]:
    file = folder / NAME
    if not file.is_file():
        return []
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        cells: list[dict[str, Any]] = [
            {name: cell[name] for name in ("profile", "workload", "policy", "cap", "goodput")}
            for cell in document["cells"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file}: is damaged ({error!r}); repeat `slidingserve reproduce goodput`") from error
    return cells
