"""Our policies under NeMo RL's signature, on records of its shapes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.captures import read_capture
from gristmill.errors import Code, ConfigError, PolicyError, SelectionError
from gristmill.interop import nemo
from gristmill.interop.nemo.fingerprints import NEMO_FINGERPRINT
from gristmill.pipeline import run_rollout, select_rollout
from gristmill.selection import Selection, resolve_selection_policy
from tests.corpus import make
from tests.interop.nemo_records import Entry, Evidence, EvidenceCall, ManifestCall, Served, their_fingerprint
from tests.selection.calls import call, function_call, history, said, user

FOLDER = Path(make.FOLDER)
POLICIES = {
    "returned_history": nemo.returned_history,
    "all_captured": nemo.all_captured,
    "final_context": nemo.final_context,
}
THEIRS = "tests.interop.nemo_records:their_fingerprint"


def expectation(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "expect.json").read_text(encoding="utf-8"))


def served_lines(name: str) -> dict[str, dict[str, Any]]:
    """The `call` lines of a story by call id: what NeMo's records hold of them."""
    lines = [json.loads(text) for text in (FOLDER / name / "capture.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["model_call_id"]: line for line in lines if line.get("kind", "call") == "call"}


def _stories() -> list[str]:
    """The stories of built-in policies whose lines hold what was served."""
    names = sorted(place.parent.name for place in FOLDER.glob("*/STORY.md"))
    return [
        name
        for name in names
        if expectation(name)["policy"] in POLICIES
        and not any("fingerprint" in item for line in served_lines(name).values() for item in line["output_items"])
    ]


def entry(call_id: str, *items: str | dict[str, Any], parent: str | None = None, **fields: Any) -> Entry:
    served = [said(item) if isinstance(item, str) else item for item in items]
    return Entry(call_id, served, **{"response_id": f"r-{call_id}", "parent_call_id": parent, **fields})


def evidence(call_id: str, *texts: str, parent: str | None = None, **fields: Any) -> EvidenceCall:
    items = [Evidence(their_fingerprint(said(text))) for text in texts]
    return EvidenceCall(call_id, f"r-{call_id}", items, parent, **fields)


def names(selected: list[Any]) -> list[str]:
    return [record.model_call_id for record in selected]


def refusal(policy: Any, records: list[Any], result: Any) -> SelectionError:
    with pytest.raises(SelectionError) as caught:
        policy(records, result)
    # NeMo RL masks a rollout whose policy raises ValueError; anything else would end its run.
    assert isinstance(caught.value, ValueError)
    return caught.value


# ---- The same decisions, on their records ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", _stories())
def test_stories_come_out_the_same_on_their_records(name: str) -> None:
    """A policy that decides otherwise on NeMo's records would train other calls there than `gristmill select` shows."""
    expect, served = expectation(name), served_lines(name)
    [(capture, result)] = read_capture(FOLDER / name).rollouts.values()
    assert result is not None
    records = [_theirs(record, served[record.model_call_id]) for record in capture.records]
    options = expect.get("options", {})
    bound = functools.partial(POLICIES[expect["policy"]], **options)
    value = {} if result.value is None else result.value
    ours = resolve_selection_policy(expect["policy"], options)
    theirs = _outcome(bound, records, value)
    assert theirs == _outcome(ours, list(capture.records), value)


def _outcome(policy: Any, records: list[Any], value: Any) -> tuple[list[int], str | None] | Code:
    """Give the places of the selected objects among those given, or the code of the refusal."""
    try:
        selected, terminal = policy(records, value)
    except SelectionError as error:
        return error.code
    places = {id(record): position for position, record in enumerate(records)}
    return [places[id(record)] for record in selected], terminal


def _theirs(record: Any, line: dict[str, Any]) -> SimpleNamespace:
    told = SimpleNamespace(
        model_call_id=record.model_call_id,
        response_id=record.response_id,
        parent_call_id=record.parent_call_id,
        choice_index=record.choice_index,
        response_status=record.response_status,
        finish_reason=record.finish_reason,
        model=record.model or "",
        output_items=line.get("output_items", []),
        weight_version=record.weight_versions,
    )
    if record.usable:
        told.prompt_token_ids = line["prompt_token_ids"]
        told.generation_token_ids = line["generation_token_ids"]
        told.generation_log_probs = line["generation_log_probs"]
    return told


def test_what_comes_back_are_the_objects_that_were_given() -> None:
    records = [entry("c1", "a"), entry("c2", "b"), entry("c3", "c", parent="c1")]
    result = history(said("a"), user(), said("c"))
    selected, terminal = nemo.returned_history(records, result)
    assert [selected[0] is records[0], selected[1] is records[2], len(selected)] == [True, True, 2]
    assert terminal == "r-c3"
    selected, terminal = nemo.final_context(records, {"response": {"id": "r-c3"}})
    assert (names(selected), terminal) == (["c1", "c3"], "r-c3")
    selected, terminal = nemo.all_captured(records, {"response": {"id": "r-c2"}})
    assert (names(selected), terminal) == (["c1", "c2", "c3"], "r-c2")
    assert selected[1] is records[1]


def test_a_result_may_be_a_model_of_theirs() -> None:
    items: list[Any] = [Served(said("a"))]
    records = [Entry("c1", items, "r-c1")]
    assert names(nemo.returned_history(records, Served(history(said("a"))))[0]) == ["c1"]


def test_records_without_a_response_id_are_calls_of_their_own() -> None:
    records = [entry("c1", "a", response_id=None), entry("c2", "b", parent="c1", response_id=None)]
    selected, terminal = nemo.returned_history(records, history(said("a"), said("b")))
    assert (names(selected), terminal) == (["c1", "c2"], None)
    assert refusal(nemo.all_captured, records, {"response": {"id": "None"}}).code == Code.TERMINAL_UNATTRIBUTED


def test_retries_that_sampled_the_same_tokens_stand_for_each_other() -> None:
    records = [entry("c1", "a"), entry("c2", "a")]
    assert names(nemo.returned_history(records, history(said("a")))[0]) == ["c1"]
    other = [records[0], entry("c2", "a", generation_log_probs=(-0.25,))]
    assert refusal(nemo.returned_history, other, history(said("a"))).code == Code.MATCH_AMBIGUOUS
    # The suffix of a prompt says nothing about the whole of it.
    suffixes = [entry("c1", "a", prompt_is_delta=True), entry("c2", "a", prompt_is_delta=True)]
    assert refusal(nemo.returned_history, suffixes, history(said("a"))).code == Code.MATCH_AMBIGUOUS


def test_our_own_records_are_selected_as_by_the_built_in_policies() -> None:
    records = [call("c1", "a"), call("c2", "b")]
    selected, terminal = nemo.returned_history(records, history(said("b")))
    assert (selected[0] is records[1], terminal) == (True, "r-c2")
    assert names(nemo.all_captured(records, {"response": {"id": "r-c1"}})[0]) == ["c1", "c2"]


def test_they_are_policies_by_name() -> None:
    """What NeMo will do can be tried on captures: `--policy gristmill.interop.nemo:returned_history`."""
    [(capture, result)] = read_capture(FOLDER / "reasoning_optional").rollouts.values()
    policy = resolve_selection_policy("gristmill.interop.nemo:returned_history", {"reasoning": "optional"})
    outcome = select_rollout(capture, result, policy)
    built_in = select_rollout(capture, result, resolve_selection_policy("returned_history", {"reasoning": "optional"}))
    assert isinstance(outcome, Selection)
    assert isinstance(built_in, Selection)
    assert outcome.calls == built_in.calls
    strict = resolve_selection_policy("gristmill.interop.nemo:returned_history")
    refused = run_rollout(capture, result, strict)
    assert not isinstance(refused, Selection)
    assert refused.code == Code.MATCH_MISSING


# ---- Records that hold fingerprints, or less -------------------------------------------------------------------------


@pytest.mark.parametrize("named", [THEIRS, their_fingerprint])
def test_items_by_fingerprint_need_the_function_that_made_them(named: Any) -> None:
    records = [evidence("c1", "a"), evidence("c2", "b"), evidence("c3", "c", "d", parent="c1")]
    policy = functools.partial(nemo.returned_history, fingerprint=named)
    assert names(policy(records, history(said("a"), said("c"), said("d")))[0]) == ["c1", "c3"]
    assert refusal(policy, records, history(said("a"), said("c"))).code == Code.MATCH_MISSING
    scored = functools.partial(nemo.all_captured, fingerprint=named)
    assert scored(records, history(said("b")))[1] == "r-c2"
    assert names(nemo.final_context(records, history(said("c"), said("d")), fingerprint=named)[0]) == ["c1", "c3"]


def test_evidence_that_was_read_from_json() -> None:
    item = {"id": "m1", "fingerprint": their_fingerprint(said("a"))}
    records = [EvidenceCall("c1", "r1", [item]), EvidenceCall("c2", "r2", [{**item, "id": "m2"}])]
    result = history(said("a", id="m2"))
    assert names(nemo.returned_history(records, result, fingerprint=THEIRS)[0]) == ["c2"]


def test_their_function_is_asked_for_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = NEMO_FINGERPRINT.partition(":")
    for part in ("nemo_gym", "nemo_gym.token_id_capture"):
        monkeypatch.setitem(__import__("sys").modules, part, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(__import__("sys").modules, module, SimpleNamespace(**{name: their_fingerprint}))
    assert names(nemo.returned_history([evidence("c1", "a")], history(said("a")))[0]) == ["c1"]


def test_a_function_that_is_not_there_ends_the_run() -> None:
    """Masking every rollout because of a wrong name would train on nothing for hours."""
    with pytest.raises(PolicyError) as missing:
        nemo.returned_history([evidence("c1", "a")], history(said("a")), fingerprint="tests.interop.nowhere:f")
    assert missing.value.code == Code.POLICY_LOAD_FAILED
    with pytest.raises(PolicyError) as nameless:
        nemo.all_captured([evidence("c1", "a")], history(said("a")), fingerprint="nowhere")
    assert nameless.value.code == Code.POLICY_LOAD_FAILED
    with pytest.raises(PolicyError) as number:
        nemo.final_context([evidence("c1", "a")], history(said("a")), fingerprint="tests.interop.nemo_records:__all__")
    assert number.value.code == Code.POLICY_NOT_CALLABLE


def test_an_item_that_their_function_refuses_refuses_the_rollout() -> None:
    result = history(function_call("t1"))
    told = refusal(functools.partial(nemo.returned_history, fingerprint=THEIRS), [evidence("c1", "a")], result)
    assert told.code == Code.OUTPUT_MALFORMED
    assert "cannot read NoneType" in told.message


def test_options_that_compare_parts_of_items_refuse_fingerprints() -> None:
    policy = functools.partial(nemo.returned_history, fingerprint=THEIRS, reasoning="optional")
    assert refusal(policy, [evidence("c1", "a")], history(said("a"))).code == Code.ATOMS_UNAVAILABLE


def test_a_history_needs_records_that_say_what_was_served() -> None:
    """A call of unknown content may be the one that was returned: leaving it out would be a guess."""
    records: list[Any] = [ManifestCall("c1", "r1"), evidence("c2", "a")]
    told = refusal(functools.partial(nemo.returned_history, fingerprint=THEIRS), records, history(said("a")))
    assert (told.code, told.where, told.evidence) == (Code.ATOMS_UNAVAILABLE, "call=c1", {"calls": ["c1"]})
    unknown = EvidenceCall("c3", "r3", None)
    assert refusal(nemo.returned_history, [unknown], history(said("a"))).code == Code.ATOMS_UNAVAILABLE


def test_references_and_ids_need_no_content() -> None:
    records = [ManifestCall("c1", "r1"), ManifestCall("c2", "r2"), ManifestCall("c3", "r3", parent_call_id="c1")]
    turns = {"ng_trajectory": {"turns": [{"model_calls": [{"response_id": "r1"}, {"model_call_id": "c3"}]}]}}
    selected, terminal = nemo.returned_history(records, turns)
    assert (names(selected), terminal) == (["c1", "c3"], "r3")
    assert names(nemo.final_context(records, {"response": {"id": "r3", "output": [said("x")]}})[0]) == ["c1", "c3"]
    assert names(nemo.final_context(records, {"reward": 1.0})[0]) == ["c1", "c3"]
    assert names(nemo.all_captured(records, {"response": {"id": "r2"}})[0]) == ["c1", "c2", "c3"]


@pytest.mark.parametrize("fields", [{"response_status": "failed"}, {"finish_reason": "abort"}])
def test_a_call_that_failed_served_nothing(fields: dict[str, str]) -> None:
    records = [EvidenceCall("c1", "r1", None, **fields), evidence("c2", "a")]
    assert names(nemo.returned_history(records, history(said("a")), fingerprint=THEIRS)[0]) == ["c2"]
    assert names(nemo.all_captured(records, history(said("a")), fingerprint=THEIRS)[0]) == ["c2"]


# ---- Options ---------------------------------------------------------------------------------------------------------


THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_options_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [entry("c1", THOUGHT), entry("c2", "b", parent="c1")]
    result = history(said("a"), said(" b "))
    assert refusal(nemo.returned_history, records, result).code == Code.MATCH_MISSING
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, " reasoning=optional, whitespace=trim,")
    assert names(nemo.returned_history(records, result)[0]) == ["c1", "c2"]


def test_what_is_bound_goes_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [entry("c1", THOUGHT)]
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, "reasoning=optional")
    strict = functools.partial(nemo.returned_history, reasoning="required")
    assert refusal(strict, records, history(said("a"))).code == Code.MATCH_MISSING
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, "reasoning=required")
    lenient = functools.partial(nemo.returned_history, reasoning="optional")
    assert names(lenient(records, history(said("a")))[0]) == ["c1"]


@pytest.mark.parametrize("text", ["colour=red", "reasoning", "reasoning=perhaps", "=x"])
def test_wrong_options_end_the_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt option that is ignored selects other calls than were asked for."""
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        nemo.returned_history([entry("c1", "a")], history(said("a")))
    assert caught.value.code == Code.POLICY_OPTION_INVALID


def test_a_policy_without_options_takes_none_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, "reasoning=optional")
    with pytest.raises(ConfigError) as caught:
        nemo.all_captured([entry("c1", "a")], history(said("a")))
    assert caught.value.where == nemo.OPTIONS_VARIABLE
    monkeypatch.setenv(nemo.OPTIONS_VARIABLE, f"fingerprint={THEIRS}")
    assert names(nemo.all_captured([evidence("c1", "a")], history(said("a")))[0]) == ["c1"]
