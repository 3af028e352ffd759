"""From the input of a case to captures: records, tokens, lost calls, results.

Invariant: records go through the same reader as capture files, so a case cannot pass on code that nobody else runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from gristmill.canonical import JsonValue
from gristmill.captures import read_lines
from gristmill.captures.exact import dumps
from gristmill.errors import Code, DecodeError
from gristmill.records import Capture, Result

__all__ = ["JsonObject", "capture_of", "list_of", "object_of", "result_of", "text_of"]

JsonObject = dict[str, JsonValue]

_ROLLOUT = "case"


def object_of(value: JsonValue, where: str) -> JsonObject:
    """Return a JSON object.

    Raises:
        DecodeError: `file_malformed`.
    """
    if isinstance(value, dict):
        return cast(JsonObject, value)
    raise DecodeError(f"expected an object, got {type(value).__name__}", where=where)


def list_of(value: JsonValue, where: str) -> Sequence[JsonValue]:
    """Return a JSON array, an empty one where there is none.

    Raises:
        DecodeError: `file_malformed`.
    """
    if value is None:
        return ()
    if isinstance(value, list):
        return cast(list[JsonValue], value)
    raise DecodeError(f"expected an array, got {type(value).__name__}", where=where)


def text_of(value: JsonValue, where: str) -> str:
    """Return a string.

    Raises:
        DecodeError: `file_malformed`.
    """
    if isinstance(value, str):
        return value
    raise DecodeError(f"expected a string, got {type(value).__name__}", where=where, code=Code.FILE_MALFORMED)


def capture_of(case: Mapping[str, JsonValue]) -> Capture:
    """Read `records` and `capture.incomplete_calls` of a case.

    Raises:
        DecodeError: `file_malformed` with the place.
    """
    lines = [
        {**object_of(record, f"records[{index}]"), "kind": "call", "rollout_id": _ROLLOUT}
        for index, record in enumerate(list_of(case.get("records"), "records"))
    ]
    statement = object_of(case.get("capture") or {}, "capture")
    for call_id in list_of(statement.get("incomplete_calls"), "capture.incomplete_calls"):
        lines.append({"kind": "lost", "rollout_id": _ROLLOUT, "model_call_id": call_id, "maybe_received": False})
    read = read_lines(dumps(line) for line in lines)
    for rollout in read.rollouts.values():
        return rollout.capture
    return Capture(rollout_id=_ROLLOUT)


def result_of(case: Mapping[str, JsonValue]) -> Result:
    """Return the result of a case."""
    return Result(value=case.get("result"))
