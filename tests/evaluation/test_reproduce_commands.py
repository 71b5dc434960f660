"""`slidingserve reproduce ...`: what cannot be run is explained, and each command runs to its end on little work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import complaint, run, run_here

PROFILE = "h100-tp1"
POLICIES = ("sarathi-edf", "qoserve", "slidingserve")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("goodput", "--workload", "nope"), "--workload 'nope': the paper has sharegpt, arxiv-v1"),
        (("goodput", "--seeds", "0"), "--seeds 0: give 1 or more"),
        (("goodput", "--cap", "0"), "--cap 0: give 1 or more"),
        (("goodput", "--floor-ms", "-1"), "floor"),
        (("goodput", "--profile", "nope"), "'nope'"),
        (("overload", "--workload", "nope"), "unknown workload 'nope'; choose one of sharegpt"),
        (("overload", "--factor", "0"), "--factor 0: give a multiple above 0"),
        (("overload", "--requests", "0"), "--requests 0: give 1 or more"),
        (("transient", "--minutes", "0"), "minutes 0: give a time above 0"),
        (("ablation", "--profile", "nope"), "'nope'"),
        (("overhead", "--policy", "nope"), "unknown policy 'nope'; use one of: "),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert said in complaint(run_here("reproduce", *arguments, "--out", str(folder)))
    assert not folder.exists(), "nothing is begun"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a small goodput run, for the others to go on from."""
    folder = tmp_path_factory.mktemp("reproduced")
    document = reproduced(folder, "goodput", "--quick", "--requests", "60", "--workload", "mixed-v1", "--cap", "256")
    assert {row["policy"].partition(":")[0] for row in document["figures"]} == {
        "sarathi-edf",
        "qoserve",
        "slidingserve",
    }
    assert json.loads((folder / "goodput.json").read_text())["kind"] == "goodput"
    return folder


def reproduced(folder: Path, command: str, *arguments: str) -> dict[str, Any]:
    """Runs one of the commands and returns its document."""
    json_file = folder.parent / f"{folder.name}-{command}.json"
    ended = run(
        *("reproduce", command, "--profile", PROFILE, "--out", str(folder), "--json", str(json_file)), *arguments
    )
    assert ended.status == 0, ended.stderr
    document: dict[str, Any] = json.loads(json_file.read_text())
    assert document == json.loads((folder / f"reproduce-{command}.json").read_text())
    assert document["kind"] == f"reproduce-{command}"
    assert set(document["profiles"]) == {PROFILE}
    assert document["claims"]
    assert document["figures"]
    words = " ".join(ended.stdout.split())
    for claim in document["claims"]:
        assert claim["verdict"] in ended.stdout
    for sentence in document["sentences"]:
        assert sentence in words
    return document


@pytest.mark.long
def test_goodput_can_be_repeated(folder: Path) -> None:
    before = (folder / "points.jsonl").read_bytes()
    reproduced(folder, "goodput", "--quick", "--requests", "60", "--workload", "mixed-v1", "--cap", "256")
    assert (folder / "points.jsonl").read_bytes() == before


@pytest.mark.long
def test_overload(folder: Path) -> None:
    arguments = ("--requests", "60", "--seeds", "2", "--factor", "1", "--factor", "3")
    document = reproduced(folder, "overload", *arguments)
    mine = {(row["policy"], row["factor"]): row["violations"] for row in document["figures"]}
    assert len(mine) == 3 * 3, "two factors, and the load of the paper's table"
    assert all(len(violations) == 2 for violations in mine.values())
    for policy in POLICIES:
        assert sum(mine[policy, 3.0]) > sum(mine[policy, 1.0]), "three times the goodput is overload"
    assert not any("has the cap" in note for note in document["notes"]), "the best caps are known"


@pytest.mark.long
def test_transient(folder: Path) -> None:
    document = reproduced(folder, "transient", "--minutes", "0.1", "--seeds", "2")
    assert {row["load"] for row in document["figures"]} == {"0.5 and 1.3 of capacity", "as the paper's, by goodput"}
    assert {row["paper"] for row in document["figures"]} == {0.5778, 0.5130, 0.2756}


@pytest.mark.long
def test_ablation(folder: Path) -> None:
    document = reproduced(folder, "ablation", "--quick", "--requests", "60", "--seeds", "2", "--cap", "256")
    assert [row["rung"] for row in document["figures"]] == ["EDF", "+ SlidingChunker", "+ MLPS", "+ BatchConstructor"]
    assert len({str(row["violations"]) for row in document["figures"]}) > 1, "the rungs are different policies"
    assert json.loads((folder / "goodput.json").read_text())["policies"] == list(POLICIES)


@pytest.mark.long
def test_overhead(folder: Path) -> None:
    document = reproduced(folder, "overhead", "--requests", "40", "--policy", "slidingserve")
    shares = {(row["transport"], row["component"]): row["share"] for row in document["figures"]}
    core = sum(shares["inprocess", part] for part in ("mirror", "policy", "guard"))
    assert shares["inprocess", "core"] == pytest.approx(core)
    assert shares["grpc", "round trip"] > shares["grpc", "decode + core"] > 0
