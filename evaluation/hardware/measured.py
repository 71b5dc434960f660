"""Iteration time summed from measured kernel tables: what the simulated engine is validated with.

Everything measured is used as measured (tile staircase, decodes that share a call with a prefill, unequal contexts).
Several prefills of one iteration are added as separate calls. No CPU time, no noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.hardware import tables
from evaluation.hardware.grids import Curve, Grid
from slidingserve.contract.values import Floats, Ints

# Kernels work on tiles of at least this many query tokens; the tables start there.
_SMALLEST_CHUNK = 16
_MEASURED_CHUNK = 2048
_MEASURED_PREFIX = 16384


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration, split: prefills as (chunk, prefix) with the longest first, decodes as an array of contexts."""

    tokens: int
    prefills: list[tuple[int, int]]
    decodes: Ints

    @classmethod
    def of(cls, chunk: Ints, context: Ints, count: int) -> Batch:
        """Splits the first ``count`` entries of an iteration, see `IterationTimer`."""
        chunk, context = chunk[:count], context[:count]
        decode = (chunk == 1) & (context > 0)
        rest = np.flatnonzero(~decode & (chunk > 0))
        prefills = sorted(zip(chunk[rest].tolist(), context[rest].tolist(), strict=True), key=_work, reverse=True)
        return cls(int(chunk.sum()), prefills, context[decode])

    @property
    def requests(self) -> int:
        """Requests that take part."""
        return len(self.prefills) + len(self.decodes)


def _work(prefill: tuple[int, int]) -> int:
    chunk, prefix = prefill
    return chunk * (chunk + prefix)


class MeasuredTimer:
    """Sum of linear layers by total tokens, logits by requests, and an attention model; implements `IterationTimer`."""

    def __init__(
        self, dense: Curve, logits: Curve, attention: Callable[[Batch], float], cpu_seconds: float = 0.0
    ) -> None:
        self._dense, self._logits, self._attention = dense, logits, attention
        self._cpu_seconds = cpu_seconds

    def seconds(self, chunk: Ints, context: Ints, count: int) -> float:
        """See `IterationTimer.seconds`. About 0.15 ms."""
        batch = Batch.of(chunk, context, count)
        if batch.requests == 0:
            return 0.0
        kernels = self._dense(batch.tokens) + self._logits(batch.requests) + self._attention(batch)
        return kernels + self._cpu_seconds


class VllmAttention:
    """Attention of a vLLM call, from measured mixed calls."""

    def __init__(self, measured: tables.AttentionTables) -> None:
        self._measured = measured

    def __call__(self, batch: Batch) -> float:
        """Returns seconds over all layers."""
        m = self._measured
        if not batch.prefills:
            requests, mean, excess = self._decodes(batch.decodes)
            return m.decode(requests, mean) + m.decode_tail(requests) * excess
        calls = [m.prefill(max(chunk, _SMALLEST_CHUNK), prefix) for chunk, prefix in batch.prefills]
        seconds = sum(calls) - m.call_seconds * (len(calls) - 1)
        if len(batch.decodes):
            requests, mean, excess = self._decodes(batch.decodes)
            chunk = min(max(batch.prefills[0][0], _SMALLEST_CHUNK), _MEASURED_CHUNK)
            prefix = min(batch.prefills[0][1], _MEASURED_PREFIX)
            seconds += max(0.0, m.added(chunk, prefix, requests, mean)) + m.mixed_tail(requests, chunk) * excess
        return seconds

    def _decodes(self, contexts: Ints) -> tuple[int, float, float]:
        """Returns the number of decodes, their mean context, and the longest one's own excess seconds over the mean."""
        mean = float(contexts.mean())
        return len(contexts), mean, self._measured.single(float(contexts.max())) - self._measured.single(mean)


class SummedAttention:
    """Attention where no mixed calls were measured: prefills and decodes added; unequal contexts by their mean."""

    def __init__(
        self, prompt: Curve, prefix_ratio: Callable[[int, int], float], decode: Grid, decode_scale: float = 1.0
    ) -> None:
        self._prompt, self._prefix_ratio, self._decode, self._decode_scale = prompt, prefix_ratio, decode, decode_scale

    def __call__(self, batch: Batch) -> float:
        """Returns seconds over all layers."""
        seconds = 0.0
        for chunk, prefix in batch.prefills:
            seconds += self._prompt(chunk) * (self._prefix_ratio(chunk, prefix) if prefix else 1.0)
        if len(batch.decodes):
            seconds += self._decode(len(batch.decodes), float(batch.decodes.mean())) * self._decode_scale
        return seconds


def prefix_ratio_like(reference: Grid) -> Callable[[int, int], float]:
    """Returns how much longer a chunk takes with a prefix than without, taken from another GPU's measured grid."""

    def ratio(chunk: int, prefix: int) -> float:
        if chunk > _MEASURED_CHUNK:
            return 1.0 + 2.0 * prefix / chunk
        chunk = max(chunk, _SMALLEST_CHUNK)
        measured = reference(chunk, min(prefix, _MEASURED_PREFIX)) / reference(chunk, 0)
        return max(1.0, measured * max(1.0, prefix / _MEASURED_PREFIX))

    return ratio


def vllm_timer(folder: Path, stem: str) -> MeasuredTimer:
    """RTX 4090 or RTX PRO 6000: every kernel measured inside vLLM 0.19; the all-reduce of TP2 was not."""
    attention = VllmAttention(tables.read_vllm_attention(folder, stem))
    return MeasuredTimer(tables.read_vllm_dense(folder, stem), tables.read_vllm_logits(folder, stem), attention)


def a100_timer(folder: Path) -> MeasuredTimer:
    """A100 TP1: operators of the exact shapes, FlashAttention 2 tables, prefixes in the RTX 4090's proportion."""
    frame = tables.read_csv(folder, "vidur/mlp_a100_llama3-8b.csv")
    frame = frame[frame.tp == 1].sort_values("num_tokens")
    operators = ["attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms"]
    seconds = tables.LAYERS * (frame[operators].sum(axis=1) + _element_wise(frame)) + frame.emb_ms
    dense = Curve(tables.floats(frame.num_tokens), tables.floats(seconds) * 1e-3)
    return _library_timer(folder, "a100_sxm_vllm0.14.0", dense)


def h100_timer(folder: Path) -> MeasuredTimer:
    """H100 TP1: GEMM tables of neighbouring shapes interpolated in n and k; element-wise operators like the A100's."""
    name = "h100_sxm_vllm0.24.0"
    gemm = tables.read_gemm(folder, name)
    gate_up = _between(gemm[16384, tables.HIDDEN], gemm[65536, tables.HIDDEN], 16384, 65536, 2 * tables.MLP)
    down = _between(gemm[tables.HIDDEN, 12288], gemm[tables.HIDDEN, 16384], 12288, 16384, tables.MLP)
    total = (gemm[6144, tables.HIDDEN] + gemm[tables.HIDDEN, tables.HIDDEN] + gate_up + down).dropna()
    vidur = tables.read_csv(folder, "vidur/mlp_a100_llama3-8b.csv")
    vidur = vidur[vidur.tp == 1].sort_values("num_tokens")
    element_wise = Curve(tables.floats(vidur.num_tokens), tables.floats(_element_wise(vidur)) * 1e-3)
    memory_ratio = 2.039 / 3.35  # TB/s of the A100 and the H100
    seconds = [tables.LAYERS * (t + element_wise(m) * memory_ratio) for m, t in total.items()]
    return _library_timer(folder, name, Curve(tables.floats(total.index), tables.floats(seconds)))


def rtx3090_tp2_timer(folder: Path) -> MeasuredTimer:
    """RTX 3090 TP2: linear layers and prompt attention at every token count; the rest estimated.

    Element-wise operators by memory bandwidth (the measured ones are launch bound), decode attention and prefixes from
    the RTX 4090, the all-reduce from the L40S over PCIe.
    """
    frame = tables.read_csv(folder, "llmservingsim/v0_rtx3090_llama-3.1-8b_tp2_layers_ns.csv").sort_values("num_tokens")
    tokens = tables.floats(frame.num_tokens)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    gemm = tables.floats(frame[linear].sum(axis=1)) * 1e-9
    element_wise = tokens * (tables.HIDDEN * 2 * 8 + tables.MLP * 2 * 3 / 2) / 0.80e12 + 12e-6
    reduce = tables.read_all_reduce(folder, "l40s_vllm0.14.0")
    all_reduce = tables.floats([2.0 * reduce(t) for t in tokens])
    dense = Curve(tokens, tables.LAYERS * (gemm + element_wise + all_reduce))
    logits = Curve(tokens, tables.floats(frame.lm_head) * 1e-9)
    prompt = Curve(tokens, tables.floats(frame.attn) * (tables.LAYERS * 1e-9))
    rtx4090 = tables.read_vllm_attention(folder, "rtx4090_llama-3.1-8b_tp1")
    decode_scale = 1008.0 / 936.0 / 2.0  # memory bandwidths of the two GPUs, halves of the heads
    attention = SummedAttention(prompt, prefix_ratio_like(rtx4090.prefill), rtx4090.decode, decode_scale)
    return MeasuredTimer(dense, logits, attention)


def _library_timer(folder: Path, name: str, dense: Curve) -> MeasuredTimer:
    head = tables.read_gemm(folder, name)[65536, tables.HIDDEN]
    logits = Curve(tables.floats(head.index), tables.floats(head) * (tables.VOCABULARY / 65536))
    rtx4090 = tables.read_vllm_attention(folder, "rtx4090_llama-3.1-8b_tp1")
    attention = SummedAttention(
        tables.read_context_attention(folder, name, 1),
        prefix_ratio_like(rtx4090.prefill),
        tables.read_generation_attention(folder, name, 1),
    )
    return MeasuredTimer(dense, logits, attention)


def _element_wise(frame: object) -> Floats:
    columns = ["input_layernorm_ms", "attn_rope_ms", "post_attention_layernorm_ms", "mlp_act_ms"]
    return tables.floats(frame[columns].sum(axis=1))  # type: ignore[index]


def _between(low: object, high: object, at_low: int, at_high: int, at: int) -> object:
    """Interpolates two pandas Series linearly in a GEMM dimension."""
    share = (at - at_low) / (at_high - at_low)
    return low * (1.0 - share) + high * share  # type: ignore[operator]
