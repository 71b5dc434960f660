"""How a report looks: colours and markers of policies, and how numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's colours, told apart by people who see colours differently; without their yellow, too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
_MARKERS = ("o", "s", "D", "P", "v", "X", "*", "p")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5.0, 1.5), (1.5, 1.5), (6.0, 1.5, 1.5, 1.5), (3.0, 1.0))

CONTENTS = (("decode only", "#9ECAE1"), ("mixed", "#E69F00"), ("prefill only", "#3B2F80"))
"""What an iteration holds, and its colour; their lightness differs too, for print."""

NOTHING = "\u2013"
"""Stands in a table where nothing is known."""

LIMIT = "#B00020"
INK, FAINT = "#222222", "#D8D8D8"


@dataclass(frozen=True, slots=True)
class Look:
    """How a policy is drawn; no two of up to 56 policies have colour and marker in common."""

    colour: str
    marker: str
    dashes: tuple[float, ...]


def looks(policies: Sequence[str]) -> dict[str, Look]:
    """Returns the look of each policy."""
    return {
        policy: Look(_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)], _DASHES[number % len(_DASHES)])
        for number, policy in enumerate(policies)
    }


def wrapped(policy: str, width: int = 20) -> str:
    """Returns a policy's text in lines of about ``width``, broken behind a colon or comma."""
    lines = [""]
    for part in policy.replace(":", ":\n").replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def rate(value: float | None) -> str:
    """Returns requests/s with two decimals; `NOTHING` where nothing is known."""
    return NOTHING if value is None else f"{value:.2f}"


def percent(share: float, digits: int = 1) -> str:
    """Returns a share in percent."""
    return f"{share * 100:.{digits}f} %"


def duration(seconds: float) -> str:
    """Returns seconds with three digits in the unit that fits: 45 µs, 1.2 ms, 3.4 s."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if round(seconds * factor, 1) < 1000:
            return f"{_short(seconds * factor)} {unit}"
    return f"{_short(seconds)} s"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def listed(words: Sequence[str]) -> str:
    """Returns words as in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural where it has to be."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
