"""Stand-ins for trainers' modules where a test is of what they are given; the real ones are in `tests/e2e/trainers`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

__all__ = ["module"]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module with these members in place of the one of this name."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        held = sys.modules.get(path) or ModuleType(path)
        monkeypatch.setitem(sys.modules, path, held)
    made = ModuleType(name)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)
