"""The values of an extra array as bytes with a type name and a shape, and back.

Invariant: values read back bit by bit, in the machine's byte order; only plain numbers and booleans are arrays, so
that nothing in a file can make Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, DecodeError

__all__ = ["little_endian", "values_of"]

_DTYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)


def little_endian(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values in C order and little-endian."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


def values_of(dtype: str, shape: Sequence[int], raw: bytes, where: str) -> npt.NDArray[Any]:
    """Read an array.

    Args:
        dtype: numpy's name of the type.
        shape: of the array.
        raw: its values, C order, little-endian.
        where: for the error.

    Raises:
        DecodeError: `row_malformed`.
    """
    if dtype not in _DTYPES:
        message = f"expected one of {', '.join(sorted(_DTYPES))}, got {dtype!r}"
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=f"{where}.dtype")
    try:
        if any(size < 0 for size in shape):
            raise ValueError("a negative size")
        values: npt.NDArray[Any] = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
        return values.reshape(tuple(shape)).astype(np.dtype(dtype), copy=False)
    except (ValueError, OverflowError) as error:
        message = f"expected dtype, shape and data of one array: {error}"
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=where) from error
