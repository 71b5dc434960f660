from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_adapter.simulated.profiles import FEATURES, HardwareProfile, load_profile, profile_names
from engine_adapter.simulated.timing import ProfileTimer, token_table

PROFILES = {name: load_profile(name) for name in profile_names()}
TIMERS = {name: ProfileTimer(profile) for name, profile in PROFILES.items()}
TIMERS["a100-tp1"].warm_up()  # all use one kernel; compiling it must not count against a test's deadline

Entries = list[tuple[int, int]]

names = st.sampled_from(sorted(PROFILES))
entry = st.one_of(
    st.tuples(st.just(1), st.integers(1, 20_000)),
    st.tuples(st.integers(0, 2048), st.integers(0, 16_000)),
)
batches = st.lists(entry, max_size=60)


def seconds(name: str, entries: Entries) -> float:
    chunk = np.array([c for c, _ in entries], np.int64)
    context = np.array([x for _, x in entries], np.int64)
    return TIMERS[name].seconds(chunk, context, len(entries))


def reference_features(entries: Entries, parallel_tiles: float) -> dict[str, float]:
    """What each feature means, in plain Python and without an eye on speed."""
    entries = [(c, x) for c, x in entries if c > 0]
    decodes = [x for c, x in entries if c == 1 and x > 0]
    prefills = [(c, x) for c, x in entries if not (c == 1 and x > 0)]
    n, kv, longest = len(decodes), sum(decodes), max(decodes, default=0)
    work = sum(math.ceil(c / 64) * (x + c / 2) for c, x in prefills)
    tile = max(longest, max((c + x for c, x in prefills), default=0))

    def part(value: float, low: float, high: float = math.inf) -> float:
        return min(max(value - low, 0.0), high - low)

    alone = {
        "decode_requests_to_8": part(n, 0, 8),
        "decode_requests_to_32": part(n, 8, 32),
        "decode_requests_to_128": part(n, 32, 128),
        "decode_requests_above_128": part(n, 128),
        "decode_kv_to_4k": part(kv, 0, 4096),
        "decode_kv_to_16k": part(kv, 4096, 16384),
        "decode_kv_to_64k": part(kv, 16384, 65536),
        "decode_kv_to_256k": part(kv, 65536, 262144),
        "decode_kv_above_256k": part(kv, 262144),
        "decode_longest_context": longest,
    }
    mixed = {
        "mixed_iteration": 1,
        "mixed_requests_to_32": part(n, 0, 32),
        "mixed_requests_above_32": part(n, 32),
        "mixed_kv_to_8k": part(kv, 0, 8192),
        "mixed_kv_to_32k": part(kv, 8192, 32768),
        "mixed_kv_to_128k": part(kv, 32768, 131072),
        "mixed_kv_to_256k": part(kv, 131072, 262144),
        "mixed_kv_above_256k": part(kv, 262144),
        "mixed_longest_context": longest,
        "mixed_longest_tile": tile,
        "mixed_critical_path": max(tile, (kv + work) / parallel_tiles),
        "mixed_larger_work": max(kv, work),
        "mixed_requests_x_chunk_to_64": n * min(max((c for c, _ in prefills), default=0), 64),
        "mixed_requests_x_chunk_to_256": n * min(max((c for c, _ in prefills), default=0), 256),
        "mixed_kv_x_chunk_to_512": kv * min(sum(c for c, _ in prefills), 512),
    }
    prefill = {
        "prefill_requests": len(prefills),
        "prefill_only_iteration": float(not decodes),
        "prefill_causal": sum(c * c for c, _ in prefills),
        "prefill_prefix": sum(c * x for c, x in prefills),
        "prefill_prefix_chunk_at_least_256": sum(max(c, 256) * x for c, x in prefills),
        "prefill_prefix_chunk_above_512": sum(max(c - 512, 0) * x for c, x in prefills),
        "prefill_context": sum(x for _, x in prefills),
        "prefill_context_to_2k": sum(min(x, 2048) for _, x in prefills),
        "prefill_tile_work": work,
        "prefill_largest_prefix": max((c * x for c, x in prefills), default=0),
        "prefill_largest_causal": max((c * c for c, _ in prefills), default=0),
    }
    logits = {
        "logits_to_64": part(len(entries), 0, 64),
        "logits_to_128": part(len(entries), 64, 128),
        "logits_to_256": part(len(entries), 128, 256),
        "logits_above_256": part(len(entries), 256),
    }
    nothing = dict.fromkeys((*alone, *mixed), 0.0)
    return nothing | (alone if not prefills else {}) | (mixed if prefills and decodes else {}) | prefill | logits


def reference_seconds(profile: HardwareProfile, entries: Entries) -> float:
    parameters = profile.parameters
    tokens = sum(c for c, _ in entries)
    if tokens == 0:
        return 0.0
    table = token_table(parameters)
    last = len(table) - 1
    slope = max(0.0, float(table[last] - table[len(table) // 2]) / (last - len(table) // 2))
    total = float(table[min(tokens, last)]) + slope * max(0, tokens - last) + profile.cpu_seconds_per_iteration
    features = reference_features(entries, parameters.parallel_tiles)
    return total + sum(w * features[f] for f, w in zip(FEATURES, parameters.feature_seconds, strict=True))


@given(names, batches)
@example("rtxpro6000-tp1", [(1, 3000)] * 300)
@example("rtxpro6000-tp1", [(1, 3000)] * 300 + [(700, 2500)] * 3)
@example("a100-tp1", [(1, 0), (9000, 5)])
def test_the_kernel_equals_the_reference(name: str, entries: Entries) -> None:
    assert seconds(name, entries) == pytest.approx(reference_seconds(PROFILES[name], entries), rel=1e-12)


@given(names, st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), min_size=1, max_size=40))
def test_time_is_positive_and_finite_beyond_what_was_measured(name: str, entries: Entries) -> None:
    assert 1e-3 < seconds(name, entries) < 3600.0


@given(names, batches, st.data())
def test_time_never_falls_when_a_context_grows(name: str, entries: Entries, data: st.DataObject) -> None:
    # A single token without context is a prompt of one token; with context it is a decode: another kind of work.
    grown = [(c, x + data.draw(st.integers(0, 50_000))) if x > 0 or c != 1 else (c, x) for c, x in entries]
    assert seconds(name, grown) >= seconds(name, entries) * (1.0 - 1e-12)


@given(names, batches)
def test_order_and_idle_requests_do_not_matter(name: str, entries: Entries) -> None:
    shuffled = sorted([*entries, (0, 500)], key=lambda e: (e[1], e[0]))
    assert seconds(name, shuffled) == pytest.approx(seconds(name, entries), rel=1e-12)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_only_the_first_entries_count(name: str) -> None:
    chunk, context = np.array([1, 512, 1], np.int64), np.array([100, 0, 900], np.int64)
    assert TIMERS[name].seconds(chunk, context, 0) == 0.0
    assert TIMERS[name].seconds(chunk, context, 2) == seconds(name, [(1, 100), (512, 0)])


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize(
    "entries",
    [
        [(8192, 0)],
        [(1, 1000)] * 1000,
        [(1, 100_000)] * 8,
        [(2048, 100_000)],
        [(512, 100_000), *[(1, 2000)] * 200],
    ],
    ids=["8192 tokens", "1000 decodes", "100k contexts", "100k prefix", "mixed"],
)
def test_beyond_the_measured_range_work_takes_at_least_its_share(name: str, entries: Entries) -> None:
    """Compared with an eighth of the same batch, and far from absurd."""
    eighth = [(c // 8, x) for c, x in entries] if len(entries) == 1 else entries[: max(1, len(entries) // 8)]
    assert seconds(name, eighth) < seconds(name, entries) < 60.0


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_beyond_the_table_tokens_cost_what_they_cost_within(name: str) -> None:
    """Several prompts of 512 tokens, so that attention stays linear: 16 take about twice as long as 8."""
    four, eight, sixteen = (seconds(name, [(512, 0)] * k) for k in (2, 4, 8))
    assert 0.75 < (sixteen - eight) / (2 * (eight - four)) < 1.35


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_beyond_the_kv_cache_contexts_cost_what_they_cost_within(name: str) -> None:
    """Eight decodes of 4000, 40000 and 400000 tokens: attention reads every one of them."""
    low, middle, high = (seconds(name, [(1, context)] * 8) for context in (4_000, 40_000, 400_000))
    assert high - middle > 5.0 * (middle - low)


@pytest.mark.parametrize("name", ["rtx4090-tp1", "rtxpro6000-tp1", "a100-tp1", "rtx3090-tp2"])
def test_the_staircase_over_total_tokens_is_there(name: str) -> None:
    """Crossing 256 total tokens costs a step, wherever the tokens come from; the steps around it do not."""
    decodes = [(1, 1000)] * 16
    at, beyond, later = (seconds(name, [*decodes, (tokens - 16, 0)]) for tokens in (256, 257, 258))
    assert beyond / at > 1.08
    assert later / beyond < 1.01


@pytest.mark.parametrize("name", ["rtx4090-tp1", "rtxpro6000-tp1", "rtxpro6000-tp2"])
def test_decodes_cost_more_in_an_iteration_with_a_prefill(name: str) -> None:
    """Decode attention loses its split over the context when it shares a call with a prefill."""
    decodes = [(1, 1024)] * 64
    together = seconds(name, [*decodes, (64, 0)])
    apart = seconds(name, decodes) + seconds(name, [(64, 0)]) - seconds(name, [(1, 1)])
    assert together > apart


def test_cpu_time_is_added_to_every_iteration() -> None:
    profile = dataclasses.replace(PROFILES["rtx4090-tp1"], cpu_seconds_per_iteration=0.5)
    timer = ProfileTimer(profile)
    for tokens in (1, 3000):
        chunk, context = np.array([tokens], np.int64), np.array([7], np.int64)
        base = TIMERS["rtx4090-tp1"].seconds(chunk, context, 1)
        assert timer.seconds(chunk, context, 1) == pytest.approx(base + 0.5)
    assert timer.seconds(chunk, context, 0) == 0.0
