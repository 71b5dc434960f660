"""`slidingserve profile` on a real vLLM of its own, on as many CPU ranks as there are CPUs, two at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.engines.profile_samples import SampleFile, TooFewSamples
from evaluation.engines.profiling import Profiled, ProfileRequest, Progress, Told, profile
from evaluation.engines.vllm_process import allowed_cpus, find_vllm
from predictor.features import DECODES, LONGEST_CHUNK, PREFILL_TOKENS, TOKENS
from predictor.files import load_model
from sidecar.policies.base import COMMON_LIMITS, PolicyContext
from sidecar.policies.registry import build

pytest.importorskip("vllm.v1", reason="needs vLLM: see docs/vllm.md")
pytestmark = [pytest.mark.vllm, pytest.mark.long]


def profiled(request: ProfileRequest, told: Told) -> Profiled:
    """Profiles; on a machine that is too slow for enough samples, goes on from those that are there."""
    for _ in range(4):
        try:
            return profile(request, told)
        except TooFewSamples:
            continue
    return profile(request, told)


def test_a_real_engine_is_profiled(tmp_path: Path) -> None:
    ranks = min(2, len(allowed_cpus()))
    progress: list[Progress] = []
    request = ProfileRequest(out=tmp_path / "tiny", minutes=1 / 3, tensor_parallel=ranks, hardware="some CPUs")
    result = profiled(request, Told(progress=progress.append))

    samples = SampleFile(request.samples_file)
    assert samples.identity is not None
    named = (samples.identity.engine, samples.identity.model, samples.identity.tensor_parallel)
    assert named == ("vllm", "tiny", ranks)
    assert samples.identity.version.startswith(find_vllm().version.partition("+")[0])
    rows = samples.measured.features
    assert len(rows) == result.fit.samples == progress[-1].samples
    assert rows[:, TOKENS].max() <= 512
    assert rows[:, LONGEST_CHUNK].max() > 100
    assert rows[:, DECODES].max() > 8
    for kind in (rows[:, PREFILL_TOKENS] == 0, rows[:, DECODES] == 0, (rows[:, DECODES] * rows[:, PREFILL_TOKENS]) > 0):
        assert kind.mean() > 0.03
    assert result.coverage is not None
    assert result.coverage.share > 0.3

    model = load_model(str(request.model_file))
    assert model == result.fit.model
    assert "some CPUs" in model.provenance
    # Times that have nothing to do with the batch could not be told apart so well, however busy the machine is.
    errors = model.errors["all"]
    assert errors["r2"] > 0.3
    build("slidingserve", {"model": str(request.model_file)}, PolicyContext(COMMON_LIMITS))
