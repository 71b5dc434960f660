"""A load of random requests, with everything that requests may do to a scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.vllm.engine_checks import check_queues, waiting_ids
from tests.vllm.scheduler_objects import EngineLoop, grammar_ready, make_request


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens, and chances in each step.

    Attributes:
        requests: how many come.
        prompt_tokens: longest prompt.
        output_tokens: longest output.
        arriving: chance that the next one comes.
        aborted: chance that one is aborted between two iterations, and again while one runs.
        structured: share of requests that wait for a grammar; one of those grammars becomes ready every other step.
        resets: chance that the prefix cache is dropped in the middle of everything, as after an update of weights:
            whoever runs is preempted, and tokens that are in flight are thrown away.
    """

    requests: int = 20
    prompt_tokens: int = 200
    output_tokens: int = 30
    arriving: float = 0.3
    aborted: float = 0.01
    structured: float = 0.0
    resets: float = 0.0


def drive(loop: EngineLoop, chance: random.Random, load: Load) -> int:
    """Runs the load to its end, looking at the queues after every step; returns the steps."""
    to_come = [_request(f"r{number}", chance, load) for number in range(load.requests)]
    without_grammar: list[Any] = []
    steps = 0
    while to_come or loop.has_work:
        steps += 1
        assert steps < 5000 + 20 * load.requests, f"no end in sight: {waiting_ids(loop.scheduler)} still wait"
        if to_come and chance.random() < load.arriving:
            request = to_come.pop()
            loop.add(request)
            if request.structured_output_request is not None:
                without_grammar.append(request)
        if without_grammar and chance.random() < 0.5:
            grammar_ready(without_grammar.pop(0))
        live = [name for name, request in loop.scheduler.requests.items() if not request.is_finished()]
        if live and chance.random() < load.aborted:
            loop.abort(chance.choice(live))
        if live and chance.random() < load.aborted:
            loop.abort_while_running(chance.choice(live))
        if chance.random() < load.resets:
            assert loop.scheduler.reset_prefix_cache(reset_running_requests=True)
        batch = loop.step()
        check_queues(loop.scheduler)
        assert sum(batch.values()) <= loop.scheduler.max_num_scheduled_tokens
    return steps


def _request(request_id: str, chance: random.Random, load: Load) -> Any:
    return make_request(
        request_id,
        chance.randint(1, load.prompt_tokens),
        chance.randint(1, load.output_tokens),
        shared_tokens=chance.choice([0, 64, 100]),
        structured=chance.random() < load.structured,
        priority=chance.randint(-2, 2),
    )
