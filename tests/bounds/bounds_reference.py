"""Written apart from the search: all schedules of tiny instances one by one, and a check of a given schedule."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from engine_adapter.simulated.profiles import FEATURES, HardwareProfile, TimingParameters
from engine_adapter.simulated.timing import IterationTimer
from evaluation.bounds.clairvoyant import Optimum
from evaluation.workloads import Workload
from slidingserve.contract.values import EngineLimits


def workload(rows: list[tuple[float, int, int, float, float]]) -> Workload:
    """Makes requests of (arrival, prompt, outputs, TTFT, TBT)."""
    arrival, prompt, outputs, ttft, tbt = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows))
    return Workload(
        "by-hand", arrival.astype(float), prompt, outputs, ttft.astype(float), tbt.astype(float), zeros,
        zeros.astype(np.int64), (), 0.0,
    )  # fmt: skip


def profile(seconds_by_tokens: list[float], **features: float) -> HardwareProfile:
    """Makes a profile whose iterations of n tokens take the n-th number of seconds, and so much per feature."""
    edges = tuple(range(len(seconds_by_tokens) + 1))
    segments = tuple((seconds, seconds) for seconds in seconds_by_tokens)
    coefficients = tuple(features.get(name, 0.0) for name in FEATURES)
    return HardwareProfile("tiny", "none", 1, "none", 1000, 8, TimingParameters(edges, segments, coefficients, 4.0))


def most_met(work: Workload, timer: IterationTimer, budget: int) -> int:
    """Returns the most requests met over every schedule: any chunks, any idling, tokens of late requests too."""
    n = len(work)
    prompt, outputs = work.prompt_tokens.tolist(), work.output_tokens.tolist()
    arrival = work.arrival_seconds.tolist()

    def is_late(i: int, tokens_before: int, end: float) -> bool:
        due = arrival[i] + float(work.ttft_slo_seconds[i]) + tokens_before * float(work.tbt_slo_seconds[i])
        return bool(end > due)

    @cache
    def best(computed: tuple[int, ...], late: tuple[bool, ...], now: float) -> int:
        done = [computed[i] == prompt[i] + outputs[i] - 1 for i in range(n)]
        most = int(sum(done[i] and not late[i] for i in range(n)))
        if sum(not is_it for is_it in late) <= most:
            return most
        for start in {now, *(t for t in arrival if t > now)}:
            choices = []
            for i in range(n):
                if done[i] or arrival[i] > start:
                    choices.append([0])
                else:
                    choices.append(list(range(max(1, prompt[i] - computed[i]) + 1)))
            for chunks in product(*choices):
                members = [i for i in range(n) if chunks[i]]
                if not members or sum(chunks) > budget:
                    continue
                chunk = np.array([chunks[i] for i in members])
                end = start + timer.seconds(chunk, np.array([computed[i] for i in members]), len(members))
                after = tuple(computed[i] + chunks[i] for i in range(n))
                missed = tuple(
                    late[i] or (chunks[i] > 0 and after[i] >= prompt[i] and is_late(i, after[i] - prompt[i], end))
                    for i in range(n)
                )
                most = max(most, best(after, missed, end))
        return most

    return best((0,) * n, (False,) * n, 0.0)


def check_schedule(work: Workload, timer: IterationTimer, limits: EngineLimits, optimum: Optimum) -> None:
    """Asserts that the schedule keeps the engine's rules and meets the requests that it says."""
    computed = [0] * len(work)
    generated = [0] * len(work)
    now = 0.0
    for iteration in optimum.schedule:
        rows = [row for row, _ in iteration.batch]
        chunk = np.array([tokens for _, tokens in iteration.batch])
        assert len(set(rows)) == len(rows) <= limits.max_sequences
        assert chunk.min() >= 1
        assert chunk.sum() <= limits.max_tokens_per_iteration
        assert iteration.start_seconds >= max(now, *(work.arrival_seconds[row] for row in rows))
        now = iteration.start_seconds + timer.seconds(chunk, np.array([computed[row] for row in rows]), len(rows))
        assert iteration.end_seconds == now
        for row, tokens in iteration.batch:
            computed[row] += tokens
            assert computed[row] <= work.prompt_tokens[row] + generated[row]
            if computed[row] == work.prompt_tokens[row] + generated[row]:
                due = work.arrival_seconds[row] + work.ttft_slo_seconds[row]
                assert now <= due + generated[row] * work.tbt_slo_seconds[row]
                generated[row] += 1
        blocks = sum(
            -(-computed[row] // limits.kv_block_tokens)
            for row in range(len(work))
            if generated[row] < work.output_tokens[row]
        )
        assert blocks <= limits.kv_blocks
    assert optimum.met_at_least == len(optimum.met) == sum(generated[r] == work.output_tokens[r] for r in optimum.met)
