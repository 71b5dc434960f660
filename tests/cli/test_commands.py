"""The commands but `simulate`: help, version, policies, check-config, serve."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sidecar.policies.registry import BUILT_IN, find
from slidingserve import __version__
from tests.cli.runner import command, complaint, environment, run, run_here
from tests.service.support import wait_until

COMMANDS = (
    *("serve", "check-config", "mode", "sessions", "shadow"),
    *("simulate", "bench", "policies", "profile", "profiles", "predictor", "version"),
)


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['slidingserve', *sys.argv[1:]]\n"
        "from sidecar.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'numba', 'numpy', 'grpc', 'google.protobuf', 'pydantic', 'structlog', 'sidecar.config'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    for arguments in (["--help"], ["serve", "--help"], ["simulate", "--help"], ["version"]):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", script, *arguments], capture_output=True, text=True, env=environment()
        )
        assert ended.returncode == 0, ended.stderr
        heavy = ended.stdout.splitlines()[-1]
        if arguments != ["--help"]:
            heavy = heavy.replace("'pydantic'", "")  # newer typers take it themselves, to read what is given
        assert heavy == "HEAVY []"
        if arguments == ["--help"]:
            for name in COMMANDS:
                assert name in ended.stdout


def test_version() -> None:
    assert run_here("version").stdout == f"slidingserve {__version__}\n"


def test_policies_with_parameters_and_defaults() -> None:
    listed = run_here("policies")
    assert listed.status == 0
    ours, vllm = listed.stdout.split("vllm: ")
    assert ours.startswith("explore: ")
    assert "\nslidingserve: " in ours
    assert "    clamp_chunk = true in robust, false in paper\n" in ours
    assert "    max_tokens = 0\n" in vllm
    assert "    reserve_full_prompt = true\n" in vllm


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_parameter_of_a_policy_is_explained(name: str) -> None:
    explained = run_here("policies", name)
    assert explained.status == 0
    lines = explained.stdout.splitlines()
    for parameter in fields(find(name).parameters):
        (place,) = (i for i, line in enumerate(lines) if line.startswith(f"    {parameter.name} = "))
        assert len(lines[place + 1].split()) > 2, f"{parameter.name}: {lines[place + 1]}"


def test_an_unknown_policy_cannot_be_explained() -> None:
    ended = run_here("policies", "nope")
    assert ended.status == 2
    assert "'nope'; use one of: explore, orca, qoserve, sarathi, " in ended.stderr


def test_no_command_shows_the_help_and_a_wrong_one_is_named() -> None:
    ended = run("polcies")
    assert ended.status == 2
    assert "polcies" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "check-config" in run_here().stdout


def test_check_config_shows_each_setting_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text("max_sessions = 7\nlog_level = 'debug'")
    ended = run_here(
        "check-config", "--config", str(file), "--policy", "vllm:max_tokens=512", SLIDINGSERVE_LOG_LEVEL="error"
    )
    assert ended.status == 0
    lines = dict(line.split(" = ", 1) for line in ended.stdout.splitlines()[:-1])
    shown = {name.strip(): tuple(part.strip(" ()") for part in rest.split("  (")) for name, rest in lines.items()}
    assert shown["max_sessions"] == ("7", str(file))
    assert shown["log_level"] == ("error", "environment")
    assert shown["policy"] == ("vllm:max_tokens=512", "flag")
    assert shown["default_tbt_seconds"] == ("0.05", "default")
    assert shown["journal_dir"] == ("", "default")
    assert ended.stdout.endswith("settings are valid\n")
    assert ended.stderr == ""


def test_check_config_tells_of_variables_without_effect() -> None:
    ended = run_here("check-config", SLIDINGSERVE_POLCY="x")
    assert ended.status == 0
    assert ended.stderr == "note: SLIDINGSERVE_POLCY is no setting and has no effect\n"


@pytest.mark.parametrize("name", ["serve", "check-config"])
def test_bad_settings_end_with_one_line(name: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("policy = vllm")
    for arguments, words in (
        (("--max-sessions", "0"), "max_sessions = 0 (from flag): "),
        (("--policy", "nope"), "policy = 'nope' (from flag): unknown policy 'nope'; use one of: "),
        (("--listen", "nowhere"), "listen = 'nowhere' (from flag): give unix:"),
        (("--default-ttft-seconds", "nan"), "default_ttft_seconds = nan (from flag): "),
        (("--config", str(broken)), f"{broken}: is not TOML ("),
        (("--config", "/nowhere.toml"), "/nowhere.toml: cannot be read ("),
    ):
        assert complaint(run_here(name, *arguments)).startswith(words)
    message = complaint(run_here(name, SLIDINGSERVE_DRAIN_SECONDS="soon"))
    assert message.startswith("drain_seconds = 'soon' (from environment): ")


def test_serve_as_a_process_says_one_line_without_traceback(tmp_path: Path) -> None:
    assert complaint(run("serve", "--policy", "nope")).startswith("policy = 'nope' (from flag)")
    taken = tmp_path / "file"
    taken.touch()
    message = complaint(run("serve", "--listen", "127.0.0.1:0", "--journal-dir", str(taken / "sub")))
    assert message.startswith(f"journal_dir {taken}/sub cannot be made (")


def test_profiles_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "llmservingsim").mkdir()
    taken = tmp_path / "file"
    taken.touch()
    out = str(taken / "sub")
    message = complaint(run_here("profiles", "fit", "a100-tp1", "--data", str(tmp_path), "--out", out))
    assert message.startswith(f"{out}: cannot be written (")
    assert complaint(run_here("profiles", "show", "nope")).startswith("unknown profile 'nope'")
    assert complaint(run_here("profiles", "validate", SLIDINGSERVE_DATA="")).startswith("no data folder")


def test_flag_of_a_wrong_type_is_named() -> None:
    ended = run("serve", "--max-sessions", "many")
    assert ended.status == 2
    assert "--max-sessions" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_serve_logs_json_lines_and_outlives_its_reader() -> None:
    """Who reads the log may go away: the sidecar goes on, and ends in order."""
    import json

    with subprocess.Popen(
        command("serve", "--listen", "127.0.0.1:0", "--log-format", "json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert (line["event"], line["level"], line["policy"]) == ("serving", "info", "vllm")
        assert line["listen"].startswith("127.0.0.1:")
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, "the sidecar ends")
        assert process.returncode == 0
