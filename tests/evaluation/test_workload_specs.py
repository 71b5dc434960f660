"""Names of workloads as text: the canonical form, and every refusal by its words."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.simulate import SimulationRequest
from evaluation.workloads import (
    MIXES,
    Gamma,
    Poisson,
    Recorded,
    Switching,
    WorkloadError,
    WorkloadSpec,
    known_workloads,
    parse_workload,
)

DRAWN = (*MIXES, "transient", "diurnal", "bursty")
TRACES = ("azure-conv", "azure-code", "mooncake", "servegen-m-small")


def milliseconds() -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), st.floats(1e-3, 1e6))


@st.composite
def specs(draw: st.DrawFn) -> WorkloadSpec:
    name: str = draw(st.one_of(st.sampled_from((*DRAWN, *TRACES)), st.text(min_size=1).map("trace={}".format)))
    recorded = name not in DRAWN
    slos = draw(st.sampled_from(("absolute", "qoserve") if recorded else ("relative", "absolute", "qoserve")))
    fields: dict[str, Any] = {"slos": slos, "arrivals": Recorded()}
    if slos != "qoserve":
        fields |= {"ttft_ms": draw(milliseconds()), "tbt_ms": draw(milliseconds())}
    if recorded:
        return WorkloadSpec(name, **fields, part=draw(st.sampled_from(("all", "first-half", "second-half"))))
    if slos == "relative" and fields["ttft_ms"] is None:
        fields["floor_ms"] = draw(st.floats(0, 1e6))
    low, high = sorted(draw(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))))
    period = draw(st.floats(1e-3, 1e4))
    processes = (Poisson(), Gamma(draw(st.floats(1e-3, 100))), Switching(), Switching(period, low, high))
    return WorkloadSpec(name, **fields | {"arrivals": draw(st.sampled_from(processes))})


@given(spec=specs())
def test_the_text_of_a_workload_means_it(spec: WorkloadSpec) -> None:
    assert parse_workload(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, parse_workload(str(spec))}) == 1


@pytest.mark.parametrize("name", [*DRAWN, *TRACES, "trace=a folder/of:mine, all.csv", "trace=here:part=no:csv"])
def test_defaults_are_not_written_out(name: str) -> None:
    assert str(parse_workload(name)) == name


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("mixed-v1:floor_ms=200.0,slos=relative", "mixed-v1:floor_ms=200"),
        ("mixed-v1:arrivals=gamma", "mixed-v1:arrivals=gamma"),
        ("bursty:cv=13", "bursty:cv=13"),
        ("bursty:cv=5,arrivals=gamma", "bursty"),
        ("bursty:arrivals=switching,high=4", "bursty:arrivals=switching,high=4"),
        ("transient:low=1,high=2.50,period_s=60", "transient:period_s=60"),
        ("azure-conv:part=first-half,ttft_ms=1e3", "azure-conv:ttft_ms=1000,part=first-half"),
        ("trace=a:b.csv:slos=qoserve", "trace=a:b.csv:slos=qoserve"),
        ("trace=a:low=1:part=all", "trace=a:low=1:part=all"),  # else the path would lose its end
    ],
)
def test_one_text_for_one_meaning(text: str, canonical: str) -> None:
    assert str(parse_workload(text)) == canonical


def test_presets() -> None:
    assert parse_workload("transient").arrivals == Switching(120.0, 1.0, 2.5)
    assert parse_workload("diurnal").arrivals == Switching(900.0, 2.0, 5.0)
    assert parse_workload("bursty:cv=13").arrivals == Gamma(13.0)
    assert [parse_workload(name).mix for name in ("transient", "diurnal", "bursty", "mixed-v2")] == [
        *("mixed-v1", "mixed-v1", "mixed-v1", "mixed-v2")
    ]
    rates = {
        name: parse_workload(name).usual_rate for name in ("mixed-v1", "bursty", "transient", "diurnal", "mooncake")
    }
    assert rates == {"mixed-v1": 2.0, "bursty": 2.0, "transient": 1.75, "diurnal": 3.5, "mooncake": None}
    for name in TRACES:
        assert (parse_workload(name).slos, parse_workload(name).arrivals) == ("absolute", Recorded())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat:cv=2", "unknown workload 'chat'; choose one of sharegpt, .*, servegen-m-small, trace=PATH$"),
        ("", "workload '': write name or name:key=value,key=value"),
        ("mixed-v1:cv", "workload 'mixed-v1:cv': write name or name:key=value,key=value"),
        ("trace=", "workload 'trace=' names no file; write trace=PATH"),
        (
            "mixed-v1:rate=2",
            "unknown key 'rate'; mixed-v1 has slos, floor_ms, ttft_ms, tbt_ms, arrivals, cv, period_s, low, high",
        ),
        ("azure-conv:cv=2", "unknown key 'cv'; azure-conv has slos, ttft_ms, tbt_ms, part"),
        ("trace=x.csv:prt=all", "unknown key 'prt'; trace=x.csv has slos, ttft_ms, tbt_ms, part"),
        ("sharegpt:slos=loose", "slos=loose: give one of relative, absolute, qoserve"),
        ("sharegpt:arrivals=recorded", "arrivals=recorded: give one of poisson, gamma, switching"),
        ("mooncake:part=third", "part=third: give one of all, first-half, second-half"),
        ("bursty:cv=wild", "workload 'bursty:cv=wild': cv=wild: give a number"),
        ("bursty:cv=0", "cv 0 is out of range; choose one above 0 and at most 100"),
        ("bursty:cv=nan", "cv nan is out of range"),
        ("mixed-v1:cv=5", "cv needs arrivals=gamma, these are poisson"),
        ("bursty:low=1", "low needs arrivals=switching, these are gamma"),
        ("transient:low=-1", "low -1 requests/s is out of range; choose one above 0"),
        ("transient:low=3", "low 3 is above high 2.5; exchange them"),
        ("transient:period_s=0", "period_s 0 s is out of range; choose one above 0"),
        ("sharegpt:floor_ms=-1", "floor -0.001 s is out of range; choose one at least 0"),
        ("sharegpt:ttft_ms=-5", "TTFT SLO -0.005 s is out of range; choose one above 0"),
        ("sharegpt:tbt_ms=0", "TBT SLO 0 s is out of range; choose one above 0"),
        ("sharegpt:floor_ms=5,ttft_ms=5", "floor_ms=5 needs no ttft_ms, or has no effect; leave it out"),
        ("sharegpt:floor_ms=5,slos=absolute", "floor_ms=5 needs slos=relative, or has no effect; leave it out"),
        ("sharegpt:slos=qoserve,tbt_ms=5", "slos=qoserve says every SLO; leave out ttft_ms and tbt_ms"),
        ("mooncake:slos=relative", "requests of mooncake have no factor; choose absolute or qoserve"),
    ],
)
def test_refusals_say_what_to_do(text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        parse_workload(text)


def test_a_name_has_no_parts_and_a_trace_no_process() -> None:
    with pytest.raises(WorkloadError, match="part=first-half: only a trace has parts, sharegpt is drawn"):
        WorkloadSpec("sharegpt", part="first-half")
    with pytest.raises(WorkloadError, match="workload 'mooncake' cannot have gamma arrivals"):
        WorkloadSpec("mooncake", slos="absolute", arrivals=Gamma())


@pytest.mark.parametrize(
    ("text", "floor_ms", "ttft_ms"),
    [
        ("mixed-v1", 300.0, None),
        ("mixed-v1:floor_ms=0", 0.0, None),
        ("mixed-v1:floor_ms=500", 500.0, None),
        ("mixed-v1:ttft_ms=900", 0.0, 900.0),
        ("mixed-v1:slos=absolute", 0.0, None),
        ("azure-conv", 0.0, None),
    ],
)
def test_the_flag_of_the_floor_holds_where_the_text_is_silent_and_it_has_an_effect(
    text: str, floor_ms: float, ttft_ms: float | None
) -> None:
    spec = SimulationRequest(workload=text, floor_seconds=0.3).spec
    assert (spec.floor_ms, spec.ttft_ms) == (floor_ms, ttft_ms)


def test_flags_of_slos_yield_to_the_text() -> None:
    spec = SimulationRequest(workload="mixed-v1:tbt_ms=30", ttft_seconds=0.5, tbt_seconds=0.04).spec
    assert (spec.ttft_ms, spec.tbt_ms) == (500.0, 30.0)


def test_every_known_name_is_one() -> None:
    assert [str(parse_workload(name)) for name in known_workloads()] == [*known_workloads()]
