from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.cli.prose import Explainer, brief, refusal_text, rollout_text
from gristmill.cli.remedies import REFUSAL_REMEDIES, VERDICT_REMEDIES, refusal_remedies
from gristmill.errors import CODE_MEANINGS, Code
from gristmill.records import CallRecord, Capture, ItemKind, LostCall, OutputItem
from gristmill.selection import Rejected, Selection, Verdict
from tests.cli.stories import TWO_TURNS, call, good_story, refused_story, returned, run, story, write_story

KEYS = {
    *("rollout_id", "attempt", "model_call_id", "included", "code", "meaning", "evidence", "would_change", "text"),
}


def test_an_excluded_call_is_explained_in_prose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks why a call is not trained gets the rule, the evidence, and what would change it."""
    ran = run(capsys, "explain", good_story(tmp_path), "x1")
    assert ran.code == 0
    assert ran.out.startswith(
        "Call x1 of m continues c1, sampled 1 token and ended with 'stop'; it served text 'other'"
    )
    assert "It is excluded (retry_superseded): an included call answers the same request of the same parent." in ran.out
    assert "It would be included if the harness returned its reply" in ran.out


def test_json_holds_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read these keys: a missing one breaks them."""
    path = good_story(tmp_path)
    one = run(capsys, "explain", path, "c2", "--json").json
    assert set(one) == KEYS
    assert one["code"] == "content"
    assert one["meaning"] == CODE_MEANINGS[Code.CONTENT]
    assert "It is the scored call." in one["text"]
    whole = run(capsys, "explain", path, "--json").json
    [rollout] = whole["rollouts"]
    assert set(rollout) == {"rollout_id", "attempt", "outcome", "text", "calls"}
    assert [set(held) for held in rollout["calls"]] == [KEYS] * 3


def test_a_whole_rollout_is_a_paragraph_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading a whole rollout must show every call."""
    ran = run(capsys, "explain", good_story(tmp_path))
    assert ran.out.count("\n\n") == 4
    assert "2 calls of 3 selected; the scored call is c2 (response resp-c2)" in ran.out
    assert "x1 and" not in ran.out
    assert "x1, c2 continue it" in ran.out


def test_a_refused_call_tells_the_refusal_and_its_part_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest miss is what lets people find the edit that their harness made."""
    path = refused_story(tmp_path)
    ran = run(capsys, "explain", path, "c2")
    assert "nearest is call c2 (text_edited: returned 'two, at some length!', captured" in ran.out
    assert "It is the call that comes nearest to the item that nothing explains." in ran.out
    assert ran.out.count("Return the text as it was served.") == 1
    whole = run(capsys, "explain", path).out
    assert whole.count("nearest is call c2") == 1
    assert run(capsys, "explain", path, "c2", "--json").json["evidence"]["refusal"]["code"] == "match_missing"


def test_unknown_calls_are_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo in a call id must not explain another call."""
    ran = run(capsys, "explain", good_story(tmp_path), "c22", "--json")
    assert ran.code == 2
    assert ran.json["error"]["code"] == "call_unknown"
    assert ran.json["error"]["hint"] == "Did you mean 'c2'?"


def test_a_call_id_of_several_rollouts_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Explaining the first of several calls would be a guess."""
    for number in range(7):
        good_story(tmp_path / f"{number}", f"r{number}")
    ran = run(capsys, "explain", tmp_path, "c1")
    assert ran.code == 2
    assert "'c1' is in 7: r0 attempt 0, r1 attempt 0" in ran.err
    assert "and 2 more" in ran.err
    assert run(capsys, "explain", tmp_path, "c1", "--rollout", "r3").code == 0


def test_a_call_is_found_among_many_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gateways mint ids that are unique: the id alone should be enough."""
    write_story(tmp_path / "0", [call("only", "one", [1], [2])], returned("one"))
    good_story(tmp_path / "1", "other")
    assert run(capsys, "explain", tmp_path, "only", "--json").json["code"] == "content"


def test_two_readings_are_both_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An ambiguity is only settled by somebody who sees both readings."""
    calls = [call("a", "same", [1], [2]), call("b", "same", [1], [3])]
    ran = run(capsys, "explain", write_story(tmp_path, calls, returned("same")), "a")
    assert "match_ambiguous" in ran.out
    assert "can be the reply of 2 calls (a, b)" in ran.out
    assert "One reading adds a, the other b." in ran.out
    assert "They are told apart by" in ran.out
    assert "It is one of the candidates." in ran.out


def test_lost_and_unusable_calls_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls without tokens have reasons too."""
    calls = [
        *story(),
        {"kind": "lost", "rollout_id": "r", "model_call_id": "gone", "maybe_received": False, "reason": "crash"},
        call("n", "no ids", [1], [2], generation_token_ids=None),
    ]
    path = write_story(tmp_path, calls, returned(*TWO_TURNS))
    assert "Call gone was lost. It is excluded (lost)" in run(capsys, "explain", path, "gone").out
    assert "has no usable tokens (token_ids_missing)" in run(capsys, "explain", path, "n").out


RECORD = CallRecord(model_call_id="a", response_id="ra", output_items=(OutputItem(ItemKind.UNSUPPORTED, "f"),))
CAPTURE = Capture(rollout_id="r", records=(RECORD,), lost=(LostCall(model_call_id="z"),))


def selection(verdict: Verdict, **fields: Any) -> Selection:
    return Selection(
        **{
            "rollout_id": "r",
            "attempt": 0,
            "policy": "p",
            "calls": ("a",),
            "terminal_call_id": "t",
            "terminal_response_id": "rt",
            "verdicts": (verdict,),
            **fields,
        }
    )


def rejected(code: Code, where: str = "$", **evidence: Any) -> Rejected:
    return Rejected(rollout_id="r", attempt=0, policy="p", code=code, where=where, message="why", evidence=evidence)


ITEMS = {"items": ["$.o[1]", "$.o[2]", "$.o[4]"]}
ALIKE = {**ITEMS, "alike": ["b"], "candidates": 2}
EARLIER = {"steps_before": 2, "scored_call": "t"}
KEPT = {"kept_although_unfinished": "scored"}
INCLUDED: list[tuple[Code, dict[str, Any], str, str]] = [
    (Code.REFERENCE, {**ITEMS, "reference": "R"}, "at $.o[1..2], $.o[4], by the reference R.", "by R"),
    (Code.REFERENCE, {"where": "$.t", "reference": "R"}, "It was named, by the reference R at $.t.", "by R"),
    (Code.RESPONSE_ID, {**ITEMS, "response_id": "x"}, "the result names its response id x.", "response x"),
    (Code.ITEM_ID, {"items": ["odd"], "item_ids": ["i"]}, "at odd, under the item ids i.", "odd"),
    (Code.INTERCHANGEABLE, {**ITEMS, "stands_for": ["b"]}, "it stands for b.", "for b"),
    (Code.CONTENT, ITEMS, "that of no other captured call", "$.o[1..2], $.o[4]"),
    (Code.CONTENT, ALIKE, "b served the same, and every reading", "1 of 2 alike"),
    (Code.LINEAGE, ALIKE, "but a call that is proved to belong", "1 of 2 alike"),
    (Code.ANCESTOR_OF_TERMINAL, EARLIER, "It is 2 calls before the scored call t", "2 before t"),
    (Code.ANCESTOR_OF_TERMINAL, {"steps_before": 0, "scored_call": "a"}, "or a resolved ancestor of it.", ""),
    (Code.CAPTURED, {"policy": "m:f"}, "The policy m:f returned it.", "by m:f"),
    (Code.CAPTURED, {"finish_reason": "stop"}, "its finish reason stop.", ""),
    (Code.CAPTURED, KEPT, "is kept because it is scored.", "unfinished, but scored"),
]
EXCLUDED: list[tuple[Code, dict[str, Any], str, str]] = [
    (Code.RETRY_SUPERSEDED, {"superseded_by": "b"}, "Call b answers that request", "by b"),
    (Code.UNUSABLE_TOKENS, {"reason": "x", "detail": "y"}, "Recorded reason: x (y).", "x"),
    (Code.FOREIGN_MODEL, {"model": "m"}, "Its model is m.", "model m"),
    (Code.UNFINISHED_LEAF, {"finish_reason": "abort"}, "its finish reason abort.", ""),
    (Code.POLICY_EXCLUDED, {}, "the custom policy did not return it.", ""),
    (Code.NOT_IN_FINAL_CONTEXT, {}, "not in the context", ""),
]


@pytest.mark.parametrize(("code", "evidence", "told", "short"), INCLUDED)
def test_every_rule_that_includes_has_words(code: Code, evidence: dict[str, Any], told: str, short: str) -> None:
    """An included call must say on which evidence."""
    verdict = Verdict("a", True, code, evidence)
    explanation = Explainer(CAPTURE, selection(verdict)).call(verdict)
    assert told in explanation.text
    assert explanation.would_change == (VERDICT_REMEDIES[code],)
    assert short in brief(verdict)


@pytest.mark.parametrize(("code", "evidence", "told", "short"), EXCLUDED)
def test_every_rule_that_excludes_has_words(code: Code, evidence: dict[str, Any], told: str, short: str) -> None:
    """An excluded call must say on which evidence."""
    verdict = Verdict("a", False, code, evidence)
    explanation = Explainer(CAPTURE, selection(verdict)).call(verdict)
    assert told in explanation.text
    assert "an item of kind unsupported" in explanation.text
    assert brief(verdict) == short


def test_no_policy_is_recommended_for_tokens_that_cannot_be_trained() -> None:
    """A reply that broke off is not trained under any policy; advice that says otherwise costs an hour."""
    record = CallRecord(model_call_id="x", response_id="r", unusable_reason=Code.STREAM_TRUNCATED)
    verdict = Verdict(model_call_id="x", included=False, code=Code.RETRY_SUPERSEDED, evidence={})
    outcome = Selection(
        rollout_id="a",
        attempt=0,
        policy="p",
        calls=(),
        terminal_call_id="",
        terminal_response_id="",
        verdicts=(verdict,),
    )
    explained = Explainer(Capture(rollout_id="a", records=(record,)), outcome).call(verdict)
    assert explained.would_change == ("Nothing would have it trained: its tokens are not usable (stream_truncated).",)
    assert "all_captured" not in explained.text


def test_every_code_has_a_remedy() -> None:
    """A refusal or a verdict without a remedy leaves people stuck; the test fails when a code is added."""
    codes = list(Code)
    formats = codes[codes.index(Code.FAILURE_MASKED) : codes.index(Code.ROW_MALFORMED)]
    refusals = [*codes[: codes.index(Code.POLICY_UNKNOWN)], Code.POLICY_BROKE_CONTRACT, Code.POLICY_REFUSED, *formats]
    assert set(refusals) == set(REFUSAL_REMEDIES)
    verdicts = codes[codes.index(Code.REFERENCE) : codes.index(Code.TOKEN_IDS_MISSING)]
    assert set(verdicts) == set(VERDICT_REMEDIES)
    assert refusal_remedies(Code.MATCH_MISSING, {"nearest": {"difference": "unheard of"}})
    assert refusal_remedies(Code.CASE_FAILED, {"nearest": "odd"}) == ()


def test_refusals_tell_what_their_evidence_holds() -> None:
    """Evidence that is not told cannot settle anything."""
    witnesses = [{"name": "content", "calls": ["a"], "says": "x"}, {"name": "declared", "calls": [], "says": "y"}]
    assert "The witness content names a: x. The witness declared names nobody: y." in refusal_text(
        rejected(Code.WITNESS_DISAGREEMENT, witnesses=witnesses)
    )
    assert "Call a: x (y)." in refusal_text(
        rejected(Code.TOKENS_UNUSABLE, unusable_calls={"a": {"reason": "x", "detail": "y"}})
    )
    snapshots = rejected(Code.SNAPSHOT_AMBIGUOUS, skipping=["a", "b"], keeping=["a"])
    assert "Both readings select a; one reading adds b, the other nothing else." in refusal_text(snapshots)
    assert "The item's id was served by a." in refusal_text(rejected(Code.MATCH_MISSING, owners=["a"]))
    assert "and 4 more" in refusal_text(rejected(Code.MATCH_AMBIGUOUS, candidates=[str(n) for n in range(12)]))


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (rejected(Code.COMPLETION_UNKNOWN, "call=a"), "The refusal is about this call."),
        (rejected(Code.MATCH_MISSING, owners=["a"]), "It served the id of the item"),
        (rejected(Code.MATCH_MISSING, calls=["a"]), "It is one of the calls that the refusal names."),
        (rejected(Code.OUTPUT_MISSING), "Give the harness's result"),
    ],
)
def test_a_call_knows_its_part_in_a_refusal(refusal: Rejected, told: str) -> None:
    """Of a hundred calls in a refused rollout, the one concerned must be found."""
    verdict = Verdict("a", False, Code.ROLLOUT_REJECTED, {"code": str(refusal.code)})
    assert told in Explainer(CAPTURE, refusal).call(verdict).text
    assert brief(verdict) == str(refusal.code)


def test_a_call_that_caused_a_refusal_by_its_tokens_says_so() -> None:
    """The reason of the call, not only that of the rollout, must be told."""
    verdict = Verdict("a", False, Code.UNUSABLE_TOKENS, {"reason": "aborted"})
    explanation = Explainer(CAPTURE, rejected(Code.TOKENS_UNUSABLE)).call(verdict)
    assert "Recorded reason: aborted." in explanation.text
    assert explanation.would_change == (VERDICT_REMEDIES[Code.UNUSABLE_TOKENS],)


def test_a_rollout_tells_its_facts() -> None:
    """Truncation, lost calls, options and notes change what a selection means."""
    verdict = Verdict("a", True, Code.CONTENT)
    text = rollout_text(selection(verdict, truncated=True, lost=("z",), notes=("n",), options={"whitespace": "trim"}))
    assert "policy p, whitespace=trim: 1 call of 1 selected" in text
    assert "A selected call was cut at its length." in text
    assert "Lost calls that do not concern the selection: z." in text
    assert text.endswith("Note: n.")
