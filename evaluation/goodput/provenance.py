"""Where results come from: the code, the hardware profiles. Results of different origin are never mixed in a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_adapter.simulated.profiles import load_profile
from evaluation.goodput.store import StoreError
from slidingserve import __version__
from slidingserve.jit import source_digest

FILE = "provenance.json"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made results.

    The release, the commit (empty outside a checkout; ``+`` behind it: with changes), a digest of our source files, and
    the profiles' digests by name.
    """

    version: str
    commit: str
    code: str
    profiles: dict[str, str]


def provenance(profiles: Sequence[str]) -> Provenance:
    """Returns what results that are made now come from."""
    return Provenance(__version__, _commit(), source_digest(), {name: load_profile(name).digest for name in profiles})


def _commit() -> str:
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(here), *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()  # noqa: S603

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
        return git("rev-parse", "HEAD")[:12] + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def claim(folder: Path, ours: Provenance) -> None:
    """Marks a folder as holding results of this origin; raises StoreError if it holds others."""
    file = folder / FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(ours), indent=2) + "\n", encoding="utf-8")
        return
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
        known = dict(theirs["profiles"])
        code = str(theirs["code"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file}: is damaged ({error!r}); give another --out") from error
    if code != ours.code:
        raise StoreError(
            f"{folder} holds results of other code (commit {theirs.get('commit') or 'unknown'}, digest {code}; this is "
            f"{ours.commit or 'unknown'}, {ours.code}); give another --out"
        )
    for name, digest in ours.profiles.items():
        if known.setdefault(name, digest) != digest:
            raise StoreError(
                f"{folder} holds results of another profile {name} (digest {known[name]}); give another --out"
            )
    file.write_text(json.dumps({**theirs, "profiles": known}, indent=2) + "\n", encoding="utf-8")
