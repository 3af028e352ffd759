"""The place that a path or URL means.

Not here: local folders (local), file systems of fsspec (remote).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from gristmill.archive.local import LocalPlace
from gristmill.archive.place import Place

__all__ = ["as_url", "place_of"]

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_LOCAL: Final = frozenset({"file"})
_ROOTED: Final = frozenset({"file", "local"})


def as_url(given: str | os.PathLike[str]) -> str | None:
    """Give the URL that is meant, also where a path type has taken one of its slashes; None: it is a local path."""
    text = str(given)
    match = _URL.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    protocol, rest = match.groups()
    return f"{protocol}://{'/' if protocol in _ROOTED else ''}{rest}"


def place_of(given: str | os.PathLike[str]) -> Place:
    """Give the folder of a path or URL.

    Raises:
        ConfigError: `option_invalid`: nothing that is installed serves such URLs.
    """
    url = as_url(given)
    if url is None:
        return LocalPlace(Path(given))
    protocol, _, rest = url.partition("://")
    if protocol in _LOCAL:
        return LocalPlace(Path(rest))
    from gristmill.archive.remote import open_remote  # noqa: PLC0415 - only where something is elsewhere

    return open_remote(protocol, url)
