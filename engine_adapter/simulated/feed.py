"""What the simulated engine is fed with."""

from __future__ import annotations

from typing import Protocol

from slidingserve.contract.values import Floats, Ints


class RequestFeed(Protocol):
    """The requests of a run, as columns of one length; arrivals ascend."""

    @property
    def arrival_seconds(self) -> Floats:
        """Seconds from the start of the run."""

    @property
    def prompt_tokens(self) -> Ints:
        """At least 1 each."""

    @property
    def output_tokens(self) -> Ints:
        """Tokens that each will generate, at least 1; the source of decisions never sees them."""

    @property
    def ttft_slo_seconds(self) -> Floats:
        """Time-to-first-token SLOs."""

    @property
    def tbt_slo_seconds(self) -> Floats:
        """Time-between-tokens SLOs."""

    @property
    def ttlt_slo_seconds(self) -> Floats:
        """Time-to-last-token SLOs; 0: none."""

    @property
    def class_index(self) -> Ints:
        """Index into class_names, from 1; 0: no class."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
