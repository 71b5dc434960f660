"""The answer in words: what to run, what can be promised, what the default would cost, what to beware of."""

from __future__ import annotations

import textwrap

from evaluation.goodput.points import base_policy
from evaluation.goodput.screen import columns
from evaluation.tuning.answer import Answer, Contestant, Lead

WIDTH = 100


def render(answer: Answer) -> str:
    """Returns the answer as text: sentences, the last round's table, warnings."""
    paragraphs = [_choice(answer), promised(answer), _default(answer)]
    if answer.tested is not None:
        paragraphs.insert(2, tested(answer))
    if answer.engines is not None:
        paragraphs.insert(2, engines(answer))
    if len(answer.others) > 0:
        paragraphs.append(_second(answer))
    parts = [_fill(" ".join(paragraphs[:2])), *(_fill(text) for text in paragraphs[2:])]
    parts.append(_table(answer))
    parts += [_fill(f"Beware: {warning}", "  ") for warning in answer.warnings]
    return "\n\n".join(parts) + "\n"


def promised(answer: Answer) -> str:
    """Says what can be promised, and how that was found."""
    best = answer.best
    basis = (
        f"In the {answer.traffic.tuning_requests:,} requests that it was chosen on the goodput is "
        f"{_rate(best.goodput)}, and in another window of this traffic {best.low:.3g} to {best.high:.3g} (95 % "
        "interval by time blocks, down to the worst of them)."
    )
    if best.promised_rate <= 0:
        return f"No rate can be promised with at most {_percent(answer.limit)} of requests missing an SLO. {basis}"
    return (
        f"It can be promised {_rate(best.promised_rate)} with at most {_percent(answer.limit)} of requests missing an "
        f"SLO ({answer.slos}). {basis}"
    )


def tested(answer: Answer) -> str:
    """Says whether the promise held where nothing was chosen."""
    held_out, best = answer.tested, answer.best
    assert held_out is not None
    what = "of the second half of the trace" if answer.traffic.is_recorded else "drawn anew"
    seen = (
        f"Tested on {held_out.requests:,} requests {what}, which were not looked at before: at "
        f"{_rate(best.promised_rate)} {_percent(held_out.missed)} missed. The promise "
    )
    if held_out.held:
        return f"{seen}held."
    remedy = (
        f"plan with {_rate(held_out.rate_that_holds)}, which both parts allow, and record for longer"
        if held_out.rate_that_holds > 0
        else "promise nothing on this trace, and record for longer"
    )
    return f"{seen}did NOT hold: {remedy}."


def _choice(answer: Answer) -> str:
    name, cap = base_policy(answer.best.policy)
    if cap is None:
        return f"Run {name} on {answer.profile}."
    alone = f" (vLLM with --max-num-batched-tokens {cap}; it needs no sidecar)" if name == answer.default.policy else ""
    return f"Run {name} with max_tokens={cap}{alone} on {answer.profile}."


def _default(answer: Answer) -> str:
    best, default = answer.best, answer.default
    if best.policy == default.policy:
        return "That is vLLM's default: nothing that was tried is better for this traffic."
    lost = answer.lost_with_default
    if lost is None:
        return f"With vLLM's default no rate can be promised either (goodput {_rate(default.goodput)})."
    if default.promised_rate > 0:
        text = (
            f"With vLLM's default the same promise holds to {_rate(default.promised_rate)}: {_percent(lost)} would be "
            "lost."
        )
    else:
        text = (
            f"With vLLM's default not even {_rate(default.lowest_rate)} can be promised: {_percent(lost)} or more "
            "would be lost."
        )
    if answer.tested is not None:
        missed = _percent(answer.tested.default_missed)
        text += f" At {_rate(best.promised_rate)} it missed {missed} of the tested requests."
    return text


def engines(answer: Answer) -> str:
    """Says how many engines the recorded rate takes."""
    rate, count = answer.traffic.recorded_rate, answer.engines
    assert rate is not None
    recorded = f"Your trace has {_rate(rate)} recorded: "
    if count == 1:
        return f"{recorded}one engine is enough."
    return f"{recorded}more than can be promised of one engine. That is {count} engines, each with its share of them."


def _second(answer: Answer) -> str:
    other = next((c for c in answer.others if c.policy != answer.default.policy), answer.others[0])
    return f"Second best of another kind: {other.policy}, promised {_rate(other.promised_rate)}; {_lead(other.lead)}."


def _lead(lead: Lead | None) -> str:
    assert lead is not None
    if lead.median is None or lead.low is None or lead.high is None:
        return "it has no goodput in many windows"
    interval = f"{100 * lead.low:.0f} to {100 * lead.high:.0f} %"
    difference = f"difference {100 * lead.median:.0f} % ({interval})"
    return difference if lead.is_clear else f"{difference}, which is not clear: either will do"


def _table(answer: Answer) -> str:
    rows = [_row(contestant) for contestant in (answer.best, *answer.others)]
    return columns(["settings", "promised", "goodput", "in another window (95 %)", "the best has more by"], rows)


def _row(contestant: Contestant) -> list[str]:
    lead = contestant.lead
    if lead is None:
        more = ""
    elif lead.median is None or lead.low is None or lead.high is None:
        more = "-"
    else:
        more = f"{100 * lead.median:.0f} % ({100 * lead.low:.0f} to {100 * lead.high:.0f} %)"
    return [
        contestant.policy,
        f"{contestant.promised_rate:.3g}/s" if contestant.promised_rate > 0 else "none",
        f"{contestant.goodput:.3g}/s",
        f"{contestant.low:.3g} to {contestant.high:.3g}/s",
        more,
    ]


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _rate(rate: float) -> str:
    return f"{rate:.3g} requests/s"


def _percent(share: float) -> str:
    """Returns a percentage that does not round a miss away."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 or value == round(value) else f"{value:.2g} %"
