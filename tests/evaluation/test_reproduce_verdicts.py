"""What is said of a claim follows from the figures, and one that fails is said to fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.reproduce.verdicts import (
    RATIO,
    SHARE,
    Gain,
    Scale,
    Verdict,
    in_words,
    judge,
    judge_order,
    mean_gain,
    share_gain,
)

HOLDS, IN_PART, FAILS, UNKNOWN = Verdict


@pytest.mark.parametrize(
    ("gain", "published", "verdict"),
    [
        (Gain(1.30, 1.20, 1.40), 1.30, HOLDS),
        (Gain(1.30, 1.20, 1.40), 1.40, HOLDS),  # it may be as large
        (Gain(1.30, 1.20, 1.40), 1.50, IN_PART),  # clear, but smaller
        (Gain(1.60, 1.50, 1.70), 1.20, HOLDS),  # larger
        (Gain(1.05, 0.98, 1.12), 1.10, UNKNOWN),  # may be none
        (Gain(1.02, 1.01, 1.04), 1.10, UNKNOWN),  # clear, but too small to be claimed
        (Gain(1.01, 1.00, 1.02), 1.10, FAILS),  # whatever it is, it is not worth claiming
        (Gain(0.80, 0.70, 0.90), 1.10, FAILS),
        (Gain(1.00, 1.00, 1.00), 1.10, FAILS),
        (Gain(1.30), 1.10, UNKNOWN),  # no interval
        (Gain(math.nan), 1.10, UNKNOWN),
        (Gain(math.inf, math.inf, math.inf), 1.10, HOLDS),  # the other has no goodput at all
        (Gain(0.0, 0.0, 0.0), 1.10, FAILS),  # we have none
        (Gain(1.30, 1.20, 1.40), None, HOLDS),
    ],
)
def test_ratios(gain: Gain, published: float, verdict: Verdict) -> None:
    assert judge(gain, published, RATIO) is verdict


@pytest.mark.parametrize(
    ("gain", "published", "verdict"),
    [
        (Gain(0.30, 0.20, 0.40), 0.302, HOLDS),
        (Gain(0.10, 0.05, 0.15), 0.302, IN_PART),
        (Gain(0.10, -0.05, 0.25), 0.302, UNKNOWN),
        (Gain(0.00, -0.005, 0.005), 0.302, FAILS),
        (Gain(-0.10, -0.15, -0.05), 0.302, FAILS),
    ],
)
def test_differences_of_shares(gain: Gain, published: float, verdict: Verdict) -> None:
    assert judge(gain, published, SHARE) is verdict


values = st.floats(0.2, 5.0)


@st.composite
def gains(draw: st.DrawFn) -> Gain:
    low, value, high = sorted(draw(st.tuples(values, values, values)))
    return Gain(value, low, high)


@given(gains(), st.one_of(st.none(), values))
def test_what_a_verdict_rests_on(gain: Gain, published: float | None) -> None:
    verdict = judge(gain, published, RATIO)
    is_clear = gain.low > 1.0 and gain.value >= 1.03
    assert (verdict in (HOLDS, IN_PART)) == is_clear
    assert (verdict is FAILS) == (gain.high < 1.03)
    if is_clear and published is not None:
        assert (verdict is HOLDS) == (gain.high >= published)
    if verdict in (HOLDS, IN_PART):
        turned = Gain(1 / gain.value, 1 / gain.high, 1 / gain.low)
        assert judge(turned, published, RATIO) is FAILS, "the opposite of what is clear does not hold"


@given(gains(), values, st.floats(0.0, 1.0))
def test_a_wider_interval_never_says_more(gain: Gain, published: float, more: float) -> None:
    wider = Gain(gain.value, gain.low - more, gain.high + more)
    before, after = judge(gain, published, RATIO), judge(wider, published, RATIO)
    if before is UNKNOWN:
        assert after is UNKNOWN
    assert not (before in (HOLDS, IN_PART) and after is FAILS)
    assert not (before is FAILS and after in (HOLDS, IN_PART))


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([HOLDS, HOLDS, HOLDS], HOLDS),
        ([HOLDS, IN_PART, HOLDS], HOLDS),  # how large the gains are is no matter to the order
        ([HOLDS, UNKNOWN, HOLDS], UNKNOWN),
        ([HOLDS, FAILS, HOLDS], IN_PART),
        ([HOLDS, FAILS, UNKNOWN], IN_PART),
        ([FAILS, FAILS, FAILS], FAILS),
        ([FAILS, UNKNOWN, UNKNOWN], FAILS),
        ([], UNKNOWN),
    ],
)
def test_orders(pairs: list[Verdict], verdict: Verdict) -> None:
    assert judge_order(pairs) is verdict


def test_counts_in_words() -> None:
    assert in_words([HOLDS, FAILS, HOLDS, UNKNOWN]) == (
        "holds on 2 of 4, does not hold on 1, cannot be told within the interval on 1"
    )
    assert in_words([FAILS, FAILS]) == "does not hold on 2 of 2"
    assert in_words([]) == "holds on none of 0"


def test_intervals_of_the_mean_over_seeds() -> None:
    gain = mean_gain(np.array([1.0, 2.0, 3.0]))
    assert gain.value == 2.0
    assert gain.low == pytest.approx(2.0 - 4.303 / math.sqrt(3), abs=1e-9)
    assert gain.high == pytest.approx(2.0 + 4.303 / math.sqrt(3), abs=1e-9)
    assert judge(mean_gain(np.array([0.4])), None, SHARE) is UNKNOWN, "one seed says nothing about others"


def test_pairing_is_by_seed() -> None:
    """Two policies that both depend much on the seed, one always 2 points better than the other."""
    gain = share_gain([0.52, 0.12, 0.32], [0.50, 0.10, 0.30])
    assert gain.value == pytest.approx(0.02)
    assert judge(gain, None, SHARE) is HOLDS
    assert judge(share_gain([0.52, 0.12, 0.32], [0.10, 0.30, 0.50]), None, Scale(0.0, 0.01)) is UNKNOWN
