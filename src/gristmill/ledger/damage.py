"""What reading a damaged ledger raises, whichever database holds it."""

from __future__ import annotations

from typing import Final

import msgspec

from gristmill.errors import DecodeError, InternalError

__all__ = ["DAMAGE"]

DAMAGE: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
    DecodeError,
    InternalError,
)
"""What decoding raises for bytes that are not what was written."""
