"""A scheduler for the real engine whose decisions stand in a file: which plans were obeyed is written to another.

``vllm serve --scheduler-cls tests.vllm.prescribed.build_scheduler``; the settings come from the environment, which the
engine's process inherits: ``PRESCRIBED_PLAN`` and ``PRESCRIBED_LOG`` name the files, ``PRESCRIBED_ASYNC=1`` turns async
scheduling on where vLLM would not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine_adapter.vllm import build_scheduler as build_advised
from engine_adapter.vllm.settings import AdapterSettings
from evaluation.engines.async_on_cpu import build_scheduler as build_async
from slidingserve.contract.values import BatchAllocation, OpenSession, Snapshot, Step

HELD = "0"
"""The request that is given a token at a time until all others have come: an empty plan would be no plan."""


class PrescribedSource:
    """Answers each question by the next step of a plan: ``{"requests": n, "steps": [{"1": 64}, ...]}``.

    Requests are named by the number that their id begins with. Each line of the log is a step that was asked for, with
    what was executed; written when the next message tells.
    """

    def __init__(self, plan: Path, log: Path) -> None:
        document = json.loads(plan.read_text())
        self._requests, self._steps = document["requests"], list(document["steps"])
        self._log = log
        self._handles: dict[str, int] = {}
        self._want: dict[str, int] | None = None

    def open(self, message: OpenSession) -> Any:
        raise NotImplementedError

    def decide(self, step: Step, snapshot: Callable[[], Snapshot]) -> BatchAllocation | None:
        if step.arrived is not None:
            for name, handle in zip(step.arrived.request_ids, step.arrived.handles.tolist(), strict=True):
                self._handles[name.partition("-")[0]] = handle
        if self._want is not None:
            self._write(step)
        want: dict[str, int] = {}
        if len(self._handles) < self._requests:
            want = {HELD: 1} if HELD in self._handles else {}
            self._want = None
        elif self._steps:
            want = self._want = self._steps.pop(0)
        else:
            self._want = None
        handles = np.array([self._handles[name] for name in want], np.int64)
        tokens = np.array(list(want.values()), np.int64)
        return BatchAllocation(step.iteration.epoch, step.iteration.step, handles, tokens)

    def close(self) -> None:
        pass

    def _write(self, step: Step) -> None:
        names = {handle: name for name, handle in self._handles.items()}
        got = self._want if step.applied_exactly else {}
        if step.applied is not None:
            got = dict(
                zip(
                    [names[handle] for handle in step.applied.handles.tolist()],
                    step.applied.tokens.tolist(),
                    strict=True,
                )
            )
        with self._log.open("a") as log:
            log.write(json.dumps({"want": self._want, "got": got}) + "\n")


def connect(settings: AdapterSettings, opening: OpenSession) -> PrescribedSource:
    return PrescribedSource(Path(os.environ["PRESCRIBED_PLAN"]), Path(os.environ["PRESCRIBED_LOG"]))


def build_scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """As the adapter's, with decisions from the file."""
    build = build_async if os.environ.get("PRESCRIBED_ASYNC") == "1" else build_advised
    return build(vllm_config=vllm_config, connect=connect, **kwargs)


def build_asked_scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """The adapter's own, with async scheduling where the environment says so."""
    build = build_async if os.environ.get("PRESCRIBED_ASYNC") == "1" else build_advised
    return build(vllm_config=vllm_config, **kwargs)
