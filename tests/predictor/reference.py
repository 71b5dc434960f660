"""What the predictor's kernels compute, in plain Python and without an eye on speed, and inputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from predictor.features import FEATURES, ROW, add_decode, batch_features
from predictor.forecast import FILL_ROW, append_prompt
from predictor.model import EXPERTS, Expert, LatencyModel
from slidingserve.contract.values import Floats

Entries = Sequence[tuple[int, int]]  # (tokens, context) of each request


def row_of(entries: Entries) -> list[float]:
    """The features that the paper defines, one after the other, behind the total tokens."""
    present = [(c, u) for c, u in entries if c > 0]
    decodes = [(c, u) for c, u in present if c <= 1]
    prefills = [(c, u) for c, u in present if c > 1]
    return [
        sum(c for c, _ in present),
        sum(c * (u + c) for c, u in prefills),
        sum(c * c for c, _ in prefills),
        sum(u for _, u in present),
        len(decodes),
        sum(u for _, u in decodes),
        sum(c for c, _ in prefills),
        max((c for c, _ in prefills), default=0),
    ]


def seconds_of(model: LatencyModel, row: Sequence[float]) -> float:
    """What a model says of a row."""
    tokens, decodes, prefill_tokens = int(row[0]), row[4], row[6]
    if tokens == 0:
        return 0.0
    scenario = "decode" if prefill_tokens == 0 else "prefill" if decodes == 0 else "mixed"
    expert = model.experts.get(scenario, model.experts["global"])
    seconds = expert.intercept_seconds + sum(w * x for w, x in zip(expert.weights, row[1:], strict=True))
    table = model.table_seconds
    if not table:
        return seconds
    if tokens < len(table):
        return seconds + table[tokens]
    half = len(table) // 2
    slope = max(0.0, (table[-1] - table[half]) / max(1, len(table) - 1 - half))
    return seconds + table[-1] + slope * (tokens - len(table) + 1)


def spent(prompts: Entries, tokens: float) -> list[int]:
    """Tokens that each prompt gets if ``tokens`` are spent on them in order."""
    given = []
    for missing, _ in prompts:
        given.append(int(max(0, min(missing, tokens))))
        tokens -= given[-1]
    return given


class Fill(NamedTuple):
    """A base and prompts, as lists and as the kernels take them."""

    base: Entries
    prompts: Entries
    table: Floats

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def base_tokens(self) -> int:
        return sum(c for c, _ in self.base)

    @property
    def tokens(self) -> int:
        return self.base_tokens + sum(c for c, _ in self.prompts)

    def at(self, budget: float) -> list[tuple[int, int]]:
        """The iteration of a budget."""
        given = spent(self.prompts, budget - self.base_tokens)
        return [*self.base, *((c, u) for c, (_, u) in zip(given, self.prompts, strict=True))]

    def after(self, low: float, high: float, new_decodes: bool) -> list[tuple[int, int]]:
        """The iteration after that of ``low``, with prompts up to ``high``."""
        first = spent(self.prompts, low - self.base_tokens)
        left = [(missing - done, u + done) for done, (missing, u) in zip(first, self.prompts, strict=True)]
        second = [(c, u) for c, (_, u) in zip(spent(left, high - low), left, strict=True)]
        completed = [(1, u) for missing, u in left if missing == 0] if new_decodes else []
        return [*self.base, *second, *completed]


def build(base: Entries, prompts: Entries) -> Fill:
    """Builds a fill by the kernels, as policies do."""
    table = np.zeros((len(prompts) + 1, FILL_ROW))
    for tokens, context in base:
        add_decode(table[0], float(tokens), float(context))
    for row, (tokens, context) in enumerate(prompts):
        append_prompt(table, row, float(tokens), float(context))
    return Fill(base, prompts, table)


def kernel_row(entries: Entries) -> Floats:
    """The row of `batch_features`."""
    columns = [np.array([entry[i] for entry in entries], np.int64) for i in range(2)]
    row = np.full(ROW, np.nan)
    batch_features(columns[0], columns[1], len(entries), row)
    return row


# Multiples of 1/1024 in experts and tables: sums are exact, so nothing depends on the order of adding.
amounts = st.integers(-4096, 4096).map(lambda n: n / 1024)
experts = st.builds(Expert, amounts, st.tuples(*[amounts] * len(FEATURES)))
tables = st.one_of(st.just(()), st.lists(amounts, min_size=2, max_size=60).map(tuple))


@st.composite
def models(draw: Any) -> LatencyModel:
    """Models with and without a table, with some experts; weights may be negative."""
    present = draw(st.sets(st.sampled_from(EXPERTS[:-1])))
    return LatencyModel("random/1", "none", {n: draw(experts) for n in sorted({*present, "global"})}, draw(tables))


decodes = st.lists(st.tuples(st.just(1), st.integers(0, 5000)), max_size=8)
waiting = st.lists(st.tuples(st.one_of(st.integers(1, 3), st.integers(1, 90)), st.integers(0, 3000)), max_size=6)
fills = st.builds(build, decodes, waiting)
