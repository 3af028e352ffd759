"""A file that a run hands back: read whole, but only if it is a file, and not without end.

Invariant: nothing that a harness puts in the place of a file makes the reader wait, follow a device, or hold more than
a limit; and what it says of such a file never holds its content.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["read_handed"]


def read_handed(path: Path, limit_bytes: int) -> bytes:
    """Return a regular file's content.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than the limit; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file", str(path))
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(0, f"it is larger than {limit_bytes} bytes", str(path))
    return data
