"""Profiling from collecting to the model: against a simulated engine over a real sidecar, and piece by piece."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.client import ClientSettings, SchedulerClient
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.profiles import load_profile
from engine_adapter.simulated.timing import ProfileTimer
from evaluation.engines import closed_load, profiling
from evaluation.engines.closed_load import ClosedLoad, LoadFailed, Shapes, server_facts, shapes_for
from evaluation.engines.journal_following import JournalFollower
from evaluation.engines.measured_iterations import MeasuredIterations, measured_iterations
from evaluation.engines.profile_samples import (
    EngineIdentity,
    Grid,
    SampleFile,
    SamplesError,
    TooFewSamples,
    fit_samples,
)
from evaluation.engines.profiling import Progress, Told, collect, identity_of, write_fit
from evaluation.hardware.latency_models import compare
from evaluation.sidecar_process import SidecarProcess
from evaluation.simulate import engine_limits, open_client
from predictor.features import ROW, batch_features
from predictor.files import load_model
from sidecar.policies.base import PolicyContext
from sidecar.policies.registry import build
from slidingserve.contract.values import EngineInfo, EngineLimits, Floats, OpenSession
from tests.strategies import Feed, LinearTimer, feed, ints

PROFILE = "rtx3090-tp2"
IDENTITY = EngineIdentity("vllm", "0.32.0", "tiny", 2, 1, "2 x Some GPU")
LIMITS = EngineLimits(max_tokens_per_iteration=512, max_sequences=64, kv_blocks=4096, kv_block_tokens=16)


def requests_at_once(count: int, shapes: Shapes) -> Feed:
    return feed([(0.0, *shapes.lengths(number)) for number in range(count)])


class TurningClock:
    """A clock that goes on by pauses, in which a simulated engine runs."""

    def __init__(self, engine: SimulatedEngine, iterations: int) -> None:
        self._engine, self._iterations = engine, iterations
        self.now = 0.0
        self.over = False

    def pause(self, seconds: float) -> None:
        self.now += max(seconds, 0.1)
        for _ in range(self._iterations):
            self.over = self.over or not self._engine.step()


@contextmanager
def simulated(folder: Path, seed: int, count: int = 2000) -> Iterator[tuple[SimulatedEngine, Shapes, EngineLimits]]:
    """An engine with many requests whose sidecar explores and keeps journals."""
    hardware = load_profile(PROFILE)
    limits = engine_limits(hardware)
    shapes = shapes_for(limits, 8192)
    with SidecarProcess(("--policy", f"explore:seed={seed}", "--journal-dir", str(folder))) as sidecar:
        client = SchedulerClient(ClientSettings(sidecar.address, deadline_seconds=None))
        engine = SimulatedEngine(requests_at_once(count, shapes), limits, ProfileTimer(hardware), client)
        info = EngineInfo("simulated", "1", model=hardware.model, tensor_parallel=2, pipeline_parallel=1)
        try:
            open_client(client, OpenSession(limits, engine=info), sidecar)
            yield engine, shapes, limits
        finally:
            client.close()


def collect_from(
    folder: Path, samples: SampleFile, seed: int, seconds: float, progress: list[Progress] | None = None
) -> None:
    """Collects ``seconds`` of a clock that goes on half a second for each 40 iterations."""
    with simulated(folder, seed) as (engine, shapes, limits):
        follower, clock = JournalFollower(folder), TurningClock(engine, 40)
        clock.pause(0.1)
        follower.read()
        samples.bind(identity_of(follower.openings[0], "simulation"))
        collect(
            samples,
            follower,
            Grid(limits, shapes.requests, shapes.longest_context),
            seconds=seconds,
            check=lambda: None,
            told=Told(progress=(progress if progress is not None else []).append),
            clock=lambda: clock.now,
            pause=clock.pause,
        )


@pytest.mark.long
def test_profiling_a_simulated_engine_gives_a_model_of_its_hardware(tmp_path: Path) -> None:
    samples, progress = SampleFile(tmp_path / "gpu.samples.csv"), []  # type: ignore[var-annotated]
    collect_from(tmp_path / "first", samples, 0, 20.0, progress)
    first = len(samples)
    assert 1400 < first <= 1700
    assert progress[-1].samples == first
    assert progress[-1].coverage.share > 0.9, progress[-1].coverage
    assert progress[-1].mape_percent is not None

    again = SampleFile(tmp_path / "gpu.samples.csv")
    assert len(again) == first
    collect_from(tmp_path / "second", again, first, 10.0)
    assert first + 700 < len(again)
    result = write_fit(again, tmp_path / "gpu.json")

    model = load_model(str(tmp_path / "gpu.json"))
    assert model == result.fit.model
    assert model.profile == "gpu"
    assert "simulated 1" in model.provenance
    assert "simulation" in model.provenance
    assert set(model.errors) == {"all", "decode", "prefill", "mixed", "mixed_small"}
    assert set(model.experts) == {"global", "decode", "prefill", "mixed"}
    # What is left is a straight line's misfit to a staircase, beside whose steps many batches are.
    assert result.fit.mape_percent < 9.0
    hardware = load_profile(PROFILE)
    built_in = compare(load_model(PROFILE), hardware, count=500).errors[0]
    ours = compare(model, hardware, count=500).errors[0]
    assert ours.mape_percent < 2.0 * built_in.mape_percent
    assert ours.r2 > 0.97
    policy = build("slidingserve", {"model": str(tmp_path / "gpu.json")}, PolicyContext(engine_limits(hardware)))
    assert policy.model_version.endswith(model.digest[:8])


def test_it_ends_early_once_there_is_enough(tmp_path: Path) -> None:
    samples = SampleFile(tmp_path / "gpu.samples.csv")
    samples.bind(IDENTITY)
    fed = linear_samples(12_000)
    chunks = iter(np.array_split(np.arange(len(fed)), 60))
    now = [0.0]

    class Follower(JournalFollower):
        def read(self) -> list[tuple[Floats, float]]:
            return [(fed.features[i], float(fed.seconds[i])) for i in next(chunks).tolist()]

    def pause(seconds: float) -> None:
        now[0] += 4.0

    # A grid whose only cells these samples fill.
    grid = Grid(EngineLimits(16, 2, 4096, 16), 2, 64)
    coverage = collect(
        samples,
        Follower(tmp_path),
        grid,
        seconds=1e6,
        check=lambda: None,
        told=Told(),
        clock=lambda: now[0],
        pause=pause,
    )
    assert coverage.filled == coverage.cells
    assert profiling.ENOUGH_SAMPLES <= len(samples) < 12_000


def linear_samples(count: int, seed: int = 0, noise: float = 0.01) -> MeasuredIterations:
    """Small batches of all three kinds, by `LinearTimer`, with noise."""
    rng = np.random.default_rng(seed)
    timer, rows, seconds = LinearTimer(), np.zeros((count, ROW)), np.zeros(count)
    for number, row in enumerate(rows):
        kind = number % 7
        chunk = [int(rng.integers(2, 17))] * (kind != 0) + [1] * (int(rng.integers(1, 3)) if kind % 2 == 0 else 0)
        context = rng.integers(1, 60, len(chunk)).tolist()
        batch_features(ints(*chunk), ints(*context), len(chunk), row)
        seconds[number] = timer.seconds(ints(*chunk), ints(*context), len(chunk)) * (1.0 + noise * rng.normal())
    return MeasuredIterations(rows, seconds)


def test_the_follower_reads_what_the_whole_journal_holds(tmp_path: Path) -> None:
    with simulated(tmp_path / "journals", 1, count=60) as (engine, _, _):
        follower = JournalFollower(tmp_path / "journals")
        assert follower.read() == []
        followed: list[tuple[Floats, float]] = []
        while engine.step():
            if engine.iterations % 50 == 0:
                followed += follower.read()
    followed += follower.read()
    whole = measured_iterations(sorted((tmp_path / "journals").glob("*.journal")))
    assert len(followed) == len(whole) > 500
    assert np.array_equal(np.stack([row for row, _ in followed]), whole.features)
    assert [seconds for _, seconds in followed] == whole.seconds.tolist()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journals")
    with simulated(folder, 1, count=5) as (engine, _, _):
        engine.run()
    (path,) = folder.glob("*.journal")
    return path


@pytest.mark.parametrize("size", [1, 7, 100, 101, 1000])
def test_the_follower_waits_for_the_end_of_an_entry(tmp_path: Path, journal: Path, size: int) -> None:
    path = journal
    content = path.read_bytes()[:20_000]
    whole = measured_iterations([path]).seconds.tolist()
    (tmp_path / "growing").mkdir()
    grown = tmp_path / "growing" / path.name
    follower, followed = JournalFollower(tmp_path / "growing"), []
    for start in range(0, len(content), size):
        with grown.open("ab") as file:
            file.write(content[start : start + size])
        if size > 1 or start > len(content) - 300:
            followed += follower.read()
    assert [seconds for _, seconds in followed] == whole[: len(followed)]
    assert len(followed) > 10


def test_samples_outlive_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.samples.csv"
    fed = linear_samples(20)
    samples = SampleFile(path)
    samples.bind(IDENTITY)
    samples.add([(row, float(s)) for row, s in zip(fed.features[:10], fed.seconds[:10], strict=True)])
    path.write_bytes(path.read_bytes()[:-5])
    again = SampleFile(path)
    assert (len(again), again.identity) == (9, IDENTITY)
    again.bind(IDENTITY)
    again.add([(row, float(s)) for row, s in zip(fed.features[10:], fed.seconds[10:], strict=True)])
    at_last = SampleFile(path).measured
    kept = [*range(9), *range(10, 20)]
    assert np.array_equal(at_last.features, fed.features[kept])
    assert np.allclose(at_last.seconds, fed.seconds[kept], rtol=1e-11)


@pytest.mark.parametrize("change", [{"model": "other"}, {"tensor_parallel": 1}, {"hardware": "b"}, {"version": "1"}])
def test_samples_of_two_engines_are_never_mixed(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "a.samples.csv"
    SampleFile(path).bind(IDENTITY)
    before = path.read_bytes()
    other = replace(IDENTITY, **change)
    with pytest.raises(SamplesError, match=r"another engine .*tiny.*give another --out"):
        SampleFile(path).bind(other)
    assert path.read_bytes() == before


ROW_TEXT = "1," * 8 + "0.5\n"


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n",
        "\x00\x01\n\n\n",
        '# slidingserve profile samples 1: {"engine": "x"}\na\n',
        "notes",
        *(
            f"# slidingserve profile samples 1: {json.dumps({'engine': 'e', 'version': 'v', 'model': 'm'})[:-1]}, "
            '"tensor_parallel": 1, "pipeline_parallel": 1, "hardware": "h"}\n'
            "tokens,prefill_work,prefill_squares,context,decodes,decode_context,prefill_tokens,longest_chunk,seconds\n"
            f"{ROW_TEXT}{row}\n"
            for row in ("1,2", "1,1,1,1,1,1,1,1,0", "1,1,1,1,1,1,1,-1,1", "1,1,1,1,1,1,1,nan,1", "a")
        ),
    ],
)
def test_other_files_are_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.samples.csv"
    path.write_text(text)
    with pytest.raises(SamplesError, match=r"a\.samples\.csv: holds no samples of an engine.*give another --out"):
        SampleFile(path).bind(IDENTITY)
    assert path.read_text() == text


def test_outliers_are_left_out_and_counted() -> None:
    fed = linear_samples(2000)
    seconds = fed.seconds.copy()
    seconds[::99] *= 5.0  # 21, four or five of them held out
    fit = fit_samples(MeasuredIterations(fed.features, seconds), "p", "an engine")
    clean = fit_samples(fed, "p", "an engine")
    assert 21 <= fit.outliers <= 21 + 1.2 * clean.outliers
    assert 5 <= clean.outliers <= 50  # 1.2 % of a normal distribution are beyond 2.5 sigma: 25
    assert fit.mape_percent == pytest.approx(clean.mape_percent, abs=0.1)
    assert fit.mape_percent < 1.0 < fit.raw_mape_percent
    assert fit.model.provenance.startswith("an engine. Fitted to ")
    assert f"{fit.outliers} outliers" in fit.model.provenance
    assert fit == fit_samples(MeasuredIterations(fed.features, seconds), "p", "an engine")


def test_what_is_held_out_has_no_say_in_the_model() -> None:
    fed = linear_samples(1000)
    seconds = fed.seconds.copy()
    seconds[4::5] *= 1.1
    experts = fit_samples(MeasuredIterations(fed.features, seconds), "p").model.experts
    assert experts == fit_samples(fed, "p").model.experts


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(TooFewSamples, match=r"150 samples; .* at least 200"):
        fit_samples(linear_samples(150), "p")


def test_the_grid_has_the_cells_that_the_engine_reaches() -> None:
    none = Grid(LIMITS, 64, 4096).coverage(np.zeros((0, ROW)))
    assert none.filled == 0
    assert none.cells == 5 * 4 - 1 + 2 * 2 * 3
    assert Grid(replace(LIMITS, max_tokens_per_iteration=8192), 64, 4096).coverage(np.zeros((0, ROW))).cells > 28
    assert Grid(LIMITS, 2, 100).coverage(np.zeros((0, ROW))).cells < none.cells
    rows = np.zeros((8, ROW))
    for row in rows:
        batch_features(ints(1, 100), ints(70, 600), 2, row)
    # One size, one context of decodes and one of prompts.
    assert Grid(LIMITS, 64, 4096).coverage(rows).filled == 3
    assert Grid(LIMITS, 64, 4096).coverage(rows[:7]).filled == 0


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        (LIMITS, 4096),
        (LIMITS, 0),
        (replace(LIMITS, max_model_tokens=100), 0),
        (EngineLimits(8192, 1024, 10_000, 16, 131_072), 131_072),
        (EngineLimits(1, 1, 1, 1), 0),
    ],
)
def test_requests_fit_the_engine(limits: EngineLimits, longest: int) -> None:
    shapes = shapes_for(limits, longest)
    lengths = [shapes.lengths(number) for number in range(500)]
    assert min(min(pair) for pair in lengths) >= 1
    assert max(prompt for prompt, _ in lengths) <= shapes.longest_prompt
    assert max(output for _, output in lengths) <= shapes.longest_output
    for bound in (longest, limits.max_model_tokens):
        if bound:
            assert max(map(sum, lengths)) <= bound
    assert 1 <= shapes.requests <= min(limits.max_sequences, closed_load.MOST_REQUESTS)


def test_lengths_fill_their_space() -> None:
    shapes = Shapes(64, 3584, 512)
    logs = np.log([shapes.lengths(number) for number in range(400)])
    counts, _, _ = np.histogram2d(logs[:, 0], logs[:, 1], bins=(5, 4))
    assert counts.min() >= 12  # 20 on average


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does, after a moment or never."""

    protocol_version = "HTTP/1.1"
    seen: list[dict[str, Any]]
    release: threading.Event
    most: int
    now: int
    lock: threading.Lock
    refuses = False
    gate = 1_000_000  # requests that have to be there before one is answered

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses:
            self._answer(400, {"error": "no such model"})
            return
        with self.lock:
            type(self).now += 1
            type(self).most = max(self.most, self.now)
            self.seen.append(body)
            if len(self.seen) >= self.gate:
                self.release.set()
        self.release.wait(30.0)
        with self.lock:
            type(self).now -= 1
        self._answer(200, {"choices": []})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(**attributes: Any) -> Iterator[tuple[str, Any]]:
    handler = type(
        "Handler",
        (Server,),
        {"seen": [], "release": threading.Event(), "most": 0, "now": 0, "lock": threading.Lock(), **attributes},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]  # clients that have gone
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        handler.release.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_load_keeps_so_many_requests_there() -> None:
    shapes = Shapes(6, 50, 20)
    with serving(gate=6) as (url, handler):
        load = ClosedLoad(url, "tiny", shapes)
        load.start()
        while len(handler.seen) < 30:
            load.check()
            time.sleep(0.005)
        load.check()
        load.close()
        assert handler.most == 6
        seen = sorted((len(body["prompt"]), body["max_tokens"]) for body in handler.seen[:30])
        expected = [shapes.lengths(number) for number in range(len(handler.seen) + 6)]
        assert all(pair in expected for pair in seen)
        for body in handler.seen:
            assert body["model"] == "tiny"
            assert body["ignore_eos"]
            assert body["min_tokens"] == body["max_tokens"]
            assert all(closed_load.FIRST_TOKEN <= token < closed_load.LAST_TOKEN for token in body["prompt"])


def test_the_load_gives_up_what_is_under_way() -> None:
    with serving() as (url, handler):
        load = ClosedLoad(url, "tiny", Shapes(3, 50, 20))
        load.start()
        while handler.now < 3:
            load.check()
            handler.release.wait(0.01)
        load.close()  # nobody was answered
        assert load.finished == 0
        load.check()
        assert not any(thread.is_alive() for thread in load._threads)


def test_a_request_that_fails_is_told() -> None:
    with serving(refuses=True) as (url, _):
        load = ClosedLoad(url, "other", Shapes(1, 50, 20))
        load.start()
        load._threads[0].join(30.0)
        with pytest.raises(LoadFailed, match=r"status 400 .*no such model"):
            load.check()
        load.close()


def test_a_server_says_what_it_serves() -> None:
    with serving() as (url, _):
        assert server_facts(url) == closed_load.ServerFacts("tiny", 4096)
    with pytest.raises(LoadFailed, match="no server answers at"):
        server_facts(url)
    for wrong in ("localhost:8000", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(LoadFailed, match="http://host:port"):
            server_facts(wrong)
