"""A digest over all allocations that an engine received: two runs with the same one made the same decisions."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slidingserve.contract.values import BatchAllocation

Words: TypeAlias = NDArray[np.uint32]


class AllocationDigest:
    """SHA-256 over (step, count, then handle and tokens of each) as little-endian uint32.

    Words are collected and hashed in large pieces, because each call of the hash costs as much as a kilobyte. The
    engine's kernel writes them while it loads a batch; `take` then says that they count.

    Attributes:
        words: the buffer.
        used: how many of its words count.
    """

    def __init__(self) -> None:
        self.words: Words = np.empty(16384, "<u4")
        self.used = 0
        self._hash = hashlib.sha256()

    def make_room(self, count: int) -> None:
        """Makes room for an allocation of ``count`` requests behind the used words."""
        wanted = 2 + 2 * count
        if self.used + wanted > len(self.words):
            self._hash.update(self.words[: self.used].data)
            self.used = 0
            if wanted > len(self.words):
                self.words = np.empty(wanted, "<u4")

    def take(self, count: int) -> None:
        """Counts the allocation of ``count`` requests that was written behind the used words."""
        self.used += 2 + 2 * count

    def add(self, allocation: BatchAllocation) -> None:
        """Writes and counts an allocation that no kernel sees. Linear in it."""
        count = len(allocation.handles)
        self.make_room(count)
        words = self.words[self.used : self.used + 2 + 2 * count]
        words[:2] = (allocation.step & 0xFFFFFFFF, count)
        words[2::2] = allocation.handles
        words[3::2] = allocation.tokens
        self.take(count)

    def hexdigest(self) -> str:
        """Returns the digest of what was taken so far."""
        whole = self._hash.copy()
        whole.update(self.words[: self.used].data)
        return whole.hexdigest()
