"""Orca: whole prompts in the order of arrival, while their most output can be reserved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policies.rivals import LIMITS, Req, decode, made, served

TIGHT = replace(LIMITS, kv_blocks=20)


def test_prompts_are_computed_whole_in_the_order_of_arrival() -> None:
    """The third does not fit into what is left of 100 tokens; the shorter one behind it does not overtake."""
    requests = [decode(), Req(60), Req(30), Req(20), Req(5)]
    assert served(made("orca", max_tokens=100), requests) == {0: 1, 1: 60, 2: 30}
    assert served(made("orca", max_tokens=200), requests) == {0: 1, 1: 60, 2: 30, 3: 20, 4: 5}


def test_a_prompt_longer_than_any_iteration_is_cut_alone() -> None:
    assert served(made("orca", max_tokens=100), [decode(), Req(150), Req(5)]) == {0: 1, 1: 99}
    assert served(made("orca", max_tokens=100), [decode(), Req(150, 99), Req(5)]) == {0: 1, 1: 51, 2: 5}


@pytest.mark.parametrize(("most", "got"), [(0, {0: 1, 1: 20, 2: 20}), (3, {0: 1, 1: 20, 2: 20}), (2, {0: 1, 1: 20})])
def test_batch_size_cap(most: int, got: dict[int, int]) -> None:
    assert served(made("orca", max_sequences=most), [decode(), Req(20), Req(20)]) == got


@pytest.mark.parametrize(
    ("max_output", "admitted"),
    [
        (0, True),  # unknown: its next token is all that can be reserved
        (16 * 8 - 4, True),  # 8 blocks left for prompt 4 + output
        (16 * 8 - 3, False),
    ],
)
def test_prompt_and_most_output_are_reserved(max_output: int, admitted: bool) -> None:
    """20 blocks; the decode holds 7 and has reserved 12 (prompt 96 + 96)."""
    running = decode(context=100, max_output=96)
    assert (running.prompt, running.output) == (96, 5)
    tokens = served(made("orca", TIGHT), [running, Req(4, max_output=max_output), Req(1)], TIGHT)
    assert tokens == ({0: 1, 1: 4, 2: 1} if admitted and max_output == 0 else {0: 1, 1: 4} if admitted else {0: 1})


def test_a_lone_request_may_generate_more_than_the_cache_holds() -> None:
    assert served(made("orca", TIGHT), [Req(50, max_output=10_000), Req(5)], TIGHT) == {0: 50}
    assert served(made("orca", TIGHT), [decode(), Req(50, max_output=10_000)], TIGHT) == {0: 1}
