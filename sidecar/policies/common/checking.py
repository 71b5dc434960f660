"""Ranges of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAP = (0, 1_000_000)
"""Of a parameter ``max_tokens``; 0 is a word of its own."""
OUTPUT_TOKENS = (0.0, 1e6)
SECONDS = (0.0, 3600.0)


def check_ranges(parameters: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError (field, remedy) for the first parameter that is out of its range; None is in any."""
    for name, (low, high) in ranges.items():
        value = getattr(parameters, name)
        if value is not None and not low <= value <= high:
            raise ValueError(name, f"give a number from {low:g} to {high:g}")
