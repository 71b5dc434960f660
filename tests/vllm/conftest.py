"""Imports vLLM once, before the test modules do: its dependencies warn on import, and warnings are errors here."""

from __future__ import annotations

import importlib.util
import os
import warnings


def has_vllm() -> bool:
    """Returns whether there is a vLLM; this folder, which has its name, is none."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


if has_vllm():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.sched.async_scheduler")
        importlib.import_module("vllm.v1.structured_output")
