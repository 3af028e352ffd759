"""Policies by name, foreign records, and the contract that any policy is held to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.errors import Code, ConfigError, GristmillError, PolicyError, SelectionError
from gristmill.fingerprint import fingerprint
from gristmill.records import CapturedCall, CapturedItem
from gristmill.selection import (
    SELECTION_POLICIES,
    AllCaptured,
    ExplainingPolicy,
    FinalContext,
    ReturnedHistory,
    policy_name,
    resolve_selection_policy,
    select_all_captured,
    select_captured_calls,
)
from gristmill.selection.contract import call_policy
from tests.selection.calls import ForeignCall, ForeignItem, call, history, own_fingerprint, said, user

NEMO_STYLE = '''
"""A policy written against NeMo RL's records and signature."""


def keep_first_and_last(records, result):
    selected = [records[0], records[-1]]
    return selected, result.get("keep", selected[-1].response_id)


class KeepCompleted:
    def __init__(self, status="completed"):
        self.status = status

    def __call__(self, records, result):
        selected = [record for record in records if record.response_status == self.status]
        return selected, selected[-1].response_id


class Nested:
    policy = staticmethod(keep_first_and_last)


not_a_policy = 3
'''


@pytest.fixture
def nemo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of policies that somebody keeps beside their training script."""
    (tmp_path / "nemo_style_policies.py").write_text(NEMO_STYLE)
    (tmp_path / "broken_policies.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nemo_style_policies", raising=False)
    return "nemo_style_policies"


TWO = [call("c1", "one"), call("c2", "two", parent="c1")]


# ---- by name -----------------------------------------------------------------------------------------------


def test_built_in_names() -> None:
    # The three names of the documentation, the first by default.
    assert set(SELECTION_POLICIES) == {"returned_history", "all_captured", "final_context"}
    assert policy_name(resolve_selection_policy()) == "returned_history"
    for name, policy in SELECTION_POLICIES.items():
        assert policy_name(policy) == name
        assert isinstance(policy, ExplainingPolicy)
        assert policy.options() == {}


def test_functions_that_nemo_users_know() -> None:
    # They call these two by name.
    result = history(said("one"), user(), said("two"))
    assert select_captured_calls(TWO, result) == (TWO, "r-c2")
    assert select_all_captured(TWO, history(said("two"))) == (TWO, "r-c2")


def test_options_of_a_built_in() -> None:
    # The options of the command line reach the policy, and are reported.
    policy = resolve_selection_policy("returned_history", {"reasoning": "optional", "whitespace": "exact"})
    assert policy.options() == {"reasoning": "optional"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("returned_history", {"mood": "good"}),
        ("returned_history", {"reasoning": "maybe"}),
        ("returned_history", {"whitespace": "fold"}),
        ("returned_history", {"tool_call_ids": "any"}),
        ("returned_history", {"unmatched": "ignore"}),
        ("all_captured", {"reasoning": "optional"}),
        ("final_context", {"x": "y"}),
    ],
)
def test_wrong_options(name: str, options: dict[str, str]) -> None:
    # A misspelt option must not run with the defaults.
    with pytest.raises(ConfigError) as caught:
        resolve_selection_policy(name, options)
    assert caught.value.code is Code.POLICY_OPTION_INVALID


def test_unknown_names_suggest_the_nearest() -> None:
    # A typing error should cost a second, not a search in the documentation.
    with pytest.raises(PolicyError) as caught:
        resolve_selection_policy("returned_histry")
    assert caught.value.code is Code.POLICY_UNKNOWN
    assert "all_captured" in caught.value.message
    assert "'returned_history'" in (caught.value.hint or "")
    with pytest.raises(PolicyError) as caught:
        resolve_selection_policy("zzz")
    assert "did you mean" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    [
        "no_such_module_x:f",
        "nemo_style_policies:missing",
        "broken_policies:f",
        ":",
        "nemo_style_policies:",
        ":f",
        "a..b:f",
    ],
)
def test_what_cannot_be_loaded_keeps_its_cause(nemo: str, name: str) -> None:
    # Somebody's import error must be shown, not swallowed.
    with pytest.raises(PolicyError) as caught:
        resolve_selection_policy(name)
    assert caught.value.code is Code.POLICY_LOAD_FAILED
    assert caught.value.__cause__ is not None
    assert caught.value.hint


def test_what_is_not_callable(nemo: str) -> None:
    # A constant with the policy's name.
    with pytest.raises(PolicyError) as caught:
        resolve_selection_policy(f"{nemo}:not_a_policy")
    assert caught.value.code is Code.POLICY_NOT_CALLABLE


def test_nemo_style_function_and_class(nemo: str) -> None:
    # A policy written against NeMo's records runs on ours unchanged.
    policy = resolve_selection_policy(f"{nemo}:keep_first_and_last")
    assert policy(TWO, {}) == (TWO, "r-c2")
    assert policy_name(policy) == f"{nemo}:keep_first_and_last"
    kept = resolve_selection_policy(f"{nemo}:KeepCompleted")
    assert kept(TWO, {}) == (TWO, "r-c2")
    assert policy_name(kept) == f"{nemo}:KeepCompleted"
    nested = resolve_selection_policy(f"{nemo}:Nested.policy")
    assert nested(TWO, {"keep": "r-c1"}) == (TWO, "r-c1")


def test_options_of_a_custom_policy(nemo: str) -> None:
    # Options go to a class's constructor, or to a function as keywords.
    strict = resolve_selection_policy(f"{nemo}:KeepCompleted", {"status": "failed"})
    failed = call("c3", "x", response_status="failed")
    assert strict([*TWO, failed], {}) == ([failed], "r-c3")
    with pytest.raises(ConfigError):
        resolve_selection_policy(f"{nemo}:KeepCompleted", {"colour": "red"})
    partial = resolve_selection_policy(f"{nemo}:keep_first_and_last", {"result": "x"})
    assert policy_name(partial) == f"{nemo}:keep_first_and_last"


# ---- foreign records ---------------------------------------------------------------------------------------


def foreign(make: Any) -> list[ForeignCall]:
    return [
        ForeignCall("c1", [ForeignItem(make(said("one")))]),
        ForeignCall("x1", [ForeignItem(make(said("zwei")))], parent="c1"),
        ForeignCall("c2", [ForeignItem(make(said("two")), "m2")], parent="c1"),
    ]


@pytest.mark.parametrize(("make", "given"), [(fingerprint, None), (own_fingerprint, own_fingerprint)])
def test_foreign_records_are_selected_as_they_are(make: Any, given: Any) -> None:
    # Another system's record objects have ids and fingerprints; nothing else may be needed.
    records = foreign(make)
    assert isinstance(records[0], CapturedCall)
    assert isinstance(records[0].output_items[0], CapturedItem)
    selected, terminal = ReturnedHistory(fingerprint=given)(records, history(said("one"), user(), said("two", id="m2")))
    assert [record.model_call_id for record in selected] == ["c1", "c2"]
    assert selected[0] is records[0]
    assert terminal == "r-c2"
    assert AllCaptured(fingerprint=given)(records, history(said("two")))[1] == "r-c2"
    assert [record.model_call_id for record in FinalContext(fingerprint=given)(records, history(said("two")))[0]] == [
        "c1",
        "c2",
    ]


def test_foreign_and_own_records_mixed() -> None:
    # A capture may be merged from two systems.
    records = [foreign(fingerprint)[0], call("c2", "two", parent="c1")]
    selected, _ = select_captured_calls(records, history(said("one"), user(), said("two")))
    assert selected == records


def test_a_foreign_miss_has_no_text_to_show() -> None:
    # Without atoms no text can be compared; the refusal must still come.
    with pytest.raises(SelectionError) as caught:
        select_captured_calls(foreign(fingerprint), history(said("three")))
    assert caught.value.code is Code.MATCH_MISSING


def test_foreign_empty_replies() -> None:
    # An empty reply has a fingerprint as well.
    records = [ForeignCall("c1", [ForeignItem(fingerprint(said("")))]), ForeignCall("c2", [])]
    selected, terminal = select_captured_calls(records, history(said("")))
    assert (selected, terminal) == (records[:1], "r-c1")
    both = [*records, ForeignCall("c3", [ForeignItem(fingerprint(said("x")))])]
    assert select_captured_calls(both, history(said(""), user(), said("x"), said("")))[0] == [both[0], both[2]]


@pytest.mark.parametrize("option", [{"whitespace": "trim"}, {"reasoning": "optional"}, {"tool_call_ids": "renamed"}])
def test_options_that_need_atoms(option: dict[str, str]) -> None:
    # An option that cannot be applied must refuse, not be forgotten.
    with pytest.raises(SelectionError) as caught:
        ReturnedHistory(**option)(foreign(fingerprint), history(said("one")))
    assert caught.value.code is Code.ATOMS_UNAVAILABLE


# ---- the contract ------------------------------------------------------------------------------------------


async def awaited(records: Any, result: Any) -> Any:
    return records, None


class Awaitable:
    def __await__(self) -> Any:
        yield


class BreaksEverything:
    def __call__(self, records: Any, result: Any) -> Any:
        raise KeyError("model_calls")


def changes(records: Any, result: Any) -> Any:
    msgspec.structs.force_setattr(records[0], "finish_reason", "changed")
    return list(records), None


BROKEN = {
    "awaitable: policies are synchronous": awaited,
    "an awaitable": lambda records, result: Awaitable(),
    "returned list": lambda records, result: list(records),
    "returned NoneType": lambda records, result: None,
    "returned tuple": lambda records, result: (records, None, None),
    "not a sequence": lambda records, result: (7, None),
    "is str": lambda records, result: ("c1", None),
    "set, not": lambda records, result: ({1}, None),
    "not one of the records": lambda records, result: ([*records, object()], None),
    "(c1) is not one": lambda records, result: ([msgspec.structs.replace(records[0])], None),
    "twice": lambda records, result: ([records[0], records[0]], None),
    "response id is int": lambda records, result: (records, 7),
    "not among the selected": lambda records, result: (records[:1], "r-c2"),
    "changed a record": changes,
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_contracts(what: str) -> None:
    # Duplicates train double, copies lose their tokens, a coroutine selects nothing.
    records = [call("c1", "one"), call("c2", "two", parent="c1")]
    with pytest.raises(SelectionError) as caught:
        call_policy(BROKEN[what], records, {})
    assert caught.value.code is Code.POLICY_BROKE_CONTRACT
    assert what in caught.value.message


def test_a_terminal_that_names_two_choices() -> None:
    # The scored call must be one call.
    records = [call("c1", "a", response_id="r"), call("c2", "b", response_id="r", choice_index=1)]
    with pytest.raises(SelectionError, match="several selected choices"):
        call_policy(lambda given, result: (given, "r"), records, {})
    assert call_policy(lambda given, result: (given[1:], "r"), records, {}).terminal == 1


def test_a_good_policy() -> None:
    # Any sequence in any order, with or without a terminal.
    decision = call_policy(lambda records, result: (tuple(reversed(records)), "r-c1"), TWO, {})
    assert (decision.selected, decision.terminal, decision.excluded) == ((1, 0), 0, Code.POLICY_EXCLUDED)
    assert call_policy(lambda records, result: ([], None), TWO, {}).selected == ()


def test_refusals_and_bugs_of_a_policy() -> None:
    # A refusal is data; a bug in somebody's policy is an error with its cause.
    def refuses(records: Any, result: Any) -> Any:
        raise SelectionError(Code.MATCH_MISSING, "mine")

    with pytest.raises(SelectionError, match="mine"):
        call_policy(refuses, TWO, {})

    def plain(records: Any, result: Any) -> Any:
        raise ValueError("not for me")

    with pytest.raises(SelectionError) as caught:
        call_policy(plain, TWO, {})
    assert caught.value.code is Code.POLICY_REFUSED
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(GristmillError) as broken:
        call_policy(BreaksEverything(), TWO, {})
    assert broken.value.code is Code.POLICY_BROKE_CONTRACT
    assert isinstance(broken.value.__cause__, KeyError)


@pytest.mark.parametrize("ending", [SystemExit(0), GeneratorExit()])
def test_a_policy_cannot_end_the_process_with_an_exception(ending: BaseException) -> None:
    # A build of a night would end at one rollout, and say that nothing is wrong.
    def ends(records: Any, result: Any) -> Any:
        raise ending

    with pytest.raises(GristmillError) as broken:
        call_policy(ends, TWO, {})
    assert broken.value.code is Code.POLICY_BROKE_CONTRACT
    assert broken.value.__cause__ is ending


@pytest.mark.parametrize("ending", [MemoryError(), KeyboardInterrupt()])
def test_what_is_no_fault_of_a_policy_passes(ending: BaseException) -> None:
    # Which rollouts are trained must not depend on the memory of a machine.
    def ends(records: Any, result: Any) -> Any:
        raise ending

    with pytest.raises(type(ending)):
        call_policy(ends, TWO, {})


def test_a_module_that_ends_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script without a guard ends the command; want of memory says nothing of the module.
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "policies_of_a_script.py").write_text("raise SystemExit(0)")
    (tmp_path / "policies_of_a_giant.py").write_text("raise MemoryError")
    with pytest.raises(GristmillError) as failed:
        resolve_selection_policy("policies_of_a_script:policy")
    assert failed.value.code is Code.POLICY_LOAD_FAILED
    with pytest.raises(MemoryError):
        resolve_selection_policy("policies_of_a_giant:policy")


def test_a_policy_cannot_reorder_the_capture() -> None:
    # What a policy gets is its own tuple.
    def greedy(records: Any, result: Any) -> Any:
        assert isinstance(records, tuple)
        return list(records), None

    assert call_policy(greedy, TWO, {}).selected == (0, 1)


class TakesAnything:
    """A policy class that says nothing about its options."""

    def __init__(self, **options: str) -> None:
        if "mood" in options:
            raise TypeError("no moods here")
        self.options = options

    def __call__(self, records: Any, result: Any) -> Any:
        return list(records), records[-1].response_id


class Untold:
    """A callable whose signature cannot be read."""

    __signature__ = "not a signature"

    def __call__(self, records: Any, result: Any, **options: str) -> Any:
        return list(records), records[-1].response_id


untold = Untold()


def test_options_of_a_policy_that_takes_any() -> None:
    """A policy that takes keyword arguments decides itself which it knows; what it refuses is a refused option."""
    policy = resolve_selection_policy(f"{__name__}:TakesAnything", {"tone": "dry"})
    assert policy.options == {"tone": "dry"}
    with pytest.raises(ConfigError) as caught:
        resolve_selection_policy(f"{__name__}:TakesAnything", {"mood": "good"})
    assert caught.value.code is Code.POLICY_OPTION_INVALID


def test_options_of_a_policy_without_a_signature() -> None:
    """Options are handed on where nothing can be said about them."""
    assert callable(resolve_selection_policy(f"{__name__}:untold", {"tone": "dry"}))
