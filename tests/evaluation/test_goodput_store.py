"""Finished runs are kept: whole lines, several processes, torn ends, one origin of a folder; intervals and tables."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.goodput import provenance
from evaluation.goodput.caps import quick_effort
from evaluation.goodput.intervals import complete_curve, crossing, goodput_samples, interval, ratio_interval
from evaluation.goodput.points import BLOCKS, Point, RunKey
from evaluation.goodput.provenance import Provenance, claim
from evaluation.goodput.runner import Limit
from evaluation.goodput.search import Bracket
from evaluation.goodput.store import PARQUET, PointStore, StoreError, read_points, write_parquet
from evaluation.goodput.summary import Summary, summarise, to_json
from evaluation.goodput.sweep import Cell, Sweep, cells_of, common_cap
from evaluation.goodput.task import Found, Search

REQUESTS = 2000
LIMIT = 0.01
ORIGIN = Provenance("1.0", "abc", "code", {"h100-tp1": "digest"})


def point(
    rate: float, blocks: list[int] | None = None, *, policy: str = "vllm", seed: int = 0, complete: bool = True
) -> Point:
    """A run whose misses in each block are told."""
    blocks = [0] * BLOCKS if blocks is None else blocks
    key = RunKey("h100-tp1", "mixed-v1", policy, rate, seed, REQUESTS)
    if not complete:
        return Point(key, False, sum(blocks))
    return Point(
        key,
        True,
        sum(blocks),
        violations={"deadline": sum(blocks) / REQUESTS, "gap": 0.5, "tpot": 0.0},
        class_violations={"sharegpt": 0.01},
        ttft_quantiles=tuple(i / 100 for i in range(101)),
        missed_by_block=tuple(blocks),
        block_sizes=(REQUESTS // BLOCKS,) * BLOCKS,
        decision_seconds={"p50": 1e-5, "p99": 2e-5},
        prediction_error=0.02,
        decision_share=0.001,
    )


def add_many(folder: Path, seed: int) -> None:
    store = PointStore(folder)
    for step in range(60):
        store.add(point(1.0 + step, seed=seed))


def test_two_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_many, args=(tmp_path, seed)) for seed in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 120
    assert {(p.key.rate, p.key.seed) for p in read_points(tmp_path)} == {
        (1.0 + step, seed) for step in range(60) for seed in (0, 1)
    }


@pytest.mark.parametrize("torn_at", [1, 40, -2])
def test_a_torn_line_costs_one_run_and_the_next_is_whole(tmp_path: Path, torn_at: int) -> None:
    store = PointStore(tmp_path)
    for rate in (1.0, 2.0):
        store.add(point(rate))
    file = tmp_path / "points.jsonl"
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(first + second[:torn_at])
    again = PointStore(tmp_path)
    assert [p.key.rate for p in again] == [1.0]
    again.add(point(3.0))
    assert [p.key.rate for p in read_points(tmp_path)] == [1.0, 3.0]


def test_a_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    PointStore(tmp_path).add(point(1.0))
    file = tmp_path / "points.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    store = PointStore(tmp_path)
    store.add(point(2.0))
    assert [p.key.rate for p in read_points(tmp_path)] == [1.0, 2.0]


def test_what_comes_back_is_what_was_kept_and_a_complete_run_wins(tmp_path: Path) -> None:
    whole, early = point(1.0, [3] * BLOCKS), point(1.0, [2] * BLOCKS, complete=False)
    store = PointStore(tmp_path, shard="1of2")
    store.add(early)
    assert store.find(early.key, complete=True) is None
    assert store.find(early.key, complete=False) == early
    store.add(whole)
    store.add(early)
    assert read_points(tmp_path) == [whole]
    PointStore(tmp_path, shard="2of2").add(point(2.0))
    assert read_points(tmp_path) == [whole, point(2.0)], "all shards are read, and floats survive exactly"


def test_a_row_of_another_version_is_named(tmp_path: Path) -> None:
    PointStore(tmp_path).add(point(1.0))
    file = tmp_path / "points.jsonl"
    row = json.loads(file.read_text())
    del row["missed"]
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(StoreError, match=r"points\.jsonl, line 1: is not a run of this version"):
        read_points(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="give another --out"):
        PointStore(tmp_path / "file" / "results")


def test_parquet_has_a_row_for_each_run_and_says_where_it_is_from(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    write_parquet([point(1.0, [1] * BLOCKS), point(2.0, complete=False)], tmp_path / PARQUET, {"commit": "abc"})
    table = pq.read_table(tmp_path / PARQUET)
    assert table.schema.metadata[b"slidingserve.schema"] == b"1"
    assert table.schema.metadata[b"commit"] == b"abc"
    rows = table.to_pylist()
    assert [row["missed"] for row in rows] == [BLOCKS, 0]
    assert rows[0]["violations_deadline"] == BLOCKS / REQUESTS
    assert rows[0]["missed_by_block"] == [1] * BLOCKS
    assert rows[1]["violations_deadline"] is None


def test_results_of_other_code_or_another_profile_are_not_mixed(tmp_path: Path) -> None:
    claim(tmp_path, ORIGIN)
    claim(tmp_path, replace(ORIGIN, commit="def", profiles={"rtx3090-tp2": "other"}))
    with pytest.raises(StoreError, match=r"other code \(commit abc, digest code; this is abc, new\)"):
        claim(tmp_path, replace(ORIGIN, code="new"))
    for name in ("h100-tp1", "rtx3090-tp2"):
        with pytest.raises(StoreError, match=f"another profile {name}"):
            claim(tmp_path, replace(ORIGIN, profiles={name: "changed"}))
    (tmp_path / provenance.FILE).write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        claim(tmp_path, ORIGIN)


def binomial_spread(share: float) -> float:
    return math.sqrt(share * (1 - share) / REQUESTS)


def test_the_bootstrap_of_independent_misses_is_the_binomial_interval() -> None:
    """Misses grow from 0 at 1/s to 2 % at 2/s, so the goodput is 1.5/s, and its spread that of the share at 1.5."""
    draws = np.random.default_rng(5)
    size = REQUESTS // BLOCKS
    at_two = [int(x) for x in draws.binomial(size, 0.02, BLOCKS)]
    share = sum(at_two) / REQUESTS
    samples = goodput_samples([[point(1.0)], [point(2.0, at_two)]], LIMIT)
    low, high = interval(samples)
    inner = [1 + LIMIT / (share + z * binomial_spread(share)) for z in (1.96, -1.96)]
    assert low == pytest.approx(inner[0], abs=0.06)
    assert high == pytest.approx(min(2.0, inner[1]), abs=0.06)
    assert np.array_equal(samples, goodput_samples([[point(1.0)], [point(2.0, at_two)]], LIMIT))
    assert not np.array_equal(samples, goodput_samples([[point(1.0)], [point(2.0, at_two)]], LIMIT, seed=1))


def test_what_two_policies_share_cancels_out_of_their_ratio() -> None:
    """The same hard blocks hurt both; unpaired, the ratio would seem far less sure than it is."""
    hard = [0] * 12 + [9] * 8
    ours = goodput_samples([[point(1.0)], [point(2.0, hard)]], LIMIT)
    theirs = goodput_samples([[point(0.9)], [point(1.8, hard)]], LIMIT)
    low, high = ratio_interval(ours, theirs)
    unpaired = ratio_interval(ours, np.roll(theirs, 1))
    assert low <= 10 / 9 + 1e-9
    assert high >= 10 / 9 - 1e-9
    assert high - low < 0.2 * (unpaired[1] - unpaired[0])
    assert ratio_interval(ours, np.zeros_like(ours)) == (math.inf, math.inf)


def test_where_the_limit_is_crossed() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    assert crossing(rates, np.array([0.0, 0.005, 0.015]), LIMIT) == pytest.approx(3.0)
    assert crossing(rates, np.array([0.02, 0.0, 0.0]), LIMIT) == 0.0, "a policy that stalls at low load"
    assert crossing(rates, np.array([0.0, 0.02, 0.0]), LIMIT) == pytest.approx(1.5), "the first, not the last"
    assert crossing(rates, np.array([0.0, 0.01, 0.01]), LIMIT) == 4.0


def test_only_rates_with_a_whole_run_of_each_seed_make_a_curve() -> None:
    points = {
        2.0: [point(2.0, seed=1), point(2.0, seed=0)],
        1.0: [point(1.0), point(1.0, seed=1)],
        3.0: [point(3.0), point(3.0, seed=1, complete=False)],
    }
    assert [[(p.key.rate, p.key.seed) for p in runs] for runs in complete_curve(points, 2)] == [
        [(1.0, 0), (1.0, 1)],
        [(2.0, 0), (2.0, 1)],
    ]


def sweep(*policies: str, workloads: tuple[str, ...] = ("mixed-v1",)) -> Sweep:
    return Sweep(("h100-tp1",), workloads, policies, quick_effort(REQUESTS))


def found(policy: str, steps: tuple[int | None, int | None]) -> Found:
    search = Search("h100-tp1", "mixed-v1", policy, REQUESTS, (0,), 1, Limit())
    return Found(search, Bracket(*steps))


def test_a_summary_compares_policies_with_their_best_caps() -> None:
    request = sweep("vllm", "slidingserve")
    vllm, ours = cells_of(request)
    assert (vllm.caps, ours.caps) == ((128, 256), (128, 256))
    for cell, goodputs in ((vllm, (10, 20)), (ours, (35, 30))):
        for cap, step in zip(cell.caps, goodputs, strict=True):
            cell.final[cap] = found(cell.text(cap), (step, step + 1))
            cell.screened[cap] = cell.final[cap].goodput
    assert (vllm.best, ours.best) == (256, 128)
    points = [
        point(rate, [int(10 * rate / goodput)] + [1] * (BLOCKS - 1), policy=text)
        for text, goodput in (("vllm:max_tokens=256", 20.0), ("slidingserve:max_tokens=128", 26.0))
        for rate in (0.1 * goodput, goodput, 2.2 * goodput)
    ]
    summary: Summary = summarise(request, ORIGIN, [vllm, ours], points)
    assert [cell.cap for cell in summary.cells] == [256, 128]
    assert [cell.goodput for cell in summary.cells] == [vllm.goodput, ours.goodput]
    assert all(cell.one_cap is not None for cell in summary.cells)
    assert all(cell.low is not None and cell.high is not None for cell in summary.cells)
    forward, backward = summary.differences
    assert (forward.policy, forward.against) == ("vllm", "slidingserve")
    assert forward.ratio == pytest.approx(1 / backward.ratio)
    document = json.loads(json.dumps(to_json(summary, lambda *_: None, lambda *_: 3.5), allow_nan=False))
    assert [cell["bound"] for cell in document["cells"]] == [3.5, 3.5]
    assert document["violation_limit"] == LIMIT


def test_the_common_cap_is_best_over_all_workloads_and_not_in_one() -> None:
    cells = [Cell("p", workload, "vllm", (1, 2)) for workload in "ab"]
    cells[0].screened = {128: 4.0, 256: 3.0, 512: 0.1}
    cells[1].screened = {128: 0.2, 256: 3.0, 512: 4.0}
    assert common_cap(cells) == 256
    assert common_cap([]) is None


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_are_a_partition_of_the_cells(shards: int) -> None:
    request = sweep("vllm", "vllm:max_tokens=512", "slidingserve", workloads=("sharegpt", "mixed-v1", "mixed-v2"))

    def name(cell: Cell) -> tuple[str, str]:
        return cell.workload, cell.policy

    parts = [[name(cell) for cell in cells_of(request, (k, shards))] for k in range(1, shards + 1)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(cell for part in parts for cell in part) == sorted(name(cell) for cell in cells_of(request))
    assert [cell.caps for cell in cells_of(request) if cell.policy.endswith("512")] == [(), (), ()]
