"""Writes the sidecar's settings file, with comments that say where the numbers come from."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from evaluation.tuning.answer import Answer
from evaluation.tuning.words import engines, promised, tested


class SettingsFileError(RuntimeError):
    """The settings file cannot be written; says why and the remedy."""


def check_free(file: Path, force: bool) -> None:
    """Raises SettingsFileError if the file cannot be written, or is there already and is not to be replaced."""
    if file.is_dir():
        raise SettingsFileError(f"--out {file}: is a folder; name a file in it")
    if not file.parent.is_dir():
        raise SettingsFileError(f"--out {file}: there is no folder {file.parent}; make it or give another file")
    if file.exists() and not force:
        raise SettingsFileError(f"--out {file}: is there already; give another file, or --force to replace it")


def write(answer: Answer, file: Path, force: bool) -> None:
    """Writes the file whole or not at all; raises what `check_free` raises."""
    check_free(file, force)
    try:
        partial = file.with_name(file.name + ".part")
        partial.write_text(to_toml(answer), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise SettingsFileError(f"--out {file}: cannot be written ({error.strerror}); give another file") from error


def to_toml(answer: Answer) -> str:
    """Returns the settings as TOML that the sidecar reads."""
    origin = f" (commit {answer.origin.commit})" if answer.origin.commit else ""
    digest = answer.origin.profiles[answer.profile]
    about = [
        f"Settings of the SlidingServe sidecar, by `slidingserve tune` of release {answer.origin.version}{origin}.",
        f"Traffic: {answer.traffic.name}. SLOs: {answer.slos}. Hardware profile {answer.profile}, digest {digest}.",
        promised(answer),
        *([] if answer.tested is None else [tested(answer)]),
        *([] if answer.engines is None else [engines(answer)]),
        *answer.warnings,
    ]
    return "\n".join(
        [
            *(_comment(text) for text in about),
            "",
            _comment(_why(answer)),
            f"policy = {_text(answer.best.policy)}",
            "",
            _comment("The hardware that it predicts iteration times for; it must be the engine's."),
            f"profile = {_text(answer.profile)}",
            "",
            _comment(
                "SLOs of requests that bring none. The promise is for requests with the SLOs above; where those differ "
                "from request to request these are the tightest, and each request has to bring its own."
            ),
            f"default_ttft_seconds = {answer.least_ttft_seconds:.6g}",
            f"default_tbt_seconds = {answer.least_tbt_seconds:.6g}",
            "",
        ]
    )


def _why(answer: Answer) -> str:
    rates = [f"{c.policy} {c.promised_rate:.3g}/s" for c in (answer.best, *answer.others)]
    return f"Best of {len(answer.screened)} settings. Promised rates of the last round: {'; '.join(rates)}."


def _comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _text(value: str) -> str:
    """Returns a basic string of TOML; JSON's escapes are among TOML's."""
    return json.dumps(value, ensure_ascii=False)
