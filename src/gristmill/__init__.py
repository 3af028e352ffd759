"""Gristmill: your agent's model calls in, exact training rows out.

capture -> ledger -> select -> reconstruct -> export. The core (everything below `pipeline`) is pure: no I/O, no clock,
no randomness. Names that NeMo RL's users know are importable from here; each is loaded when it is first asked for, so
that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gristmill.pipeline import rebuild_rollout, run_rollout, select_rollout
    from gristmill.result import Attribution, CallCredit, Failure, Result
    from gristmill.selection import (
        SELECTION_POLICIES,
        SelectionPolicy,
        resolve_selection_policy,
        select_all_captured,
        select_captured_calls,
    )
    from gristmill.service.rollout import rollout
    from gristmill.terminal import resolve_terminal

__all__ = [
    "SELECTION_POLICIES",
    "Attribution",
    "CallCredit",
    "Failure",
    "Result",
    "SelectionPolicy",
    "rebuild_rollout",
    "resolve_selection_policy",
    "resolve_terminal",
    "rollout",
    "run_rollout",
    "select_all_captured",
    "select_captured_calls",
    "select_rollout",
]

_HOMES = {
    "Attribution": "result",
    "CallCredit": "result",
    "Failure": "result",
    "Result": "result",
    "rebuild_rollout": "pipeline",
    "run_rollout": "pipeline",
    "select_rollout": "pipeline",
    "resolve_terminal": "terminal",
    "rollout": "service.rollout",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gristmill' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gristmill.{_HOMES.get(name, 'selection')}"), name)
