"""`slidingserve tune`: the race for the best settings, warnings, words, settings file, the command."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from evaluation.goodput.points import BLOCKS, Point, RunKey, base_policy
from evaluation.goodput.provenance import Provenance
from evaluation.goodput.rates import rate_of
from evaluation.goodput.runner import run_point
from evaluation.goodput.search import search_around, search_upwards
from evaluation.goodput.store import StoreError
from evaluation.goodput.task import Found, Place, Search, run_keys, run_search
from evaluation.tuning.answer import Answer, Contestant, Lead, Trial, to_json
from evaluation.tuning.cautions import cautions
from evaluation.tuning.climb import Climb, climb_with, run_climb
from evaluation.tuning.race import Course, Effort, Race, Standings, effort_for
from evaluation.tuning.settings import SettingsFileError, check_free, to_toml, write
from evaluation.tuning.traffic import Traffic, claim_trace, traffic_of
from evaluation.tuning.words import render
from evaluation.workloads import parse_workload
from sidecar.cli.progress import SweepProgress
from sidecar.config import load_settings
from tests.cli.runner import command, complaint, environment, run, run_here
from tests.evaluation.made_points import LIMIT, SIZE, point

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


class FakePool:
    """Runs and searches of policies whose goodput is told, at once and in this process."""

    def __init__(self, goodput: Callable[[str], float], slow: bool = False) -> None:
        self._goodput, self._slow = goodput, slow
        self.searches: list[Search] = []
        self.climbs: list[Climb] = []
        self.runs: list[RunKey] = []

    def submit(self, function: object, what: Any, place: Place) -> Future[Any]:
        future: Future[Any] = Future()
        if function is run_search:
            self.searches.append(what)
            if not self._slow or self._is_certain(what):
                future.set_result(self._search(what))
        elif function is run_climb:
            self.climbs.append(what)
            future.set_result(climb_with(lambda step: self._run(what.key(step)), what, -150, 150))
        else:
            assert function is run_keys
            self.runs.append(what[0])
            future.set_result([self._run(what[0])])
        return future

    @staticmethod
    def _is_certain(search: Search) -> bool:
        return search.policy == "vllm" or ":" not in search.policy

    def _search(self, search: Search) -> Found:
        def meets(step: int) -> bool:
            return rate_of(step) <= self._goodput(search.policy) + 1e-9

        if search.hint is None:
            return Found(search, search_upwards(meets, -150, 150, search.resolution))
        return Found(search, search_around(meets, search.hint, -150, 150, search.resolution))

    def _run(self, key: RunKey) -> Point:
        """Misses are 1 % at the goodput and grow fast, all in a rush of five blocks."""
        count = min(SIZE, round(10 * (key.rate / self._goodput(key.policy)) ** 4))
        return replace(point(key.rate, [count] * 5 + [0] * 15), key=key)


TRAFFIC = Traffic("mine", "trace=mine:part=first-half", 5000, "trace=mine:part=second-half", 5000, 0, 5.0, 600.0)
EFFORT = Effort(300, 1500)
TRUE = {"vllm": 1.0, "sarathi-edf": 1.6, "qoserve": 1.2, "slidingserve": 1.5}
BEST_CAP = {"vllm": 512, "sarathi-edf": 256, "qoserve": 128, "slidingserve": 384}


def true_goodput(policy: str) -> float:
    base, cap = base_policy(policy)
    gain = 1.0 if cap is None else 1.3 if cap == BEST_CAP[base] else 0.9
    return TRUE[base] * gain


COURSE = Course("h100-tp1", TRAFFIC, tuple(TRUE), "vllm", EFFORT, LIMIT)


def race(pool: FakePool, seconds: float = 0.0) -> Standings:
    return Race(COURSE, Place(Path("unused")), cast(Any, pool), lambda share, text: None, seconds).run()


def test_the_race_finds_the_best_cap_of_the_best_policy_and_keeps_the_default_in() -> None:
    pool = FakePool(true_goodput)
    standings = race(pool)
    assert [c.policy for c in standings.contenders] == [
        "sarathi-edf:max_tokens=256",
        "slidingserve:max_tokens=384",
        "vllm",
    ]
    best = standings.contenders[0]
    assert best.promise.goodput == pytest.approx(1.6 * 1.3, rel=0.02)
    assert 0.5 * best.promise.goodput < best.promise.rate < best.promise.goodput
    assert best.promise.low < best.promise.goodput < best.promise.high
    assert standings.left_out == ()
    assert len(standings.screened) == 4 * len(EFFORT.caps), "2048 is the engine's own limit"
    assert {search.requests for search in pool.searches} == {300, 1500}
    assert [climb.requests for climb in pool.climbs] == [5000] * 3


def test_the_first_rounds_last_long_enough_on_fast_hardware() -> None:
    assert effort_for(2.0) == EFFORT
    fast = effort_for(40.0)
    assert (fast.screen_requests / 40.0, fast.halving_requests / 40.0) == (75.0, 380.0)


def test_when_the_time_is_up_settings_are_left_out_but_never_the_default() -> None:
    standings = race(FakePool(true_goodput, slow=True), seconds=1e-6)
    assert {c.policy for c in standings.contenders} >= {"vllm"}
    assert standings.contenders[0].policy == "sarathi-edf"
    assert "slidingserve:max_tokens=384" in standings.left_out


def test_a_default_that_nothing_beats_is_the_answer() -> None:
    standings = race(FakePool(lambda policy: 2.0))
    assert standings.contenders[0].promise.rate == standings.of("vllm").promise.rate
    assert all(base_policy(c.policy)[1] is None for c in standings.contenders), "no cap where none is better"


def test_an_answer_comes_with_what_to_beware_of() -> None:
    standings = race(FakePool(true_goodput))
    best = standings.contenders[0]
    at_promise = best.climbed.curve[0]
    assert list(cautions(standings, COURSE, at_promise)) == [], "a rush of five of twenty blocks is not two"

    def said(standings: Standings = standings, traffic: Traffic = TRAFFIC, error: float | None = None) -> str:
        found = list(cautions(standings, replace(COURSE, traffic=traffic), replace(at_promise, prediction_error=error)))
        assert len(found) == 1, found
        return found[0]

    assert "1 % of the 700 requests that were chosen on are 7" in said(traffic=replace(TRAFFIC, tuning_requests=700))
    assert "predictions of iteration times were off by 25 %" in said(error=0.25)
    assert said(replace(standings, left_out=("orca",))).startswith("the time was up: 1 settings were not looked at")
    squeezed = said(traffic=replace(TRAFFIC, recorded_rate=0.1))
    assert "21 times the recorded rate" in squeezed
    assert "lasts only 2403 s" in squeezed
    topless = replace(best, climbed=replace(best.climbed, has_top=False))
    assert "no rate up to 2.08 requests/s fails" in said(replace(standings, contenders=(topless,)))
    rush = [replace(p, missed_by_block=(p.missed, *[0] * (BLOCKS - 1))) for p in best.climbed.curve]
    concentrated = replace(best, climbed=replace(best.climbed, curve=tuple(rush)))
    assert "100 % of the misses" in said(replace(standings, contenders=(concentrated,)))


def write_trace(path: Path, count: int, gap: float = 0.5) -> Path:
    path.write_text(HEADER + "".join(f"{i * gap},{100 + i % 7},{5 + i % 3}\n" for i in range(count)))
    return path


def test_a_trace_is_chosen_on_with_its_first_half_and_tested_with_its_second(tmp_path: Path) -> None:
    spec = parse_workload(f"trace={write_trace(tmp_path / 'mine.csv', 601)}", tbt_ms=80.0)
    traffic = traffic_of(spec, None, None)
    assert (traffic.tuning_requests, traffic.held_out_requests) == (301, 300)
    assert traffic.tuning == f"{spec},part=first-half"
    assert traffic.held_out == f"{spec},part=second-half"
    assert traffic.recorded_rate == pytest.approx(2.0)
    assert traffic_of(spec, 200, None).held_out_requests == 200
    drawn = traffic_of(parse_workload("sharegpt"), None, None)
    assert drawn.recorded_rate is None
    assert drawn.held_out_seed != 0


def test_runs_of_a_trace_that_has_changed_are_not_taken_up(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "mine.csv", 300)
    spec = parse_workload(f"trace={file}")
    claim_trace(tmp_path / "results", spec, None)
    claim_trace(tmp_path / "results", spec, None)
    write_trace(file, 301)
    with pytest.raises(StoreError, match=r"another content of .*mine\.csv; give another --results"):
        claim_trace(tmp_path / "results", spec, None)


def contestant(policy: str, rate: float, lead: Lead | None = None) -> Contestant:
    return Contestant(policy, rate, 1.1 * rate, rate, 1.2 * rate, 0.5, lead)


ANSWER = Answer(
    profile="h100-tp1",
    traffic=TRAFFIC,
    slos="TTFT 1 s, TBT 50 ms",
    least_ttft_seconds=1.0,
    least_tbt_seconds=0.05,
    limit=LIMIT,
    best=contestant("slidingserve:max_tokens=384", 2.0),
    default=contestant("vllm", 0.8, Lead(1.5, 1.4, 1.6)),
    others=(contestant("qoserve", 1.9, Lead(0.04, 0.01, 0.07)), contestant("vllm", 0.8, Lead(1.5, 1.4, 1.6))),
    tested=Trial(3000, 0.004, True, 0.31, 2.0),
    engines=3,
    warnings=("rushes decide.",),
    screened={"vllm": 0.9, "qoserve": 2.0},
    left_out=(),
    origin=Provenance("1.0", "abc", "code", {"h100-tp1": "digest"}),
)


def said(answer: Answer) -> str:
    return " ".join(render(answer).split())


def test_the_answer_comes_in_words_first() -> None:
    text = said(ANSWER)
    assert text.startswith("Run slidingserve with max_tokens=384 on h100-tp1. It can be promised 2 requests/s with")
    assert "5 requests/s recorded: more than can be promised of one engine. That is 3 engines" in text
    assert "at 2 requests/s 0.4 % missed. The promise held." in text
    assert "With vLLM's default the same promise holds to 0.8 requests/s: 60 % would be lost." in text
    assert "Second best of another kind: qoserve, promised 1.9 requests/s; difference 4 % (1 to 7 %)." in text
    assert "Beware: rushes decide." in text


def test_bad_news_is_said_as_it_is() -> None:
    broken = replace(ANSWER, tested=Trial(3000, 0.021, False, 0.4, 1.5))
    assert "2.1 % missed. The promise did NOT hold: plan with 1.5 requests/s" in said(broken)
    none = replace(ANSWER, best=contestant("vllm", 0.0), default=contestant("vllm", 0.0), tested=None, engines=None)
    assert "No rate can be promised" in said(none)
    assert "nothing that was tried is better" in said(none)
    unclear = contestant("qoserve", 1.9, Lead(0.02, -0.01, 0.05))
    assert "which is not clear: either will do" in said(replace(ANSWER, others=(unclear,)))


def test_a_default_of_which_nothing_can_be_promised_is_known_to_lose_at_least_so_much() -> None:
    lost = replace(ANSWER, default=contestant("vllm", 0.0))
    assert "With vLLM's default not even 0.5 requests/s can be promised: 75 % or more would be lost." in said(lost)
    assert lost.lost_with_default == pytest.approx(0.75)


def test_the_document_is_json_and_complete() -> None:
    document = json.loads(json.dumps(to_json(ANSWER), allow_nan=False))
    assert (document["schema"], document["kind"]) == (1, "tune")
    assert document["lost_with_default"] == pytest.approx(0.6)
    assert document["best"]["promised_rate"] == 2.0
    assert document["tested"]["held"] is True
    assert document["profiles"] == {"h100-tp1": "digest"}


def test_the_sidecar_takes_the_settings_and_the_comments_say_where_they_are_from(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    write(ANSWER, file, force=False)
    found, sources = load_settings({}, file, {})
    assert (found.policy, found.profile) == ("slidingserve:max_tokens=384", "h100-tp1")
    assert (found.default_ttft_seconds, found.default_tbt_seconds) == (1.0, 0.05)
    assert sources["policy"] == str(file)
    comments = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("#"))
    for text in (
        "(commit abc)",
        "digest digest",
        "It can be promised 2 requests/s",
        "The promise held",
        "rushes decide",
    ):
        assert text in comments
    with pytest.raises(SettingsFileError, match="is there already; give another file, or --force"):
        write(ANSWER, file, force=False)
    write(replace(ANSWER, best=contestant("vllm", 1.0)), file, force=True)
    assert tomllib.loads(file.read_text())["policy"] == "vllm"
    for bad in (tmp_path, tmp_path / "nowhere" / "x.toml"):
        with pytest.raises(SettingsFileError, match="--out"):
            check_free(bad, force=True)


def test_text_of_any_kind_is_toml() -> None:
    odd = replace(ANSWER, profile='a"b\\c', origin=replace(ANSWER.origin, profiles={'a"b\\c': "d"}))
    assert tomllib.loads(to_toml(odd))["profile"] == 'a"b\\c'


def test_progress_is_a_line_every_ten_seconds_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with SweepProgress() as progress:
        progress.update(0.0, "nothing yet")
        for share in (0.1, 0.2, 0.25):
            now[0] += 6.0
            progress.update(share, f"vllm at {share:g}")
        now[0] += 12.0
        progress.update(0.5, "half")
    assert capsys.readouterr().err == " 20 %  0:48 left  vllm at 0.2\n 50 %  0:30 left  half\n"


def refused(tmp_path: Path, *arguments: str) -> str:
    return complaint(run_here("tune", *arguments, "--out", str(tmp_path / "s.toml"), "--results", str(tmp_path / "r")))


def test_bad_input_is_explained_before_anything_is_run(tmp_path: Path) -> None:
    mine = str(write_trace(tmp_path / "mine.csv", 400))
    usual = ("--trace", mine, "--profile", "h100-tp1")
    assert refused(tmp_path) == "give either --trace FILE or --workload NAME"
    assert "either" in refused(tmp_path, *usual, "--workload", "sharegpt")
    assert "--tbt-ms -5: give a time above 0 ms" in refused(tmp_path, *usual, "--tbt-ms", "-5")
    assert "--ttft-ms 0: give a time above 0" in refused(tmp_path, *usual, "--ttft-ms", "0")
    assert "--violations 100" in refused(tmp_path, *usual, "--violations", "100")
    assert "unknown policy 'nope'; use one of: explore" in refused(tmp_path, *usual, "--policy", "nope")
    assert "choose one of sharegpt" in refused(tmp_path, "--workload", "nope")
    assert "nowhere" in refused(tmp_path, "--trace", mine, "--profile", "nowhere")
    assert "TBT SLO 1 ms is below" in refused(tmp_path, *usual, "--tbt-ms", "1")
    assert "requests 10: a promise needs 100 or more" in refused(tmp_path, *usual, "--requests", "10")
    assert "give --data FOLDER" in refused(tmp_path, "--workload", "azure-conv")
    assert "leave it out" in refused(tmp_path, "--workload", f"trace={mine}:part=first-half")
    assert not (tmp_path / "r").exists()
    (tmp_path / "s.toml").write_text("mine")
    assert "is there already" in refused(tmp_path, *usual)
    assert (tmp_path / "s.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (HEADER.encode(), "holds a header but no request"),
        (b"\0\1\2", "binary"),
        (HEADER.encode() + b"0,100,10\n" * 300, "arrive at once; there is no rate to scale"),
        (HEADER.encode() + b"0,100,10\n" * 30 + b"9,100,10\n", "has 31 requests; a promise needs at least 200"),
    ],
)
def test_a_trace_that_is_of_no_use_is_explained(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "mine.csv"
    if content is not None:
        file.write_bytes(content)
    assert words in refused(tmp_path, "--trace", str(file), "--profile", "h100-tp1")


def tuned(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Tunes as a user does; returns what it says and the document."""
    out, results, answer = folder / "sidecar.toml", folder / "results", folder / "answer.json"
    where = ("--out", str(out), "--results", str(results), "--json", str(answer), "--force")
    ended = subprocess.run(
        command("tune", *arguments, *where), capture_output=True, text=True, timeout=1800, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads(answer.read_text())


@pytest.mark.long
def test_tune_from_a_trace_to_settings_that_the_sidecar_takes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(0.2, 1200))
    rows = zip(arrivals, random.integers(50, 4000, 1200), random.integers(5, 200, 1200), strict=True)
    trace = tmp_path / "mine.csv"
    trace.write_text(HEADER + "".join(f"{a:.3f},{p},{o}\n" for a, p, o in rows))
    options = ("--trace", str(trace), "--profile", "h100-tp1", "--policy", "vllm", "--policy", "slidingserve")
    words, answer = tuned(tmp_path, *options, "--jobs", "2")
    assert words.startswith("Run ")
    assert answer["best"]["promised_rate"] > 0
    assert any("chance has a large part" in warning for warning in answer["warnings"])
    checked = run("check-config", "--config", str(tmp_path / "sidecar.toml"))
    assert checked.status == 0, checked.stderr
    assert answer["best"]["policy"] in checked.stdout
    kept = (tmp_path / "results" / "points.jsonl").read_bytes()
    assert tuned(tmp_path, *options, "--jobs", "2")[1] == answer
    assert (tmp_path / "results" / "points.jsonl").read_bytes() == kept, "all of it was there already"
    other = tmp_path / "other"
    other.mkdir()
    assert tuned(other, *options, "--jobs", "1")[1] == answer, "whatever the number of processes"


@pytest.mark.long
@pytest.mark.data
@pytest.mark.parametrize(("workload", "profile"), [("azure-conv", "h100-tp1"), ("azure-code", "h100-tp1")])
def test_the_promise_for_a_production_trace_holds_on_its_second_half(
    workload: str, profile: str, data_folder: Path, tmp_path: Path
) -> None:
    words, answer = tuned(
        tmp_path, "--workload", workload, "--profile", profile, "--data", str(data_folder), *CANDIDATES
    )
    assert "The promise held." in " ".join(words.split())
    best, tested = answer["best"], answer["tested"]
    assert 0 < best["promised_rate"] <= best["goodput"]
    assert tested["missed"] <= LIMIT
    again = run_point(
        RunKey(profile, f"{workload}:part=second-half", best["policy"], best["promised_rate"], 0, tested["requests"]),
        data=data_folder,
    )
    assert again.violation == tested["missed"], "the test is on the half that was not chosen on"
    assert answer["lost_with_default"] >= 0


CANDIDATES = ("--policy", "vllm", "--policy", "slidingserve")
