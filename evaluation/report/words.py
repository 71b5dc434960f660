"""Says in words what a figure shows. Every sentence is computed from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from evaluation.goodput.intervals import CLAIMED
from evaluation.report.reading import Cell, Difference, Timeline
from evaluation.report.selecting import NEAR, Cost, Distribution, Level, Place, is_clear
from evaluation.report.style import counted, duration, listed, percent, rate

Curves = Mapping[str, Sequence[Level]]

OVERLOAD = 2.0
"""The multiple of a policy's goodput at which overload is compared."""


def goodput(places: Mapping[Place, Sequence[Cell]], differences: Sequence[Difference]) -> str:
    """Says which policy has the highest goodput on how many workloads, and how surely."""
    leads, clear = Counter[str](), Counter[str]()
    for cells in places.values():
        first, second = _first_two(cells)
        if first.goodput <= 0 or (second is not None and second.goodput == first.goodput):
            continue
        leads[first.policy] += 1
        found = None if second is None else _between(first, second, differences)
        clear[first.policy] += bool(found is not None and is_clear(found))
    if not leads:
        return "No policy has a higher goodput than all others on any workload."
    told = [
        f"{policy} has the highest goodput on {count} of {counted(len(places), 'workload')}, "
        f"clearly ahead of the second on {clear[policy] or 'none'}"
        for policy, count in leads.most_common()
    ]
    return (
        f"{'; '.join(told)}. Clear means that the 95 % interval of the ratio leaves out 1 and that the difference is "
        f"at least {percent(CLAIMED, 0)}."
    )


def goodput_at(cells: Sequence[Cell], differences: Sequence[Difference]) -> str:
    """Says which policy has the highest goodput on one workload, by how much, and how the paper saw it."""
    first, second = _first_two(cells)
    if first.goodput <= 0:
        return "No policy keeps its promises at any rate that was looked at."
    told = f"{first.policy} has the highest goodput, {rate(first.goodput)} requests/s"
    if second is not None:
        told += f", {_ahead(first, second, differences)}"
    printed = [cell for cell in cells if cell.paper is not None]
    ahead = sorted(printed, key=lambda cell: -(cell.paper or 0.0))
    if len(ahead) > 1 and ahead[0].paper != ahead[1].paper:
        agrees = ", as here" if ahead[0] is max(printed, key=lambda cell: cell.goodput) else ""
        told += f"; in the paper {ahead[0].policy} is ahead{agrees}"
    return told + "."


def _ahead(first: Cell, second: Cell, differences: Sequence[Difference]) -> str:
    if second.goodput <= 0:
        return f"and {second.policy} keeps its promises at no rate that was looked at"
    ratio = first.goodput / second.goodput
    gain = f"{(ratio - 1) * 100:.0f} % above" if ratio < 2 else f"{ratio:.1f} times that of"
    gain = f"{gain} {second.policy}"
    found = _between(first, second, differences)
    if found is None or found.low is None or found.high is None:
        return f"{gain} (without an interval)"
    low, high = (found.low - 1) * 100, (found.high - 1) * 100
    sure = is_clear(found)
    verdict = "a clear difference" if sure else "which is not a clear difference"
    return f"{gain}, {verdict} (95 % interval {low:+.0f} to {high:+.0f} %)"


def _first_two(cells: Sequence[Cell]) -> tuple[Cell, Cell | None]:
    ordered = sorted(cells, key=lambda cell: -cell.goodput)
    return ordered[0], ordered[1] if len(ordered) > 1 else None


def _between(first: Cell, second: Cell, differences: Sequence[Difference]) -> Difference | None:
    for one in differences:
        if (one.profile, one.workload, one.policy, one.against) == (*first.place, first.policy, second.policy):
            return one
    return None


def verdict(difference: Difference) -> str:
    """Says what a compared pair came to."""
    clear = is_clear(difference)
    if clear is None:
        return "no interval"
    if not clear:
        return "not clear"
    return "higher" if (difference.ratio or 0.0) > 1 else "lower"


def within(levels: Sequence[Level], limit: float) -> float | None:
    """Returns the rate up to which every rate that was run stays within the limit; None if the first does not."""
    kept = None
    for level in levels:
        if not level.complete or level.mean > limit:
            break
        kept = level.rate
    return kept


def violations(curves: Mapping[Place, Curves], places: Mapping[Place, Sequence[Cell]]) -> str:
    """Says what policies miss at twice their own goodput, the mean over the workloads where a run there is kept."""
    shares: dict[str, list[float]] = {}
    for place, by_policy in curves.items():
        for cell in places[place]:
            near = [
                level
                for level in by_policy.get(cell.policy, ())
                if level.complete and cell.goodput > 0 and 1 / NEAR <= level.rate / (OVERLOAD * cell.goodput) <= NEAR
            ]
            if near:
                nearest = min(near, key=lambda level: abs(level.rate - OVERLOAD * cell.goodput))
                shares.setdefault(cell.policy, []).append(nearest.mean)
    if not shares:
        return "No run at twice a policy's goodput went to its end, so nothing can be said about overload."
    means = {policy: sum(values) / len(values) for policy, values in shares.items()}
    told = [f"{policy} {percent(means[policy])}" for policy in sorted(means, key=lambda policy: means[policy])]
    mean = " (mean over the workloads)" if len(curves) > 1 else ""
    return f"At twice its own goodput a policy misses{mean}: {listed(told)}."


def violations_at(curves: Curves, limit: float) -> str:
    """Says up to which rate each policy stays within the limit, and what it misses at its highest rate."""
    told = []
    for policy, levels in curves.items():
        kept = within(levels, limit)
        text = f"{policy} up to {rate(kept)}" if kept is not None else f"{policy} at no rate that was run"
        whole = [level for level in levels if level.complete]
        if whole and (kept is None or whole[-1].rate > kept):
            text += f" ({percent(whole[-1].mean)} at {rate(whole[-1].rate)})"
        told.append(text)
    return f"Within {limit * 100:g} %: {'; '.join(told)} requests/s." if told else "No runs are kept."


def distributions(found: Mapping[Place, Sequence[Distribution]]) -> str:
    """Says which policy has the shortest tails on how many workloads."""
    told = []
    for what, name in (("TTFT", "ttft_seconds"), ("TBT", "tbt_seconds")):
        wins = Counter(
            min(ones, key=lambda one: float(getattr(one, name)[99])).policy for ones in found.values() if ones
        )
        told.append(f"{what} with {listed([f'{p} on {count}' for p, count in wins.most_common()])}")
    of = counted(len(found), "workload")
    return f"Among the policies with runs at the rate shown, of {of}, the 99th percentile is lowest: {'; '.join(told)}."


def distribution_at(found: Sequence[Distribution], left_out: Sequence[str], what: str) -> str:
    """Says at which rate distributions were taken, and names the shortest and the longest tail."""
    rates = Counter(one.rate for one in found)
    usual = rates.most_common(1)[0][0]
    others = [f"{one.policy} at {rate(one.rate)}" for one in found if one.rate != usual]
    told = f"{what} at {rate(usual)} requests/s{f' ({listed(others)})' if others else ''}"
    tails = sorted(
        (float((one.ttft_seconds if what == "TTFT" else one.tbt_seconds)[99]), number, one.policy)
        for number, one in enumerate(found)
    )
    told += f"; its 99th percentile is {duration(tails[0][0])} with {tails[0][2]}"
    if len(tails) > 1:
        told += f" and {duration(tails[-1][0])} with {tails[-1][2]}"
    missing = f" No run near this rate: {listed(left_out)}." if left_out else ""
    return f"{told}.{missing}"


def timelines(groups: Sequence[Sequence[tuple[str, Timeline]]], between: Sequence[tuple[float, float]]) -> str:
    """Says in which run the fewest requests missed a deadline within the window."""
    missed = Counter[str]()
    for group, (start, end) in zip(groups, between, strict=True):
        for policy, one in group:
            missed[policy] += int(sum(row[4] for row in one.iterations if start <= row[0] < end))
    ordered = sorted(missed, key=lambda policy: missed[policy])
    if len(ordered) == 1:
        return f"With {ordered[0]} {counted(missed[ordered[0]], 'request')} missed a deadline in the time shown."
    return (
        f"In the time shown the fewest requests missed a deadline with {ordered[0]} ({missed[ordered[0]]:,}), "
        f"the most with {ordered[-1]} ({missed[ordered[-1]]:,})."
    )


def timeline_at(group: Sequence[tuple[str, Timeline]], between: tuple[float, float]) -> str:
    """Says what the iterations of each policy held."""
    start, end = between
    told = []
    for policy, one in group:
        rows = [row for row in one.iterations if start <= row[0] < end]
        decode_only = sum(row[2] <= 0 for row in rows)
        missed = int(sum(row[4] for row in rows))
        shown = f", {percent(decode_only / len(rows), 0)} of them decode only" if rows else ""
        told.append(f"{policy}: {counted(len(rows), 'iteration')}{shown}, {counted(missed, 'request')} missed")
    return f"Of one run, {duration(end - start)} from {duration(start)}. {'; '.join(told)}."


def cost_shares(costs: Sequence[Cost], limit: float) -> str:
    """Says whose decisions take most of the time, and whether all stay below the limit."""
    dearest = max(costs, key=lambda one: one.share)
    over = [one.policy for one in costs if one.share >= limit]
    held = f"{listed(over)} not below" if over else "all below" if len(costs) > 1 else "below"
    return (
        f"Decisions take the largest share of the iterations' time with {dearest.policy}, {percent(dearest.share, 2)} "
        f"({dearest.workload}); {held} the limit of {limit * 100:g} %."
    )


def cost_times(costs: Sequence[Cost]) -> str:
    """Says how long decisions take."""
    quick, slow = min(costs, key=lambda one: one.p50_seconds), max(costs, key=lambda one: one.p99_seconds)
    return (
        f"The shortest p50 is {duration(quick.p50_seconds)} ({quick.policy}), the longest p99 "
        f"{duration(slow.p99_seconds)} ({slow.policy})."
    )
