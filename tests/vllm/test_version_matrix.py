"""The tests on scheduler objects, once more with other releases of vLLM than the one that is installed.

Their Python part is enough for that, see `fetch_vllm_sources`; all else comes from this environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as Tree
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM: see docs/vllm.md")

from tests.vllm.fetch_vllm_sources import fetch, unpack

pytestmark = pytest.mark.vllm

VARIABLE = "SLIDINGSERVE_VLLM_SOURCES"
FOLDER = Path(__file__).parent
TESTS = ("test_scheduler_objects.py", "test_plans_followed.py", "test_sidecar_mirror.py", "test_hostile_plans.py")
REQUIRED = ("0.28.0", "0.30.0", "0.33.0")
SHOW_VERSION = "import vllm; print(vllm.__version__, vllm.__file__)"


def sources() -> Path:
    """Returns the folder of the releases' sources; skips the test where there is none."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"set {VARIABLE} to a folder that `python tests/vllm/fetch_vllm_sources.py` has filled")
    return Path(given).resolve()


def versions() -> list[str]:
    """Returns the required releases and whatever else there is."""
    given = os.environ.get(VARIABLE)
    found = [p.name for p in Path(given).iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", p.name)] if given else []
    return sorted({*REQUIRED, *found})


@pytest.mark.parametrize("version", versions())
def test_scheduler_objects_of_another_release(version: str, tmp_path: Path) -> None:
    folder = sources() / version
    remedy = f"run `python tests/vllm/fetch_vllm_sources.py {sources()} {version}`"
    assert (folder / "vllm" / "__init__.py").is_file(), f"{VARIABLE} has no vLLM {version}: {remedy}"
    environment = {**os.environ, "PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_VERSION], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found, _, module = shown.stdout.strip().splitlines()[-1].partition(" ")
    assert found == version
    assert Path(module).is_relative_to(folder)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-m", "vllm", f"--junitxml={report}", "--tb=short"]
    command += [str(FOLDER / name) for name in TESTS]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"vLLM {version}:\n{done.stdout[-6000:]}"
    suites = Tree.parse(report).getroot()  # our own pytest wrote it
    ran = {case.get("name", "") for case in suites.iter("testcase") if not list(case)}
    assert len(ran) > 50
    assert not [case for case in suites.iter("skipped") if case.get("type") != "pytest.xfail"]
    told = {p.get("value") for p in suites.iter("property") if p.get("name") == "vllm_version"}
    assert told == {version}


def test_a_wheel_is_unpacked_without_its_libraries(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-1.2.3-cp38-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "vllm/__init__.py",
            "vllm/_C.abi3.so",
            "vllm/tool",
            "vllm/shapes.json",
            "vllm-1.2.3.dist-info/METADATA",
        ):
            archive.writestr(name, "x")
    unpack(wheel, tmp_path / "out")
    kept = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert kept == {"vllm/__init__.py", "vllm/shapes.json", "vllm-1.2.3.dist-info/METADATA"}


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(subprocess, "run", no_process)
    (tmp_path / "1.2.3").mkdir()
    assert fetch(tmp_path, "1.2.3") == tmp_path / "1.2.3"
