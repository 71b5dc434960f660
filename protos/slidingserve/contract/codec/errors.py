"""Says which field of a value protobuf refused.

Encoding pays nothing for this: only when protobuf has raised is the value gone through again, field by field. It works
for every message because the values' classes and attributes are named as the messages and their fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from slidingserve.scheduler.v1 import scheduler_pb2 as pb

# What protobuf raises for a value that does not fit: range and text that is not Unicode, kind, integer too big for a
# double.
UNFIT = (ValueError, TypeError, OverflowError)


class ContractError(ValueError):
    """A value that the wire type cannot hold; the message names field, value and remedy."""


def explain(value: object, error: Exception) -> ContractError:
    """Returns the error that names the first field of ``value`` that protobuf does not take."""
    found = next(_refused(value, getattr(pb, type(value).__name__)), None)
    if found is None:
        return ContractError(f"{type(value).__name__} cannot be encoded: {error}")
    path, content, reason = found
    return ContractError(
        f"{path} = {content!r:.80} does not fit the wire: {reason!s:.120}; send a value of the field's type"
    )


def _refused(value: object, message_type: type[Message]) -> Iterator[tuple[str, object, Exception]]:
    """Yields path, content and protobuf's reason of each field or column entry that ``message_type`` does not take."""
    for field in message_type.DESCRIPTOR.fields:
        content = getattr(value, field.name)
        path = f"{message_type.DESCRIPTOR.name}.{field.name}"
        if content is None:
            continue
        inner_type = getattr(pb, type(content).__name__, None)
        if isinstance(inner_type, type):
            yield from _refused(content, inner_type)
        elif hasattr(content, "tolist") or isinstance(content, tuple):
            entries = content.tolist() if hasattr(content, "tolist") else content
            for row, entry in enumerate(entries):
                yield from _refused_scalar(f"{path}[{row}]", field.name, entry, [entry], message_type)
        else:
            yield from _refused_scalar(path, field.name, content, content, message_type)


def _refused_scalar(
    path: str, name: str, shown: object, content: Any, message_type: type[Message]
) -> Iterator[tuple[str, object, Exception]]:
    try:
        message_type(**{name: content})
    except UNFIT as reason:
        yield path, shown, reason
