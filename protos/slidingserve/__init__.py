"""SlidingServe: per-iteration SLO-aware scheduling of LLM engines, as a sidecar.

This package holds what both sides share: the contract (protos, generated stubs, its messages as plain values and the
codec between them). The sidecar lives in ``sidecar``, the engine's side in ``engine_adapter``, experiments in
``evaluation``.
"""

__version__ = "0.1.0"
