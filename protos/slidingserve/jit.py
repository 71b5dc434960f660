"""The one way in which this project compiles kernels: ``@kernel``.

numba's on-disk cache notices a change of the decorated function's file, but not of a function that it calls in another
file. A stale kernel would decide wrongly and silently, so the cache directory is named after a digest of all our source
files: any edit starts a new cache. Set ``NUMBA_CACHE_DIR`` to choose where; a container with a read-only root file
system points it at a writable folder, as numba reads from no other. Without one, each process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

_KEEP_SECONDS = 30 * 24 * 3600
_PACKAGES = ("slidingserve", "sidecar", "predictor", "engine_adapter", "evaluation")

P = ParamSpec("P")
R = TypeVar("R")


def _source_roots() -> list[Path]:
    """Folders that may hold kernels: this package's neighbours, installed (site-packages) or in a checkout."""
    here = Path(__file__).resolve().parent
    bases = {here.parent, here.parent.parent} if here.parent.name == "protos" else {here.parent}
    return sorted(base / name for base in bases for name in _PACKAGES if (base / name).is_dir())


def source_digest() -> str:
    """Returns 16 hex digits that change with any of our Python files (about 2 ms)."""
    digest = hashlib.sha256(f"numba {numba.__version__}".encode())
    for root in _source_roots():
        for path in sorted(root.rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _prepare_cache() -> bool:
    """Points numba at our cache directory; returns whether it can be written to."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    parent = (
        Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "slidingserve"
    )
    folder = parent / f"kernels-{source_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    setattr(numba.config, "CACHE_DIR", str(folder))  # noqa: B010 - numba fills this module at import
    if not os.access(folder, os.W_OK):
        return False
    _remove_old(folder)
    return True


def _remove_old(current: Path) -> None:
    """Removes caches of other versions that nobody has used for a month, and marks ours as used."""
    try:
        os.utime(current)
        for folder in current.parent.glob("kernels-*"):
            if time.time() - folder.stat().st_mtime > _KEEP_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # another process is at it


_CACHE = _prepare_cache()


def kernels_are_kept() -> bool:
    """Says whether compiled kernels are kept on disk; if not, each process compiles anew."""
    return _CACHE


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles ``function`` with numba on its first call, from the cache on disk where there is one."""
    try:
        compiled = numba.njit(cast(Any, function), cache=_CACHE, error_model="numpy")
    except RuntimeError:  # a function without a file, such as one from a notebook, cannot be cached
        compiled = numba.njit(cast(Any, function), error_model="numpy")
    return cast(Callable[P, R], compiled)
