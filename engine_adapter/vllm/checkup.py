"""Looks at the vLLM of this Python and prints what it found as a line of JSON.

``python -m engine_adapter.vllm.checkup``, for `slidingserve doctor`, which may run in another Python. Importing vLLM
takes seconds and writes to stdout; the line begins with a mark.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "slidingserve-checkup: "


def checkup() -> dict[str, Any]:
    """Returns vLLM's version, whether it is tested with, what the adapter misses in it, and what fails to import."""
    found: dict[str, Any] = {"version": "", "tested": False, "missing": [], "trouble": ""}
    try:
        import vllm

        import engine_adapter.client  # noqa: F401 - whether it imports is the question
        from engine_adapter.vllm import hooks

        found["version"] = str(vllm.__version__)
        found["tested"] = hooks.is_tested(found["version"])
        found["missing"] = hooks.missing_hooks()
    except Exception as error:
        found["trouble"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    print(MARK + json.dumps(checkup()), flush=True)  # noqa: T201 - its purpose
