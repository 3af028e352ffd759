"""Optional packages: how what is missing is installed.

Not here: which packages an extra has (pyproject.toml).
"""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(*extras: str) -> str:
    """Return the command that installs extras, for the package and for a clone of its repository."""
    names = ",".join(extras)
    return f"pip install 'gristmill[{names}]', in a clone pip install -e '.[{names}]'"
