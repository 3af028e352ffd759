"""pyarrow, loaded when a Parquet file is written or read, and never before.

It has no types of its own: all of it is `Any` here. Only modules whose name begins with `parquet` import this one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

__all__ = ["pa", "pq"]

pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")
