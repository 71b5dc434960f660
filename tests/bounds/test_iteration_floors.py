"""No batch takes less than the floor of a part of it, nor less than its entries are charged."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter.simulated.profiles import load_profile, profile_names
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.floor import FEATURE_COUNT, UNSURE, cheapest_seconds, cover_seconds, floor_seconds
from evaluation.bounds.work import (
    attention,
    least_by_tokens,
    prefill_attention_seconds,
    supporting_lines,
    window_shares,
)
from evaluation.simulate import engine_limits
from slidingserve.contract.values import Ints


def a_batch(random: np.random.Generator) -> tuple[Ints, Ints]:
    """Draws chunks and contexts: decodes, prefills, single-token chunks, within 2048 tokens."""
    count = int(random.integers(1, 12))
    chunk = np.where(random.random(count) < 0.5, 1, random.integers(1, 2048 // count, count))
    context = random.integers(0, 3000, count) * random.integers(0, 2, count)
    return chunk, context


@pytest.mark.parametrize("name", profile_names())
def test_a_batch_takes_at_least_the_floor_of_every_part_of_it(name: str) -> None:
    profile = load_profile(name)
    timer, limits = ProfileTimer(profile), engine_limits(profile)
    cheapest = cheapest_seconds(timer, limits)
    random = np.random.default_rng(1)
    part, features = (np.zeros(20, np.int64), np.zeros(20, np.int64)), np.zeros(FEATURE_COUNT)
    for _ in range(400):
        chunk, context = a_batch(random)
        seconds = timer.seconds(chunk, context, len(chunk))
        kept = random.random(len(chunk)) < 0.6
        less, before = chunk[kept], context[kept]
        prefill = (less > 1) | (before == 0)
        less = np.where(prefill & (less > 2), np.maximum(2, less - random.integers(0, 64, less.size)), less)
        before = np.where(before > 1, np.maximum(1, before - random.integers(0, 64, before.size)), before)
        unsure = random.random(less.size) < 0.3
        less, before = np.where(unsure, 1, less), np.where(unsure, UNSURE, before)
        floor = floor_seconds(less, before, less.size, timer.model, cheapest, part, features)
        assert floor <= seconds + 1e-12


def test_the_floor_of_a_whole_batch_is_its_time_where_more_tokens_do_not_help() -> None:
    profile = load_profile("a100-tp1")
    timer, limits = ProfileTimer(profile), engine_limits(profile)
    part, features = (np.zeros(9, np.int64), np.zeros(9, np.int64)), np.zeros(FEATURE_COUNT)
    chunk, context = np.array([60, 1, 1]), np.array([128, 500, 900])
    floor = floor_seconds(chunk, context, 3, timer.model, cheapest_seconds(timer, limits), part, features)
    assert floor == pytest.approx(timer.seconds(chunk, context, 3))


@pytest.mark.parametrize("name", profile_names())
def test_a_batch_takes_at_least_what_its_entries_are_charged(name: str) -> None:
    profile = load_profile(name)
    timer, limits = ProfileTimer(profile), engine_limits(profile)
    costs, lines = attention(timer, limits), supporting_lines(least_by_tokens(timer, limits))
    assert len(lines) > 2
    random = np.random.default_rng(2)
    for _ in range(400):
        chunk, context = a_batch(random)
        decode = (chunk == 1) & (context > 0)
        for_decodes = costs.kv_token * context[decode].sum()
        c, x = chunk[~decode].astype(float), context[~decode].astype(float)
        charged = for_decodes + costs.chunk_squared * (c * c).sum() + costs.chunk_context * (c * x).sum()
        seconds = timer.seconds(chunk, context, len(chunk))
        for line in lines:
            assert line.fixed_seconds + line.seconds_per_token * chunk.sum() + charged <= seconds + 1e-12


def test_a_prefill_is_charged_at_most_what_any_chunks_cost() -> None:
    profile = load_profile("rtx3090-tp2")
    costs = attention(ProfileTimer(profile), engine_limits(profile))
    random = np.random.default_rng(3)
    for _ in range(50):
        chunk = random.integers(1, 513, random.integers(1, 9)).astype(float)
        context = np.cumsum(chunk) - chunk
        cost = (costs.chunk_squared * chunk**2 + costs.chunk_context * chunk * context).sum()
        assert prefill_attention_seconds(np.array([int(chunk.sum())]), costs, 512)[0] <= cost + 1e-15


def test_tokens_are_covered_by_the_cheapest_iterations() -> None:
    cheapest = np.array([0.0, 3.0, 3.0, 10.0])
    assert cover_seconds(5, cheapest).tolist() == [0.0, 3.0, 3.0, 6.0, 6.0, 9.0]


def test_shares_of_windows_that_overlap_are_at_most_one() -> None:
    random = np.random.default_rng(4)
    starts = np.sort(random.uniform(0, 10, 40))
    ends = starts + random.uniform(0, 4, 40)
    shares = window_shares(starts, ends)
    for moment in np.concatenate([starts, ends]):
        assert shares[(starts <= moment) & (moment <= ends)].sum() <= 1 + 1e-12
    assert window_shares(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0])).tolist() == [0.5, 0.5, 1.0]
