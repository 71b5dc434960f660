"""Reading single values of settings and requests: each reader returns a value or raises `Refused` with the remedy."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

LONGEST_NAME = 64
"""Most characters in the name of a class, a tenant or an instance."""


class Refused(ValueError):
    """A value that cannot be used: ``value``, the ``remedy``, and ``path``, where it stands in what was given."""

    def __init__(self, value: object, remedy: str, path: str = "") -> None:
        super().__init__(remedy)
        self.value = value
        self.remedy = remedy
        self.path = path


def clean_name(text: str) -> str:
    """Returns ``text`` as the name of a class or tenant: printable characters only, 64 at most.

    Of a longer text only the first 256 characters are looked at.
    """
    if len(text) <= LONGEST_NAME and text.isprintable():
        return text.strip()
    head = text[: 4 * LONGEST_NAME]
    return "".join(filter(str.isprintable, head)).strip()[:LONGEST_NAME].strip()


def text(value: object) -> str:
    """Reads a text, without the spaces around it."""
    if not isinstance(value, str):
        raise Refused(value, "give a text")
    return value.strip()


def name(value: object) -> str:
    """Reads a name that `clean_name` leaves as it is; it may be empty."""
    stripped = text(value)
    if clean_name(stripped) != stripped:
        raise Refused(value, f"give at most {LONGEST_NAME} printable characters")
    return stripped


def number(lowest: float, highest: float, what: str, *, or_zero: bool = False) -> Callable[[object], float]:
    """Returns a reader of numbers, also given as text, in ``lowest..highest``; ``what`` describes them to users."""

    def read(value: object) -> float:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            result = float(value)
        except (ValueError, OverflowError):
            raise Refused(value, f"give {what}") from None
        if not (lowest <= result <= highest or (or_zero and result == 0.0)):  # NaN is refused, too
            raise Refused(value, f"give {what}")
        return result

    return read


def milliseconds(lowest: float, highest: float) -> Callable[[object], float]:
    """Returns a reader of milliseconds in ``lowest..highest``, or 0; it returns seconds."""
    read = number(lowest, highest, f"milliseconds from {lowest:g} to {highest:.0f}, or 0", or_zero=True)
    return lambda value: read(value) / 1000.0


def whole(lowest: int, highest: int) -> Callable[[object], int]:
    """Returns a reader of whole numbers in ``lowest..highest``."""
    what = f"a whole number from {lowest} to {highest}"
    read_number = number(lowest, highest, what)

    def read(value: object) -> int:
        result = read_number(value)
        if result != math.floor(result):
            raise Refused(value, f"give {what}")
        return int(result)

    return read


def switch(value: object) -> bool:
    """Reads true or false, also as text, 1 or 0."""
    if isinstance(value, (bool, int, str)):
        match str(value).strip().lower():
            case "true" | "1":
                return True
            case "false" | "0":
                return False
    raise Refused(value, "give true or false")


def one_of(*choices: str) -> Callable[[object], str]:
    """Returns a reader of one of these texts."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise Refused(value, f"give {', '.join(choices[:-1])} or {choices[-1]}")
        return value.strip().lower()

    return read


def only(given: Mapping[Any, Any], known: Collection[str]) -> None:
    """Refuses the first key of ``given`` that is not ``known``."""
    for key in given:
        if key not in known:
            shortened = str(key)[:LONGEST_NAME]
            near = nearest(shortened, known)
            hint = f"did you mean {near}?" if near else f"there are: {listed(known)}"
            raise Refused(given[key], f"no such key; {hint}", f".{shortened}")


def nearest(name: str, known: Collection[str]) -> str:
    """Returns the one of ``known`` that ``name`` is most like; empty: it is like none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), "")


def listed(names: Iterable[str]) -> str:
    """Returns names for a sentence."""
    return ", ".join(names) or "none"


def shown(value: object) -> str:
    """Returns a short printable text of anything, whatever its own ``__repr__`` does."""
    try:
        text = _short.repr(value)
        return text if text.isascii() and text.isprintable() else ascii(text)
    except Exception:
        return type(value).__name__


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
