"""The hardware that has a built-in profile: limits, where its measured timer comes from, and how its fit is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evaluation.hardware import measured
from evaluation.hardware.measured import MeasuredTimer
from evaluation.hardware.tables import HEADS, KV_HEADS, LAYERS, DataError

MODEL = "Llama-3-8B bf16"
_WEIGHT_BYTES = 8.03e9 * 2
_KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * 128 * 2
_GIB = 1024**3
_KV_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Hardware:
    """One profile to fit. ``kv_tokens`` is what a real run logged; None: it follows from ``memory_gib`` per GPU."""

    name: str
    gpu: str
    tensor_parallel: int
    memory_gib: float
    multiprocessors: int
    max_sequences: int
    build_timer: Callable[[Path], MeasuredTimer]
    provenance: str
    kv_tokens: int | None = None
    cpu_seconds_per_iteration: float = 0.0

    @property
    def kv_blocks(self) -> int:
        """KV blocks of 16 tokens: logged, or (0.9 x memory x TP - weights) / bytes per token."""
        tokens = self.kv_tokens
        if tokens is None:
            free = 0.9 * self.memory_gib * _GIB * self.tensor_parallel - _WEIGHT_BYTES
            tokens = int(free / _KV_BYTES_PER_TOKEN)
        return tokens // _KV_BLOCK_TOKENS

    @property
    def parallel_tiles(self) -> float:
        """Query tiles of one key/value pass that run at once: multiprocessors / query heads of one GPU."""
        return self.multiprocessors * self.tensor_parallel / HEADS


def _vllm(stem: str) -> Callable[[Path], MeasuredTimer]:
    return lambda folder: measured.vllm_timer(folder, stem)


_VLLM = "vLLM 0.19 kernel tables of LLMServingSim (MIT), mixed calls measured"
HARDWARE = (
    Hardware(
        "a100-tp1",
        "A100-SXM4-80GB",
        1,
        80.0,
        108,
        256,
        measured.a100_timer,
        "Vidur operator medians (MIT), aiconfigurator attention (Apache-2.0); decodes and prefills added, prefixes in "
        "the proportion of the RTX 4090",
    ),
    Hardware(
        "h100-tp1",
        "H100-SXM5-80GB",
        1,
        79.6,
        132,
        256,
        measured.h100_timer,
        "aiconfigurator GEMM and attention tables (Apache-2.0), coarse above 256 tokens; decodes and prefills added, "
        "prefixes in the proportion of the RTX 4090",
    ),
    Hardware(
        "rtx3090-tp2",
        "GeForce RTX 3090",
        2,
        24.0,
        82,
        256,
        measured.rtx3090_tp2_timer,
        "LLMServingSim layer times per token count (MIT, eager kernels); element-wise operators, decode attention, "
        "prefixes and all-reduce estimated from other GPUs",
    ),
    Hardware(
        "rtx4090-tp1",
        "GeForce RTX 4090",
        1,
        24.0,
        128,
        256,
        _vllm("rtx4090_llama-3.1-8b_tp1"),
        f"{_VLLM}; KV capacity logged by a vLLM run",
        kv_tokens=41_408,
    ),
    Hardware(
        "rtxpro6000-tp1",
        "RTX PRO 6000 Blackwell",
        1,
        95.6,
        188,
        128,
        _vllm("rtxpro6000_llama-3.1-8b_tp1"),
        f"{_VLLM}; KV capacity and sequence limit of a real vLLM run. The CPU time is what that run takes beyond its "
        "kernels, averaged over all iterations: 0 to 0.1 ms when few requests decode, about 3 ms with a prefill",
        kv_tokens=562_067,
        cpu_seconds_per_iteration=0.2e-3,
    ),
    Hardware(
        "rtxpro6000-tp2",
        "RTX PRO 6000 Blackwell",
        2,
        95.6,
        188,
        256,
        _vllm("rtxpro6000_llama-3.1-8b_tp2"),
        f"{_VLLM}; without the all-reduce, which was not measured",
    ),
)


def hardware(name: str) -> Hardware:
    """Returns the entry called ``name``; raises `DataError` naming the known ones."""
    for entry in HARDWARE:
        if entry.name == name:
            return entry
    raise DataError(f"unknown hardware {name!r}: choose one of {', '.join(h.name for h in HARDWARE)}")
