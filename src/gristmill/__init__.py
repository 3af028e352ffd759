"""Gristmill: your agent's model calls in, exact training rows out.

capture -> ledger -> select -> reconstruct -> export. The core (everything below `pipeline`) is pure: no I/O, no clock,
no randomness. Names that NeMo RL's users know are importable from here.
"""

from gristmill.fingerprint import fingerprint
from gristmill.pipeline import rebuild_rollout, run_rollout, select_rollout
from gristmill.selection import (
    SELECTION_POLICIES,
    SelectionPolicy,
    resolve_selection_policy,
    select_all_captured,
    select_captured_calls,
)
from gristmill.terminal import resolve_terminal

__all__ = [
    "SELECTION_POLICIES",
    "SelectionPolicy",
    "fingerprint",
    "rebuild_rollout",
    "resolve_selection_policy",
    "resolve_terminal",
    "run_rollout",
    "select_all_captured",
    "select_captured_calls",
    "select_rollout",
]
