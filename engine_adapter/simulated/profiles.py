"""Hardware profiles: the limits of an engine on one kind of GPU and the fitted parameters of its iteration time.

A profile is a small JSON file with a schema version and a SHA-256 digest. The built-in ones are our own fits to
measured kernel tables (``slidingserve profiles fit`` reproduces them), so the simulated engine needs no tables.
`engine_adapter.simulated.timing.ProfileTimer` evaluates one; this module only reads, checks and writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Any

SCHEMA = 1

# What the fitted coefficients multiply, in the order in which `timing.batch_features` computes them; "kv" is the sum of
# the decodes' contexts in tokens, "mixed" counts only in iterations with both decodes and prefills.
FEATURES = (
    "decode_requests_to_8",
    "decode_requests_to_32",
    "decode_requests_to_128",
    "decode_requests_above_128",
    "decode_kv_to_4k",
    "decode_kv_to_16k",
    "decode_kv_to_64k",
    "decode_kv_to_256k",
    "decode_kv_above_256k",
    "decode_longest_context",
    "mixed_iteration",
    "mixed_requests_to_32",
    "mixed_requests_above_32",
    "mixed_kv_to_8k",
    "mixed_kv_to_32k",
    "mixed_kv_to_128k",
    "mixed_kv_to_256k",
    "mixed_kv_above_256k",
    "mixed_longest_context",
    "mixed_longest_tile",
    "mixed_critical_path",
    "mixed_larger_work",
    "mixed_requests_x_chunk_to_64",
    "mixed_requests_x_chunk_to_256",
    "mixed_kv_x_chunk_to_512",
    "prefill_requests",
    "prefill_only_iteration",
    "prefill_causal",
    "prefill_prefix",
    "prefill_prefix_chunk_at_least_256",
    "prefill_prefix_chunk_above_512",
    "prefill_context",
    "prefill_context_to_2k",
    "prefill_tile_work",
    "prefill_largest_prefix",
    "prefill_largest_causal",
    "logits_to_64",
    "logits_to_128",
    "logits_to_256",
    "logits_above_256",
)

_FIT_AGAIN = "fit it again with `slidingserve profiles fit`"
_LIMITS = ("kv_blocks", "kv_block_tokens", "max_tokens_per_iteration", "max_sequences")


class ProfileError(ValueError):
    """A profile that does not exist or cannot be trusted; the message names it, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class TimingParameters:
    """Parameters of an iteration's time; seconds, none negative.

    The linear layers are a staircase over the iteration's TOTAL tokens: between ``token_edges[i]`` (exclusive) and
    ``token_edges[i + 1]`` (inclusive) the time runs straight between the two numbers of ``segment_seconds[i]``; between
    segments it jumps, as GEMM tiles fill up. ``feature_seconds`` holds one coefficient per name in `FEATURES`.
    ``parallel_tiles`` is how many 64-token query tiles the GPU attends to at once: multiprocessors / query heads.
    """

    token_edges: tuple[int, ...]
    segment_seconds: tuple[tuple[float, float], ...]
    feature_seconds: tuple[float, ...]
    parallel_tiles: float

    @property
    def count(self) -> int:
        """Number of fitted parameters."""
        return 2 * len(self.segment_seconds) + len(self.feature_seconds)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One GPU type with one model: limits, iteration time, and where the numbers come from.

    ``fit_errors[scenario][metric]`` are held-out errors of the fit (``mape_percent``, ``mae_ms``, ``rmse_ms``, ``r2``).
    ``cpu_seconds_per_iteration`` is what an iteration takes beyond its kernels; `timing.ProfileTimer` adds it.
    """

    name: str
    gpu: str
    tensor_parallel: int
    model: str
    kv_blocks: int
    max_sequences: int
    parameters: TimingParameters
    kv_block_tokens: int = 16
    max_tokens_per_iteration: int = 2048
    cpu_seconds_per_iteration: float = 0.0
    provenance: str = ""
    fit_errors: Mapping[str, Mapping[str, float]] | None = None

    @property
    def kv_tokens(self) -> int:
        """KV cache capacity in tokens."""
        return self.kv_blocks * self.kv_block_tokens

    @property
    def digest(self) -> str:
        """SHA-256 over everything in the profile, as hex digits."""
        return _digest(_document(self))


def profile_names() -> tuple[str, ...]:
    """Returns the names of the built-in profiles, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Reads a built-in profile by name, or any profile by the path of its file (anything that ends in ``.json``).

    Raises `ProfileError` when it does not exist, cannot be parsed, was written by a newer version, or was altered.
    """
    text_name = str(name_or_path)
    if isinstance(name_or_path, Path) or text_name.endswith(".json"):
        return read_profile(Path(name_or_path))
    if text_name not in profile_names():
        raise ProfileError(
            f"unknown profile {text_name!r}: choose one of {', '.join(profile_names())}, "
            "or give the path of a .json file"
        )
    return read_profile(_folder() / f"{text_name}.json")


def read_profile(path: Path | Traversable) -> HardwareProfile:
    """Reads and checks one profile file; raises `ProfileError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path}: cannot be read as UTF-8 text ({error}); check the path") from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"profile {path}: not JSON ({error}); {_FIT_AGAIN}") from error
    return _parse(document, str(path))


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes ``profile`` as JSON with its digest; raises `ProfileError` if it would not be readable again."""
    document = _document(profile)
    text = json.dumps({**document, "digest": _digest(document)}, indent=1)
    _parse(json.loads(text), str(path))
    path.write_text(text + "\n", encoding="utf-8")


def _folder() -> Traversable:
    return resources.files(__package__) / "profiles"


def _document(profile: HardwareProfile) -> dict[str, Any]:
    p = profile.parameters
    return {
        "schema": SCHEMA,
        "name": profile.name,
        "gpu": profile.gpu,
        "tensor_parallel": profile.tensor_parallel,
        "model": profile.model,
        "kv_blocks": profile.kv_blocks,
        "kv_block_tokens": profile.kv_block_tokens,
        "max_tokens_per_iteration": profile.max_tokens_per_iteration,
        "max_sequences": profile.max_sequences,
        "cpu_seconds_per_iteration": profile.cpu_seconds_per_iteration,
        "provenance": profile.provenance,
        "fit_errors": {k: dict(v) for k, v in (profile.fit_errors or {}).items()},
        "fitted_parameters": p.count,
        "parallel_tiles": p.parallel_tiles,
        "token_edges": list(p.token_edges),
        "segment_seconds": [list(s) for s in p.segment_seconds],
        "feature_seconds": dict(zip(FEATURES, p.feature_seconds, strict=True)),
    }


def _digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parse(document: Any, where: str) -> HardwareProfile:
    """Builds the profile from a parsed file; every refusal names the field, its value and what to do."""
    if not isinstance(document, dict):
        raise ProfileError(f"profile {where}: holds a {type(document).__name__}, not an object; {_FIT_AGAIN}")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise ProfileError(f"profile {where}: schema is {schema!r}, expected {SCHEMA}; {_FIT_AGAIN}")
    if schema > SCHEMA:
        raise ProfileError(f"profile {where}: schema {schema} is newer than {SCHEMA}; upgrade slidingserve")
    content = {k: v for k, v in document.items() if k != "digest"}
    if document.get("digest") != _digest(content):
        raise ProfileError(
            f"profile {where}: digest is {document.get('digest')!r}, its content has {_digest(content)!r}; "
            f"undo the change or {_FIT_AGAIN}"
        )
    try:
        return _profile(content)
    except ProfileError as error:
        raise ProfileError(f"profile {where}: {error}; {_FIT_AGAIN}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"profile {where}: missing or malformed field ({error!r}); {_FIT_AGAIN}") from error


def _profile(content: Mapping[str, Any]) -> HardwareProfile:
    limits = {field: _positive_int(field, content[field]) for field in (*_LIMITS, "tensor_parallel")}
    coefficients = content["feature_seconds"]
    if set(coefficients) != set(FEATURES):
        odd = sorted(set(coefficients) ^ set(FEATURES))
        raise ProfileError(f"feature_seconds lacks or does not know {', '.join(odd)}")
    edges = tuple(_edge(i, e) for i, e in enumerate(content["token_edges"]))
    segments = tuple(
        (_amount(f"segment_seconds[{i}][0]", start), _amount(f"segment_seconds[{i}][1]", end))
        for i, (start, end) in enumerate(content["segment_seconds"])
    )
    if len(edges) < 3 or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ProfileError(f"token_edges is {list(edges)}, expected at least 3 rising numbers from 0")
    if len(segments) != len(edges) - 1:
        raise ProfileError(f"segment_seconds has {len(segments)} entries, expected {len(edges) - 1}")
    if any(min(segment) <= 0.0 for segment in segments):
        raise ProfileError("segment_seconds holds a zero, expected positive seconds")
    tiles = _amount("parallel_tiles", content["parallel_tiles"])
    if tiles == 0.0:
        raise ProfileError("parallel_tiles is 0, expected a positive number")
    return HardwareProfile(
        name=str(content["name"]),
        gpu=str(content["gpu"]),
        tensor_parallel=limits["tensor_parallel"],
        model=str(content["model"]),
        kv_blocks=limits["kv_blocks"],
        max_sequences=limits["max_sequences"],
        parameters=TimingParameters(
            edges, segments, tuple(_amount(f"feature_seconds.{name}", coefficients[name]) for name in FEATURES), tiles
        ),
        kv_block_tokens=limits["kv_block_tokens"],
        max_tokens_per_iteration=limits["max_tokens_per_iteration"],
        cpu_seconds_per_iteration=_amount("cpu_seconds_per_iteration", content["cpu_seconds_per_iteration"]),
        provenance=str(content["provenance"]),
        fit_errors={str(k): {str(m): float(e) for m, e in v.items()} for k, v in content["fit_errors"].items()},
    )


def _amount(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{field} is {value!r}, expected a finite number >= 0")
    return float(value)


def _positive_int(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"{field} is {value!r}, expected a whole number >= 1")
    return value


def _edge(index: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"token_edges[{index}] is {value!r}, expected a whole number >= 0")
    return value
