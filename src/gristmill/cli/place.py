"""Places that a command line names: paths, and URLs of databases.

Invariant: what is meant as the URL of a database is never taken for a path, so that a password in it is never shown.

Not here: what stands there (store, sources).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gristmill.errors import ConfigError

if TYPE_CHECKING:
    from gristmill.ledger import LedgerAddress

__all__ = ["PLACE", "place_of"]


def place_of(text: str | LedgerAddress) -> LedgerAddress:
    """Read one place.

    Raises:
        ConfigError: `option_invalid`, the URL of a database is none.
    """
    if isinstance(text, Path):
        return text
    from gristmill.ledger.address import parse_address

    return parse_address(text)


class _Place(click.ParamType[Any]):
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LedgerAddress:
        try:
            return place_of(value)
        except ConfigError as error:
            where = error.where if param is None else param.human_readable_name
            # Without the URL, which may hold a password.
            raise ConfigError(error.message, code=error.code, where=where, hint=error.hint) from None


PLACE: Final = _Place()
"""The type of an argument or option that is a path or the URL of a database."""
