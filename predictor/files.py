"""Model files: JSON with a schema number and a SHA-256 digest, and the models that come with the product."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from predictor.features import FEATURES
from predictor.model import EXPERTS, Expert, LatencyModel

SCHEMA = 1
KIND = "slidingserve latency model"
_FIT_AGAIN = "fit one with `slidingserve predictor fit`"


class ModelError(ValueError):
    """A model that does not exist or cannot be trusted; the message names it, the value and the remedy."""


def model_names() -> tuple[str, ...]:
    """Returns the profiles that a built-in model was fitted for, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


def load_model(name_or_path: str | Path) -> LatencyModel:
    """Reads the built-in model of a profile by its name, or any model by its file (anything that ends in ``.json``).

    Raises `ModelError` when it does not exist, cannot be parsed, is no model, was written by a newer version, or was
    altered.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".json"):
        return read_model(Path(name_or_path))
    if text not in model_names():
        raise ModelError(
            f"no built-in latency model for profile {text!r}; there is one for {', '.join(model_names())}; "
            f"{_FIT_AGAIN} and name its file"
        )
    return read_model(_folder() / f"{text}.json")


def read_model(path: Path | Traversable) -> LatencyModel:
    """Reads and checks one model file; raises `ModelError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise ModelError(f"model {path}: cannot be read as UTF-8 text ({error}); check the path") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
        raise ModelError(f"model {path}: not JSON ({error}); {_FIT_AGAIN}") from error
    return _parse(document, f"model {path}")


def write_model(model: LatencyModel, path: Path) -> LatencyModel:
    """Writes a model with its digest; returns it as it would be read. Raises `ModelError` if it could not be."""
    document = _document(model)
    document["digest"] = _digest(document)
    written = _parse(json.loads(json.dumps(document)), f"model {model.name}")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return written


def sealed(model: LatencyModel) -> LatencyModel:
    """Returns the model with the digest that its file would have."""
    return replace(model, digest=_digest(_document(model)))


def _folder() -> Traversable:
    return resources.files(__package__) / "models"


def _document(model: LatencyModel) -> dict[str, Any]:
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "name": model.name,
        "profile": model.profile,
        "provenance": model.provenance,
        "errors": {scenario: dict(metrics) for scenario, metrics in model.errors.items()},
        "experts": {
            name: {
                "samples": expert.samples,
                "intercept_seconds": expert.intercept_seconds,
                "weights_seconds": dict(zip(FEATURES, expert.weights, strict=True)),
            }
            for name, expert in model.experts.items()
        },
        "table_seconds": list(model.table_seconds),
    }


def _digest(document: Mapping[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _parse(document: Any, where: str) -> LatencyModel:
    """Builds the model from a parsed file; every refusal names the field, its value and what to do."""
    kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
    if kind != KIND:
        raise ModelError(f"{where}: kind is {kind!r}, expected {KIND!r}; this is another kind of file, {_FIT_AGAIN}")
    schema = document.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ModelError(f"{where}: schema is {schema!r}, expected {SCHEMA}; {_FIT_AGAIN}")
    if schema > SCHEMA:
        raise ModelError(f"{where}: schema {schema} is newer than {SCHEMA}; upgrade slidingserve")
    if document.get("digest") != _digest(document):
        raise ModelError(
            f"{where}: digest is {document.get('digest')!r}, its content has {_digest(document)!r}; undo the change or "
            f"{_FIT_AGAIN}"
        )
    try:
        return _model(document)
    except ModelError as error:
        raise ModelError(f"{where}: {error}; {_FIT_AGAIN}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"{where}: missing or malformed field ({error!r}); {_FIT_AGAIN}") from error


def _model(document: Mapping[str, Any]) -> LatencyModel:
    experts = {name: _expert(name, content) for name, content in document["experts"].items()}
    if "global" not in experts or not set(experts) <= set(EXPERTS):
        raise ModelError(f"experts is {sorted(experts)}, expected global and any of {', '.join(EXPERTS[:-1])}")
    table = tuple(_number(f"table_seconds[{i}]", value) for i, value in enumerate(document["table_seconds"]))
    if len(table) == 1:
        raise ModelError("table_seconds has 1 entry, expected none or at least 2")
    return LatencyModel(
        name=_text("name", document["name"]),
        profile=_text("profile", document["profile"]),
        experts=experts,
        table_seconds=table,
        errors={
            str(scenario): {str(metric): _number(f"errors.{scenario}.{metric}", v) for metric, v in metrics.items()}
            for scenario, metrics in document["errors"].items()
        },
        provenance=str(document["provenance"]),
        digest=str(document["digest"]),
    )


def _expert(name: str, content: Mapping[str, Any]) -> Expert:
    weights = content["weights_seconds"]
    if set(weights) != set(FEATURES):
        odd = ", ".join(sorted(set(weights) ^ set(FEATURES)))
        raise ModelError(f"experts.{name}.weights_seconds lacks or does not know {odd}")
    samples = content["samples"]
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise ModelError(f"experts.{name}.samples is {samples!r}, expected a whole number >= 0")
    return Expert(
        _number(f"experts.{name}.intercept_seconds", content["intercept_seconds"]),
        tuple(_number(f"experts.{name}.weights_seconds.{feature}", weights[feature]) for feature in FEATURES),
        samples,
    )


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{field} is {value!r}, expected a finite number")
    return float(value)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ModelError(f"{field} is {value!r}, expected a text")
    return value
