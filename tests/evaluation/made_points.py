"""Runs whose misses are told, block by block."""

from __future__ import annotations

from evaluation.goodput.points import BLOCKS, Point, RunKey

LIMIT = 0.01
SIZE = 250


def point(rate: float, blocks: list[int], policy: str = "vllm") -> Point:
    key = RunKey("h100-tp1", "w", policy, rate, 0, SIZE * BLOCKS)
    return Point(key, True, sum(blocks), missed_by_block=tuple(blocks), block_sizes=(SIZE,) * BLOCKS)
