"""The importers by name, and which of them a path is certainly for.

Invariant: an importer stands here once, under the name that `--from` takes. A path is read as a foreign format only
where it was named, or where exactly one importer is certain of it.

Not here: what they read (a module each).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gristmill.errors import Code, ConfigError
from gristmill.interop.atif import ATIF
from gristmill.interop.harbor import HARBOR
from gristmill.interop.importer import Importer
from gristmill.interop.nemo_gym import NEMO_GYM
from gristmill.interop.request_response import REQUEST_RESPONSE
from gristmill.interop.rllm import RLLM

__all__ = ["IMPORTERS", "importer_named", "importer_of"]

_ALL: Final[tuple[Importer, ...]] = (REQUEST_RESPONSE, ATIF, HARBOR, RLLM, NEMO_GYM)

IMPORTERS: Final[Mapping[str, Importer]] = {importer.name: importer for importer in _ALL}


def importer_named(name: str) -> Importer:
    """Return an importer.

    Raises:
        ConfigError: `option_invalid`: there is none of this name.
    """
    if name not in IMPORTERS:
        message = f"expected one of {', '.join(IMPORTERS)}, got format {name!r}"
        raise ConfigError(message, code=Code.OPTION_INVALID, where="--from")
    return IMPORTERS[name]


def importer_of(path: Path) -> Importer | None:
    """Return the importer that is certain of a path; None where none is, or several are."""
    found = [importer for importer in IMPORTERS.values() if importer.certain(path)]
    return found[0] if len(found) == 1 else None
