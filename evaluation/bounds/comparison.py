"""How far policies are from the clairvoyant optimum, on small random instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.outcome import Outcome
from engine_adapter.simulated.profiles import HardwareProfile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.bounds.clairvoyant import Optimum, clairvoyant_optimum
from evaluation.inprocess import open_policy
from evaluation.scores import missed_deadlines
from evaluation.simulate import engine_limits
from evaluation.workloads import Workload, solo_ttft
from slidingserve.contract.values import EngineLimits


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """How small instances are drawn: bursts of short requests with tight SLOs, so that not all can be met.

    Lengths and chunk budget in tokens, times relative to what the hardware takes: arrivals within ``spread`` times the
    prefill time of all prompts one after another, TTFT SLOs between ``tightest`` and ``loosest`` times that of the
    prompt alone, TBT SLOs between the same multiples of a small iteration.
    """

    requests: int = 8
    longest_prompt: int = 512
    longest_output: int = 5
    budget: int = 512
    granularities: tuple[int, ...] = (64, 32)
    spread: float = 0.4
    tightest: float = 1.2
    loosest: float = 4.0


DEFAULT_KIND = InstanceKind()


def small_limits(profile: HardwareProfile, kind: InstanceKind) -> EngineLimits:
    """Returns the profile's limits with the instance's budget."""
    return replace(engine_limits(profile), max_tokens_per_iteration=kind.budget)


def small_instance(profile: HardwareProfile, seed: int, kind: InstanceKind = DEFAULT_KIND) -> Workload:
    """Draws one instance; the same seed gives the same one."""
    random = np.random.default_rng(seed)
    n, timer = kind.requests, ProfileTimer(profile)
    prompts = random.integers(1, kind.longest_prompt + 1, n)
    outputs = random.integers(1, kind.longest_output + 1, n)
    alone = solo_ttft(timer, prompts, kind.budget)
    sixteen = np.full(16, 1, np.int64)
    decodes = timer.seconds(sixteen, sixteen * kind.longest_prompt, 16)
    return Workload(
        name=f"small-{seed}",
        arrival_seconds=np.sort(random.uniform(0.0, kind.spread * alone.sum(), n)),
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft_slo_seconds=alone * random.uniform(kind.tightest, kind.loosest, n),
        tbt_slo_seconds=decodes * random.uniform(kind.tightest, kind.loosest, n),
        ttlt_slo_seconds=np.zeros(n),
        class_index=np.zeros(n, np.int64),
        class_names=(),
        rate=0.0,
    )


def run_policy(policy: str, workload: Workload, profile: HardwareProfile, limits: EngineLimits) -> Outcome:
    """Runs one policy in the simulated engine, in this process.

    Raises:
        UnknownPolicyError, PolicyParameterError, PolicySpecError: of the policy's text.
        DecisionRefused: the policy failed.
    """
    source = open_policy(policy, profile.name, limits)
    return SimulatedEngine(workload, limits, ProfileTimer(profile), source).run()


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one policy is from the optimum over all instances.

    Attributes:
        policy: its text.
        met: requests that it met.
        at_optimum: instances in which it met as many as the best schedule that is known.
        beyond: instances in which it met more than any schedule can; above 0 the bound is wrong.
    """

    policy: str
    met: int
    at_optimum: int
    beyond: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies against the optimum.

    Attributes:
        profile: its name.
        instances, requests: how many, in all.
        optima: of each instance.
        met_at_least: requests that the best known schedules meet, be they found by the search or by a policy.
        met_at_most: requests that no schedules can exceed.
        settled: instances in which these are the same.
        distances: one for each policy, in the order asked for.
    """

    profile: str
    instances: int
    requests: int
    optima: tuple[Optimum, ...]
    met_at_least: int
    met_at_most: int
    settled: int
    distances: tuple[Distance, ...]


def compare(
    policies: Sequence[str],
    profile: HardwareProfile,
    seeds: Sequence[int],
    kind: InstanceKind = DEFAULT_KIND,
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Runs every policy on one instance for each seed and finds its optimum.

    ``progress`` is told the instances done. An instance of 8 requests takes 0.02 s to some seconds, the longer the
    harder it is to settle. Raises what `run_policy`
    and `clairvoyant_optimum` raise.
    """
    limits, timer = small_limits(profile, kind), ProfileTimer(profile)
    optima: list[Optimum] = []
    met = np.zeros((len(policies), len(seeds)), np.int64)
    for column, seed in enumerate(seeds):
        workload = small_instance(profile, seed, kind)
        optima.append(clairvoyant_optimum(workload, timer, limits, granularities_tokens=kind.granularities))
        for row, policy in enumerate(policies):
            outcome = run_policy(policy, workload, profile, limits)
            met[row, column] = np.count_nonzero(~missed_deadlines(workload, outcome))
        progress(column + 1)
    least = np.maximum([optimum.met_at_least for optimum in optima], met.max(axis=0, initial=0))
    most = np.array([optimum.met_at_most for optimum in optima])
    distances = tuple(
        Distance(policy, int(of.sum()), int(np.count_nonzero(of >= least)), int(np.count_nonzero(of > most)))
        for policy, of in zip(policies, met, strict=True)
    )
    return Comparison(
        profile=profile.name,
        instances=len(seeds),
        requests=len(seeds) * kind.requests,
        optima=tuple(optima),
        met_at_least=int(least.sum()),
        met_at_most=int(most.sum()),
        settled=int(np.count_nonzero(least == most)),
        distances=distances,
    )


def render(comparison: Comparison) -> str:
    """Returns a table in text; nearest policy first."""
    c = comparison
    optimum = f"{c.met_at_most}" if c.met_at_least == c.met_at_most else f"{c.met_at_least} to {c.met_at_most}"
    width = max([len("policy"), *(len(d.policy) for d in c.distances)])
    lines = [
        f"{c.profile}: {c.instances} instances, {c.requests} requests; "
        f"the clairvoyant optimum meets {optimum} (settled in {c.settled} instances)",
        f"{'policy':<{width}}  {'met':>6}  {'of optimum':>10}  {'equal in':>8}",
    ]
    for d in sorted(c.distances, key=lambda d: -d.met):
        share = d.met / c.met_at_most if c.met_at_most else 1.0
        lines.append(f"{d.policy:<{width}}  {d.met:>6}  {share:>10.1%}  {d.at_optimum:>8}")
    return "\n".join(lines)
