"""The worked decision of the paper's algorithms, in `paper` mode."""

from __future__ import annotations

import pytest

from tests.slidingserve.scenes import Request, Scene, decoding, linear, prompt

# 45 ms for 1808 tokens, and 1600 tokens in 40 ms.
PER_TOKEN = 0.005 / 208
MODEL = linear(0.040 - 1600 * PER_TOKEN, PER_TOKEN)
R1, R2, R3, R4, R5 = (
    prompt(500, 0.040 + 1e-9, running=True),
    prompt(800, 0.120, running=True),
    prompt(200, 0.080, running=True),
    prompt(1024, 0.200),
    prompt(300, 0.060),
)
DECODES = [decoding(0.030)] * 8


@pytest.mark.parametrize("requests", [[R1, R2, R3, R4, R5], [R1, R2, R3, R5]])
def test_the_batch(requests: list[Request]) -> None:
    """r1 is at risk; of what can wait longer {r3, r5} is the best that finishes within its 40 ms."""
    decision = Scene([*requests, *DECODES]).decide(MODEL, mode="paper", max_tokens=2048, alpha=1.0)
    assert decision.path == "constructor"
    last = len(requests) - 1
    prompts = {place: tokens for place, tokens in decision.tokens.items() if place < len(requests)}
    assert prompts == {0: 500, 2: 200, last: 300}
    assert [decision.tokens[place] for place in range(len(requests), len(requests) + 8)] == [1] * 8
    assert decision.total == 1008


def test_robust_keeps_within_what_the_decodes_can_wait() -> None:
    """30 ms hold 1184 tokens: r1 and no more than 676 tokens beside it, which r3 and r5 still fit into."""
    decision = Scene([R1, R2, R3, R4, R5, *DECODES]).decide(MODEL, max_tokens=2048, fill_remainder=True)
    assert decision.path == "constructor"
    assert decision.predicted_seconds <= 0.030
    assert decision.tokens[0] == 500
    assert decision.tokens[4] == 300
    assert decision.total <= 1184
