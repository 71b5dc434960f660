"""What a reproduced table is, as a value, on the screen and as JSON; the same for all of them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.goodput.provenance import Provenance
from evaluation.goodput.screen import columns
from evaluation.goodput.store import StoreError
from evaluation.reproduce.verdicts import Gain, Verdict

SCHEMA = 1
WIDTH = 118


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as it is printed."""
    return f"{title}\n\n{columns(header, rows)}"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says, and what came of it.

    Attributes:
        where: the workload, load or policy that it is about.
        what: the claim, without judgement, such as "slidingserve / qoserve".
        kind: ``ratio`` of goodputs, ``share`` (difference of two shares of violations), ``order`` or ``bound``.
        gain: ours; None for an order.
        published: the paper's; None where it gives none.
    """

    profile: str
    where: str
    what: str
    kind: str
    verdict: Verdict
    gain: Gain | None = None
    published: float | None = None


@dataclass(frozen=True, slots=True)
class Reproduced:
    """One reproduced table.

    Attributes:
        name: the subcommand.
        settings: what it was made with, for the JSON.
        figures: rows of machine-readable figures behind the tables.
        sentences: what holds and what does not, in words.
        notes: what a reader must know.
    """

    name: str
    origin: Provenance
    settings: Mapping[str, Any]
    tables: tuple[str, ...]
    claims: tuple[Claim, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = field(default=())


def render(found: Reproduced) -> str:
    """Returns the tables, the claims and the words."""
    origin = found.origin
    commit = f"commit {origin.commit}, " if origin.commit else ""
    parts = list(found.tables)
    if found.claims:
        parts.append(_claims(found.claims))
    parts += [_fill(sentence) for sentence in found.sentences]
    parts += [_fill(f"Note: {note}", "  ") for note in found.notes]
    digests = ", ".join(f"{name} {digest[:8]}" for name, digest in origin.profiles.items())
    parts.append(f"({commit}profile digest {digests})")
    return "\n\n".join(parts) + "\n"


def _claims(claims: Sequence[Claim]) -> str:
    rows = [
        (
            claim.profile,
            claim.where,
            claim.what,
            *_gain(claim),
            _amount(claim.published, claim.kind),
            str(claim.verdict),
        )
        for claim in claims
    ]
    return table("Ours beside the paper's", ("profile", "where", "claim", "ours", "95 %", "paper", "verdict"), rows)


def _gain(claim: Claim) -> tuple[str, str]:
    if claim.gain is None:
        return "", ""
    low, high = (_amount(value, claim.kind) for value in (claim.gain.low, claim.gain.high))
    return _amount(claim.gain.value, claim.kind), f"{low} to {high}" if low and high else ""


def _amount(value: float | None, kind: str) -> str:
    """Returns a ratio, or a share in points or percent; nothing for what is not known."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "none" if value < 0 else "unbounded"
    return {"share": f"{100 * value:+.1f} points", "bound": f"{100 * value:.2f} %"}.get(kind, f"{value:.2f}")


def _fill(text: str, following: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=following)


def to_json(found: Reproduced) -> dict[str, Any]:
    """Returns the document (schema 1); what is not finite becomes null."""
    return {
        "schema": SCHEMA,
        "kind": f"reproduce-{found.name}",
        "commit": found.origin.commit,
        "version": found.origin.version,
        "code": found.origin.code,
        "profiles": found.origin.profiles,
        **found.settings,
        "figures": [{name: _finite(value) for name, value in row.items()} for row in found.figures],
        "claims": [
            {
                "profile": claim.profile,
                "where": claim.where,
                "what": claim.what,
                "kind": claim.kind,
                "verdict": str(claim.verdict),
                "ours": _finite(None if claim.gain is None else claim.gain.value),
                "low": _finite(None if claim.gain is None else claim.gain.low),
                "high": _finite(None if claim.gain is None else claim.gain.high),
                "paper": _finite(claim.published),
            }
            for claim in found.claims
        ],
        "sentences": list(found.sentences),
        "notes": list(found.notes),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(found: Reproduced, folder: Path) -> Path:
    """Writes ``reproduce-NAME.json`` into the folder; raises StoreError."""
    file = folder / f"reproduce-{found.name}.json"
    try:
        file.write_text(json.dumps(to_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{file}: cannot be written ({error.strerror}); free space or give another --out") from error
    return file


def percent(share: float | None) -> str:
    """Returns a share as text; empty where it is not known."""
    return "" if share is None or math.isnan(share) else f"{100 * share:.1f} %"
