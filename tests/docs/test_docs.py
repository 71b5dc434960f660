"""What the documents show works as shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.config import SidecarSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the docs, as pip would install it."""
    (tmp_path / "shortest.py").write_text(blocks(ROOT / "docs" / "policies.md", "python")[0], encoding="utf-8")
    entry = blocks(ROOT / "docs" / "policies.md", "toml")[0]
    group, line = re.findall(r'entry-points\."(.+?)"\]\n(.+)', entry)[0]
    info = tmp_path / "shortest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shortest\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n", encoding="utf-8")
    return tmp_path


def test_the_policy_in_the_docs_decides_in_a_sidecar(package: Path) -> None:
    command = [sys.executable, "-m", "sidecar", "simulate", "--requests", "40", "--json", "-"]
    command += ["--policy", "vllm", "--policy", "shortest:chunk_tokens=256"]
    path = os.pathsep.join([str(package), str(ROOT), str(ROOT / "protos")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    vllm, shortest = json.loads(done.stdout)["runs"]
    assert (vllm["policy"], shortest["policy"]) == ("vllm", "shortest")
    assert shortest["fallbacks"] == 0
    assert shortest["allocation_digest"] != vllm["allocation_digest"]
    assert shortest["violations"]["deadline"] < 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_the_two_commands_of_the_readme_are_marked_for_ci() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- command: (\w+) -->\n```bash\n(.+?)\n```", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in marks] == ["simulate", "test", "decide"]
    assert marks[0][1].endswith("slidingserve simulate")
    assert marks[1][1].endswith("pytest")


def test_every_setting_of_the_sidecar_says_what_it_is_for() -> None:
    for name, field in SidecarSettings.model_fields.items():
        assert field.description, name
        assert len(field.description) > 20, name
