"""What to install where a package of an extra is missing.

Invariant: only a package that is not there is told this way; a module of ours that is missing is a bug and stays one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gristmill.errors import Code, ConfigError
from gristmill.extras import install_hint

__all__ = ["packages_of"]


@contextmanager
def packages_of(*extras: str) -> Generator[None]:
    """Name the extras to install where an import in the block finds no package.

    Args:
        extras: that the imports need: `gateway`, `engine`.

    Raises:
        ConfigError: `option_invalid`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gristmill":
            raise
        wanted = f"gristmill[{','.join(extras)}]"
        raise ConfigError(
            f"expected the packages of {wanted}, {error.name} is not installed",
            code=Code.OPTION_INVALID,
            where=wanted,
            hint=install_hint(*extras),
        ) from error
