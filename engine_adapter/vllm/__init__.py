"""The adapter inside vLLM: ``vllm serve --scheduler-cls engine_adapter.vllm.build_scheduler``.

`factory` makes the scheduler, `scheduler` glues vLLM's to ours, `follower` makes vLLM follow a plan, `advisor` asks the
sidecar, `ledger` knows what it was told (in `books`), `timing` measures iterations, `view` reads vLLM's scheduler,
`hooks` says whether it can be read, `watchdog` lets nobody starve; `settings`, `slos` and `middleware` are what users
set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_adapter.vllm.factory import build_scheduler

__all__ = ["build_scheduler"]


def __getattr__(name: str) -> Any:
    # The parts that need no engine are imported without the client and its gRPC.
    if name == "build_scheduler":
        from engine_adapter.vllm.factory import build_scheduler

        return build_scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
