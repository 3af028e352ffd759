"""JSON on standard output: one document a command, written as it grows and shown when it is whole.

Invariant: the text is ASCII, so no control character or bidirectional override reaches a terminal, and standard
output holds a whole document or an error, never a part; memory does not grow with the number of elements.

Not here: what documents hold (the commands).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["Document", "json_text"]

_IN_MEMORY_bytes: Final = 16 * 1024 * 1024
_CHUNK_bytes: Final = 1024 * 1024


def json_text(value: Any) -> str:
    """Write a JSON value on one line, in ASCII."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # Numbers kept as text, and nesting that the standard encoder does not take.
        from gristmill.captures.exact import dumps

        return dumps(value).decode("ascii")


class Document:
    """One JSON object with one list in it: `{"LIST": […], …}`; elements are added one by one."""

    def __init__(self, list_name: str) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_bytes, mode="w+b")  # noqa: SIM115
        self._write(f"{{{json.dumps(list_name)}:[")
        self._empty = True

    def _write(self, text: str) -> None:
        self._spool.write(text.encode("ascii"))

    def add(self, element: Any) -> None:
        """Append an element of the list."""
        self.add_text(json_text(element))

    def add_text(self, text: str) -> None:
        """Append an element that is JSON text in ASCII already."""
        self._write(text if self._empty else f",{text}")
        self._empty = False

    def finish(self, rest: Mapping[str, Any]) -> None:
        """Add the other members, and write the whole document to standard output."""
        members = "".join(f",{json.dumps(name)}:{json_text(value)}" for name, value in rest.items())
        self._write(f"]{members}}}\n")
        self._spool.seek(0)
        sys.stdout.flush()
        output = sys.stdout.buffer
        while chunk := self._spool.read(_CHUNK_bytes):
            output.write(chunk)
        output.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()
