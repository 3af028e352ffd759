"""How large texts become when their references are replaced, before any is.

Invariant: a reference names a smaller number that is there, and no attempt's texts become larger than the limits: a few
bytes of references that name references could stand for more than any memory holds.

Not here: replacing references (ledger.bodies).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from gristmill.errors import DecodeError

__all__ = ["MOST_ATTEMPT_BYTES", "MOST_TEXT_BYTES", "check_texts"]

MOST_TEXT_BYTES: Final = 2**28
"""One request, reply or header, whole."""

MOST_ATTEMPT_BYTES: Final = 2**30
"""All pieces of an attempt, each whole."""

_reference: Final = re.compile(rb"\x01(\d{1,9})\x01")


def check_texts(pieces: Mapping[int, bytes], texts: Iterable[bytes], where: str) -> None:
    """Find out how large the pieces and texts of an attempt become.

    Args:
        pieces: by number.
        texts: that refer to them.
        where: names the attempt, for the error.

    Raises:
        DecodeError: `file_malformed`: a text becomes too large, or a reference names no smaller number.
    """
    sizes: dict[int, int] = {}
    for number in sorted(pieces):
        sizes[number] = _whole_bytes(pieces[number], sizes, where)
    whole = sum(sizes.values())
    if whole > MOST_ATTEMPT_BYTES:
        message = f"expected at most {MOST_ATTEMPT_BYTES:,} bytes of texts in an attempt, got {whole:,}"
        raise DecodeError(message, where=where)
    for text in texts:
        _whole_bytes(text, sizes, where)


def _whole_bytes(text: bytes, sizes: Mapping[int, int], where: str) -> int:
    if b"\x01" not in text:
        whole = len(text)
    else:
        # Texts and references alternate, so an odd number of marks belongs to no reference.
        found = _reference.findall(text)
        if 2 * len(found) != text.count(b"\x01"):
            raise DecodeError("expected references to pieces of text between marks, got something else", where=where)
        whole = len(text) - sum(len(number) + 2 for number in found)
        for number in found:
            size = sizes.get(int(number))
            if size is None:
                raise DecodeError(f"expected a reference to an earlier piece of text, got {int(number)}", where=where)
            whole += size
    if whole > MOST_TEXT_BYTES:
        raise DecodeError(f"expected a text of at most {MOST_TEXT_BYTES:,} bytes, got {whole:,}", where=where)
    return whole
