"""Readers of the public kernel tables: each returns curves and grids in seconds for the whole model (32 layers).

Where the files come from, their units and licences: the data folder's README. Llama-3-8B: 32 layers, 32 query heads,
8 key/value heads, hidden size 4096, MLP 14336, vocabulary 128256.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.hardware.grids import Curve, Grid, fill_gaps
from slidingserve.contract.values import Floats

LAYERS = 32
HEADS = 32
KV_HEADS = 8
HIDDEN = 4096
MLP = 14336
VOCABULARY = 128256
ENVIRONMENT = "SLIDINGSERVE_DATA"

_GRID_CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_GRID_CONTEXTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_GRID_PREFIXES = (0, 512, 1024, 2048, 4096, 8192, 16384)
# The skew file holds the sum of three repeats: its equal-context calls take 2.98-3.00 x those of the attention file.
_SKEW_REPEATS = 3.0


class DataError(ValueError):
    """The data folder or one of its files is missing or unusable; the message says which and what to do."""


def resolve_folder(option: Path | None = None) -> Path:
    """Returns the data folder: ``option``, else the environment variable SLIDINGSERVE_DATA; raises `DataError`."""
    chosen = option if option is not None else os.environ.get(ENVIRONMENT)
    if not chosen:
        raise DataError(
            f"no data folder: pass --data FOLDER or set {ENVIRONMENT} to the folder of public kernel tables"
        )
    folder = Path(chosen)
    if not (folder / "llmservingsim").is_dir():
        raise DataError(
            f"data folder {str(folder)!r} has no llmservingsim/ in it: pass the folder of public kernel tables"
        )
    return folder


def read_csv(folder: Path, name: str) -> Any:
    """Returns one file of the data folder as a pandas DataFrame; raises `DataError`."""
    import pandas as pd

    try:
        return pd.read_csv(folder / name)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {str(folder / name)!r}: {error}; fetch the data folder again") from error


def floats(values: Any) -> Floats:
    """Returns anything array-like as float64."""
    return np.asarray(values, np.float64)


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Attention of vLLM as measured; seconds over all layers.

    ``decode(requests, context)``; ``prefill(chunk, prefix)``; ``added(chunk, prefix, requests, context)`` is what
    decodes add to a prefill when both share a call; ``single(context)`` is one decode that is not split over the
    context, the time of one thread block; ``decode_tail(requests)`` and ``mixed_tail(requests, chunk)`` say how much of
    the longest request's own excess over the mean is seen in the call, as unequal contexts leave a tail.
    """

    decode: Grid
    prefill: Grid
    added: Grid
    single: Curve
    decode_tail: Curve
    mixed_tail: Grid
    call_seconds: float


def read_vllm_attention(folder: Path, stem: str) -> AttentionTables:
    """Returns the attention tables of ``vllm019_{stem}_attention.csv`` and ``_skew.csv``."""
    frame = read_csv(folder, f"llmservingsim/vllm019_{stem}_attention.csv")
    frame = frame.assign(seconds=frame.time_us * (LAYERS * 1e-6))
    alone = frame[frame.n_decode == 0]
    prefill = alone[alone.prefill_chunk.isin(_GRID_CHUNKS)]
    decode = frame[frame.prefill_chunk == 0]
    mixed = frame[
        frame.prefill_chunk.isin(_GRID_CHUNKS)
        & frame.kv_prefill.isin(_GRID_PREFIXES)
        & (frame.n_decode > 0)
        & frame.kv_decode.isin(_GRID_CONTEXTS)
    ].merge(
        alone[["prefill_chunk", "kv_prefill", "seconds"]], on=["prefill_chunk", "kv_prefill"], suffixes=("", "_alone")
    )
    mixed = mixed.assign(seconds=np.maximum(mixed.seconds - mixed.seconds_alone, 0.0))
    one = frame[(frame.prefill_chunk == 16) & (frame.kv_prefill == 0) & (frame.n_decode == 1)].sort_values("kv_decode")
    single = Curve(floats(one.kv_decode), floats(one.seconds))
    decode_tail, mixed_tail = _read_tails(folder, stem, single)
    return AttentionTables(
        decode=grid_of(decode, ("n_decode", "kv_decode")),
        prefill=grid_of(prefill, ("prefill_chunk", "kv_prefill")),
        added=grid_of(mixed, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")),
        single=single,
        decode_tail=decode_tail,
        mixed_tail=mixed_tail,
        call_seconds=float(decode.seconds.min()),
    )


def _read_tails(folder: Path, stem: str, single: Curve) -> tuple[Curve, Grid]:
    """Fits the visible share of the longest request's excess, where at most a quarter of the requests is long."""
    skew = read_csv(folder, f"llmservingsim/vllm019_{stem}_skew.csv")
    skew = skew[(skew.kp == 0) & (skew.nb <= np.maximum(1, skew.n // 4))]
    excess = floats([single(b) - single(m) for b, m in zip(skew.kv_big, skew.kv_mean, strict=True)])
    seen = floats((skew.t_skew_us - skew.t_mean_us) * (LAYERS * 1e-6 / _SKEW_REPEATS))
    clear = excess > 5e-6 * LAYERS
    skew = skew[clear].assign(share=np.clip(seen[clear] / excess[clear], 0.0, 1.5))
    pure = skew[skew.regime == "pure"].groupby("n").share.median()
    mixed = skew[skew.regime == "mixed"].pivot_table(index="n", columns="pc", values="share", aggfunc="median")
    axes = (floats([1, *mixed.index]), floats(mixed.columns))
    shares = fill_gaps(np.vstack((np.zeros(mixed.shape[1]), floats(mixed.to_numpy()))), axes)
    return (
        Curve(floats([1, *pure.index, 1e6]), floats([0.0, *pure, pure.iloc[-1]])),
        Grid((np.append(axes[0], 1e6), axes[1]), np.vstack((shares, shares[-1:]))),
    )


def grid_of(frame: Any, axes: tuple[str, ...], value: str = "seconds") -> Grid:
    """Returns the grid of ``value`` over the named columns, gaps filled."""
    points = [floats(np.sort(frame[a].unique())) for a in axes]
    values = np.full([len(p) for p in points], np.nan)
    at = tuple(np.searchsorted(p, floats(frame[a])) for p, a in zip(points, axes, strict=True))
    values[at] = frame[value]
    return Grid(points, fill_gaps(values, points))


def read_vllm_dense(folder: Path, stem: str) -> Curve:
    """Returns the time of everything but attention and logits, by total tokens."""
    frame = read_csv(folder, f"llmservingsim/vllm019_{stem}_dense.csv")
    wide = frame.pivot_table(index="tokens", columns="layer", values="time_us")
    layer = wide[["qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj"]].sum(axis=1)
    total = LAYERS * (layer + 2 * wide["layernorm"]) + wide["embedding"] + wide["final_layernorm"]
    return Curve(floats(wide.index), floats(total) * 1e-6)


def read_vllm_logits(folder: Path, stem: str) -> Curve:
    """Returns the time of logits and sampling, by requests."""
    frame = read_csv(folder, f"llmservingsim/vllm019_{stem}_per_sequence.csv")
    total = frame.groupby("sequences").time_us.sum()
    return Curve(floats(total.index), floats(total) * 1e-6)


def read_all_reduce(folder: Path, name: str) -> Curve:
    """Returns the time of one all-reduce of two GPUs inside a CUDA graph, by tokens (bf16, hidden size 4096)."""
    frame = read_csv(folder, f"aiconfigurator/{name}_allreduce.csv")
    frame = frame[(frame.num_gpus == 2) & (frame.backend == "vllm_graph")].sort_values("message_size_elems_or_bytes")
    return Curve(floats(frame.message_size_elems_or_bytes) / HIDDEN, floats(frame.latency_ms) * 1e-3)


def read_context_attention(folder: Path, name: str, tensor_parallel: int) -> Curve:
    """Returns prompt attention without prefix over all layers, by prompt tokens."""
    frame = read_csv(folder, f"aiconfigurator/{name}_context_attention.csv")
    frame = frame[
        (frame.num_heads == HEADS // tensor_parallel)
        & (frame.num_kv_heads == KV_HEADS // tensor_parallel)
        & (frame.batch_size == 1)
    ]
    best = frame.groupby("isl").latency_ms.min()
    return Curve(floats(best.index), floats(best) * (LAYERS * 1e-3))


def read_generation_attention(folder: Path, name: str, tensor_parallel: int) -> Grid:
    """Returns decode attention over all layers, by requests and context."""
    frame = read_csv(folder, f"aiconfigurator/{name}_generation_attention.csv")
    frame = frame[(frame.num_heads == HEADS // tensor_parallel) & (frame.num_kv_heads == KV_HEADS // tensor_parallel)]
    frame = frame.assign(context=frame.isl + frame.step, seconds=frame.latency_ms * (LAYERS * 1e-3))
    best = frame.groupby(["batch_size", "context"], as_index=False).seconds.min()
    return grid_of(best, ("batch_size", "context"))


def read_gemm(folder: Path, name: str) -> dict[tuple[int, int], Any]:
    """Returns seconds of one bf16 GEMM by (n, k), each a pandas Series over m."""
    frame = read_csv(folder, f"aiconfigurator/{name}_gemm_bf16.csv")
    return {key: rows.set_index("m").latency_ms.sort_index() * 1e-3 for key, rows in frame.groupby(["n", "k"])}
