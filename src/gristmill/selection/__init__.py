"""Select: which captured calls really produced the scored result.

`select_captured_calls(records, result)` is the default policy; every policy is a pure function of its two arguments.
See README.md beside this file for the data model and the non-goals.
"""

from gristmill.selection.all_captured import AllCaptured
from gristmill.selection.final_context import FinalContext
from gristmill.selection.policies import (
    DEFAULT_POLICY,
    SELECTION_POLICIES,
    SelectionPolicy,
    policy_name,
    resolve_selection_policy,
    select_all_captured,
    select_captured_calls,
)
from gristmill.selection.returned_history import ReturnedHistory
from gristmill.selection.verdict import Decision, ExplainingPolicy, Reason, Rejected, Selection, Verdict

__all__ = [
    "DEFAULT_POLICY",
    "SELECTION_POLICIES",
    "AllCaptured",
    "Decision",
    "ExplainingPolicy",
    "FinalContext",
    "Reason",
    "Rejected",
    "ReturnedHistory",
    "Selection",
    "SelectionPolicy",
    "Verdict",
    "policy_name",
    "resolve_selection_policy",
    "select_all_captured",
    "select_captured_calls",
]
