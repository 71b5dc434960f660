"""The latency model of a session, and what it says of an iteration that policies are compared by."""

from __future__ import annotations

import numpy as np

from predictor.features import ROW, add_chunk, add_decode
from predictor.files import ModelError, load_model
from predictor.forecast import predicted_seconds
from predictor.model import LatencyModel
from sidecar.policies.base import PolicyContext
from sidecar.policies.registry import PolicyParameterError, UnknownProfileError
from slidingserve.contract.values import Floats

REFERENCE_DECODES, _DECODE_CONTEXT = 16, 1024


def session_model(policy: str, model: str, context: PolicyContext) -> LatencyModel:
    """Returns the model that a policy's parameter ``model`` names; empty: that of the session's profile.

    Raises:
        PolicyParameterError: the model that was named cannot be used.
        UnknownProfileError: no model was named and the profile has none.
    """
    if model:
        return _named_model(policy, model, context)
    if not context.profile:
        raise UnknownProfileError(
            f"policy {policy!r} predicts how long batches take and needs to know the hardware; open the session "
            "with a profile, start the sidecar with --profile, or set the parameter model"
        )
    try:
        return load_model(context.profile)
    except ModelError as error:
        raise UnknownProfileError(str(error)) from error


def _named_model(policy: str, name: str, context: PolicyContext) -> LatencyModel:
    try:
        model = load_model(name)
    except ModelError as error:
        raise PolicyParameterError(policy, "model", name, str(error)) from error
    if context.profile and model.profile != context.profile:
        remedy = (
            f"it was fitted for profile {model.profile!r}, the session has {context.profile!r}; "
            "give the model of that profile, or none"
        )
        raise PolicyParameterError(policy, "model", name, remedy)
    return model


def reference_seconds(model: Floats, prompt_tokens: int) -> float:
    """Returns the predicted time of 16 decodes of 1024 tokens of context, and a fresh prompt of so many tokens."""
    features = np.zeros(ROW)
    for _ in range(REFERENCE_DECODES):
        add_decode(features, 1.0, float(_DECODE_CONTEXT))
    if prompt_tokens > 0:
        add_chunk(features, float(prompt_tokens), 0.0)
    return predicted_seconds(features, model)


def reference_throughput(model: Floats, prompt_tokens: int) -> float:
    """Returns the tokens per second of that iteration: what a throughput is taken to be until it has been measured."""
    return prompt_tokens / max(reference_seconds(model, prompt_tokens), 1e-9)
