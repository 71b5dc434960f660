"""`slidingserve profile`: what it says when it cannot profile, when it is interrupted, and when it is done."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from engine_adapter.client import ClientSettings, SchedulerClient
from evaluation.engines import profiling
from evaluation.engines.profile_samples import Coverage, EngineIdentity, SampleFile
from evaluation.engines.profiling import Progress
from evaluation.engines.vllm_process import PYTHON_VARIABLE
from predictor.features import ROW, batch_features
from sidecar.cli.profiling import progress_line
from slidingserve.contract.values import EngineInfo, EngineLimits, OpenSession
from tests.cli.runner import complaint, run_here
from tests.strategies import LinearTimer, ints

IDENTITY = EngineIdentity("vllm", "0.32.0", "tiny", 2, 1, "1 x Some GPU")


def filled(path: Path, count: int) -> Path:
    """A file of samples of small batches by `LinearTimer`."""
    samples = SampleFile(path)
    samples.bind(IDENTITY)
    rng, timer = np.random.default_rng(0), LinearTimer()
    for number in range(count):
        chunk = [int(rng.integers(2, 300))] * (number % 3 != 0) + [1] * (number % 3 != 1) * int(rng.integers(1, 9))
        chunk_tokens, context = ints(*chunk), rng.integers(1, 3000, len(chunk))
        row = np.zeros(ROW)
        batch_features(chunk_tokens, context, len(chunk), row)
        samples.add([(row, timer.seconds(chunk_tokens, context, len(chunk)))])
    return path


@pytest.fixture
def server() -> Iterator[str]:
    """An OpenAI server that says what it serves."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "sglang"), "--engine sglang: give vllm"),
        (("--url", "http://h:1", "--model", "tiny"), "--model tiny and --url http://h:1: .*leave out one"),
        (("--target", "unix:/s"), "--target unix:/s: give the --url"),
        (("--url", "http://h:1", "--target", "nowhere"), "--target 'nowhere': "),
        (("--url", "http://h:1", "--", "--seed", "1"), r"arguments for vLLM \(--seed 1\) and --url"),
        (("--", "--additional-config={}"), "argument --additional-config={} for vLLM: that is set here"),
        (("--", "--max-num-seqs", "4", "--tensor-parallel-size", "2"), "argument --tensor-parallel-size for vLLM"),
        (("--url", "localhost:8000"), "'localhost:8000' is no address of a server; give it as http://host:port"),
        (("--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(run_here("profile", *arguments))
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_a_missing_vllm_says_how_to_get_one(tmp_path: Path) -> None:
    ended = run_here("profile", "--out", str(tmp_path / "a"), **{PYTHON_VARIABLE: str(tmp_path / "python")})
    assert f"{tmp_path}/python does not run" in complaint(ended)
    fake = tmp_path / "fake"
    fake.write_text(f'#!{sys.executable}\nprint(\'[false, "", ""]\')\n')
    fake.chmod(0o755)
    ended = run_here("profile", "--out", str(tmp_path / "a"), **{PYTHON_VARIABLE: str(fake)})
    assert f"vLLM is not installed in {fake}; on a GPU: pip install vllm" in complaint(ended)


def test_a_missing_folder_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    ended = run_here("profile", "--out", str(tmp_path / "no" / "a"))
    assert f"there is no folder {tmp_path}/no; make it" in complaint(ended)
    (tmp_path / "a.samples.csv").write_text("notes\n")
    assert "a.samples.csv: holds no samples of an engine" in complaint(run_here("profile", "--out", f"{tmp_path}/a"))


def test_an_engine_without_the_adapter_is_told_what_to_check(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "RUNNING_CONNECT_SECONDS", 0.2)
    target = f"unix:{tmp_path}/s.sock"
    ended = run_here("profile", "--url", server, "--target", target, "--out", str(tmp_path / "a"))
    said = complaint(ended)
    for part in (f"{server} did not connect to {target} within 0.2 s", "--scheduler-cls engine_adapter.vllm", target):
        assert part in said
    assert not list(tmp_path.glob("a*"))


def test_samples_of_another_engine_are_kept(tmp_path: Path, server: str) -> None:
    path = filled(tmp_path / "a.samples.csv", 3)
    before = path.read_bytes()
    target = f"unix:{tmp_path}/s.sock"
    client = SchedulerClient(ClientSettings(target))
    client.start(OpenSession(EngineLimits(512, 4, 100, 16), engine=EngineInfo("vllm", "0.99", model="huge")))
    try:
        ended = run_here("profile", "--url", server, "--target", target, "--out", str(tmp_path / "a"))
    finally:
        client.close()
    assert ended.status == 2
    last = ended.stderr.splitlines()[-1]
    assert "holds samples of another engine (vllm 0.32.0, model tiny, tensor parallel 2, on 1 x Some GPU)" in last
    assert "this one is vllm 0.99, model huge" in last
    assert "give another --out" in last
    assert path.read_bytes() == before


def test_minutes_0_fits_to_what_is_there(tmp_path: Path) -> None:
    filled(tmp_path / "a.samples.csv", 400)
    ended = run_here("profile", "--minutes", "0", "--out", str(tmp_path / "a.json"))
    assert ended.status == 0, ended
    assert "400 samples of vllm 0.32.0, model tiny" in ended.stderr
    for part in ("a/paper7/1@", "MAPE %", "mixed_small", "400 samples, ", f"slidingserve:model={tmp_path}/a.json"):
        assert part in ended.stdout, part
    shown = run_here("predictor", "show", str(tmp_path / "a.json"), "--profile", "rtx3090-tp2")
    assert shown.status == 0
    assert "held out, the mean relative error is" in " ".join(shown.stdout.replace("│", " ").split())


def test_too_few_samples_ask_for_more(tmp_path: Path) -> None:
    filled(tmp_path / "a.samples.csv", 5)
    ended = run_here("profile", "--minutes", "0", "--out", str(tmp_path / "a"))
    assert ended.status == 2
    assert ended.stderr.splitlines()[-1] == (
        "slidingserve: 5 samples; to fit a latency model takes at least 200; they are in "
        f"{tmp_path}/a.samples.csv: the same command goes on from there, give more --minutes"
    )
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("measured", [True, False])
def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    if measured:
        filled(tmp_path / "a.samples.csv", 5)
    monkeypatch.setattr(profiling, "_measure", interrupted)
    ended = run_here("profile", "--out", str(tmp_path / "a"))
    assert ended.status == 130
    last = ended.stderr.splitlines()[-1]
    assert ("the same command goes on from there" if measured else "nothing was measured yet") in last
    assert not (tmp_path / "a.json").exists()


def test_progress_is_one_line() -> None:
    line = progress_line(Progress(1234, Coverage(20, 31), 90.0, 4.26))
    assert line == "1234 samples, 20 of 31 kinds of batches covered, held-out error 4.3 %, 1.5 min left"
    assert "not known yet" in progress_line(Progress(0, Coverage(0, 31), 90.0, None))
