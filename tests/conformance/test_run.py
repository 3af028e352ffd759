"""The runner of conformance cases: anybody's cases, read through the code that the commands use."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.conformance import UNSUPPORTED_KINDS, check, read_case, run_case
from gristmill.errors import ConfigError, DecodeError, PolicyError

Json = dict[str, Any]

RECORD: Json = {
    "model_call_id": "c1",
    "response_id": "r1",
    "response_status": "completed",
    "finish_reason": "stop",
    "output_items": [{"role": "assistant", "content": "4"}],
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}
RESULT: Json = {"response": {"output": [{"role": "assistant", "content": "4"}]}}


def run(**given: Any) -> Json:
    return run_case({"input": given})


def test_select() -> None:
    # The outcome has everything that an expectation can ask for.
    outcome = run(kind="select", records=[RECORD], result=RESULT)
    assert (outcome["outcome"], outcome["calls"], outcome["terminal"]) == ("select", ["c1"], "r1")
    assert outcome["verdicts"] == {"c1": {"included": True, "code": "content"}}


def test_select_with_options_and_lost_calls() -> None:
    # Options and holes of the capture must reach the policy and the pipeline.
    stripped = {"response": {"output": [{"role": "assistant", "content": " 4 "}]}}
    given = {"kind": "select", "records": [RECORD], "result": stripped, "capture": {"incomplete_calls": ["l1"]}}
    assert run(**given)["code"] == "match_missing"
    outcome = run(**given, options={"whitespace": "trim"})
    assert outcome["verdicts"]["l1"] == {"included": False, "code": "lost"}


def test_variants() -> None:
    # Each variant replaces a part of the input and answers under its own name.
    outcome = run(
        kind="select",
        records=[RECORD],
        variants=[{"name": "same", "result": RESULT}, {"name": "empty", "result": {"response": {"output": []}}}],
    )
    assert outcome["outcome"] == "variants"
    assert (outcome["same"]["calls"], outcome["empty"]["code"]) == (["c1"], "selection_empty")


def test_reconstruct() -> None:
    # Rows are rebuilt from a selection that the case gives.
    outcome = run(kind="reconstruct", records=[RECORD], selected=["c1"])
    [row] = outcome["rows"]
    assert (row["tokens"], row["mask"], row["logprobs"]) == ([1, 2, 3], [0, 0, 1], [0.0, 0.0, -0.5])


def test_reconstruct_refused() -> None:
    # A call without tokens refuses with a code.
    bare = {key: value for key, value in RECORD.items() if not key.startswith(("prompt", "generation"))}
    assert run(kind="reconstruct", records=[bare], selected=["c1"])["code"] == "tokens_unusable"
    assert run(kind="select+reconstruct", records=[bare], result=RESULT)["code"] == "tokens_unusable"
    assert run(kind="select+reconstruct", records=[bare], result={})["code"] == "output_missing"
    assert run(kind="reconstruct", records=[])["code"] == "nothing_to_train"


def test_select_and_reconstruct() -> None:
    # Both halves in one case.
    outcome = run(kind="select+reconstruct", records=[RECORD], result=RESULT)
    assert (outcome["outcome"], outcome["calls"], outcome["terminal"]) == ("rows", ["c1"], "r1")


def test_fingerprint() -> None:
    # Unreadable items answer with a code and do not stop the others.
    outcome = run(
        kind="fingerprint",
        items={
            "a": {"role": "assistant", "content": "4"},
            "b": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
            "c": {"type": "web_search_call"},
        },
    )
    assert outcome["digests"]["a"] == outcome["digests"]["b"]
    assert outcome["error"] == {"c": "item_type_unsupported"}


def test_lineage() -> None:
    # A request's parent is the call whose request and reply begin it.
    ask = {"role": "user", "content": "2+2"}
    record = {"model_call_id": "c1", "request": {"messages": [ask]}, "output_items": RECORD["output_items"]}
    more = [ask, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3"}]
    outcome = run(
        kind="lineage",
        records=[record],
        requests=[{"name": "next", "messages": more}, {"name": "new", "messages": [ask]}],
    )
    assert outcome["parents"] == {"next": "c1", "new": None}
    assert outcome["resolutions"] == {"next": "resolved", "new": "root"}


def test_store_and_select() -> None:
    # Rollouts in one store never mix.
    events = [
        {"rollout": "a", "append": RECORD},
        {"rollout": "b", "append": {**RECORD, "model_call_id": "c9", "response_id": "r9"}},
    ]
    outcome = run(kind="store+select", store_events=events, result={"rollout": "b", **RESULT})
    assert outcome["calls"] == ["c9"]


REPLY: Json = {"id": "r7", "token_ids": [5, 6], "text": "hi", "finish_reason": "stop"}


def test_capture_short_form() -> None:
    # What a short reply does not mention is not part of the case; what it gives as null is missing.
    assert run(kind="capture", upstream=REPLY)["state"] == "usable"
    assert run(kind="capture", upstream={**REPLY, "logprobs": None})["reason"] == "logprobs_missing"
    assert run(kind="capture", upstream={**REPLY, "token_ids": None, "logprobs": [-1]})["reason"] == "token_ids_missing"


@pytest.mark.parametrize("ids", [[5, 6], None])
def test_capture_empty_logprobs_prove_nothing(ids: Any) -> None:
    # A reply with text whose log-probs were left empty would be counted as one that sampled nothing.
    outcome = run(kind="capture", upstream={**REPLY, "token_ids": ids, "logprobs": []})
    assert outcome["state"] == "incomplete"


def test_capture_wire_forms() -> None:
    # A body, a raw stream and a whole reply are read by the decoder of their path.
    body = {
        "id": "r7",
        "prompt_token_ids": [1],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "finish_reason": "stop",
                "token_ids": [5],
                "logprobs": {"content": [{"token": "hi", "logprob": -0.5}]},
            }
        ],
    }
    assert run(kind="capture", upstream=body)["token_ids"] == [5]
    assert run(kind="capture", upstream={"path": "/v1/chat/completions", "status": 200, "body": body})["token_ids"] == [
        5
    ]
    failed = run(kind="capture", upstream={"status": 500, "body": {"error": {"message": "no"}}})
    assert (failed["state"], failed["reason"]) == ("incomplete", "call_failed")
    assert run(kind="capture", upstream={"sse_raw": "data: {}\n\n"})["reason"] == "stream_truncated"


def test_capture_streams() -> None:
    # A stream that stops without its end is never usable.
    chunks = [
        {"delta": {"content": "h"}, "token_ids": [5]},
        {"delta": {"content": "i"}, "token_ids": [6], "logprobs": [-0.5], "finish_reason": "stop"},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ]
    whole = run(kind="capture", stream=chunks)
    assert (whole["state"], whole["token_ids"]) == ("usable", [5, 6])
    assert run(kind="capture", stream=chunks, upstream_close="reset")["reason"] == "stream_truncated"
    assert run(kind="capture", stream=chunks[:1])["state"] == "incomplete"


def test_capture_several() -> None:
    # Several calls answer by id.
    outcome = run(
        kind="capture", calls=[{"id": "a", "upstream": REPLY}, {"id": "b", "upstream": {**REPLY, "logprobs": [-1]}}]
    )
    assert outcome["states"] == {"a": "usable", "b": "incomplete"}
    assert outcome["reasons"] == {"a": None, "b": "logprob_count_mismatch"}


def test_timeline() -> None:
    # Weights that changed during a call are known as a window only, unless the engine reports more.
    events = [{"weights": 3}, {"dispatch": "c1"}, {"weights": 4}, {"complete": "c1"}]
    outcome = run(kind="capture", timeline=events)
    assert (outcome["state"], outcome["weight_version"]) == ("usable", {"start": 3, "end": 4})
    reported = run(kind="capture", timeline=[*events[:3], {"complete": "c1", "engine_reports": [3, 4]}])
    assert reported["weight_versions"] == [3, 4]
    assert run(kind="capture", timeline=events[:2])["reason"] == "lost"


def test_capture_and_more() -> None:
    # Captured replies go on to selection and rows; records stand before them.
    calls = [{"model_call_id": "c2", "upstream": {**REPLY, "text": "5", "logprobs": [-1, -2]}}]
    history = {"response": {"output": [{"role": "assistant", "content": text} for text in "45"]}}
    outcome = run(kind="capture+select", records=[RECORD], calls=calls, result=history)
    assert outcome["calls"] == ["c1", "c2"]
    rows = run(kind="capture+reconstruct", records=[RECORD], calls=calls, selected=["c2"])
    assert rows["rows"][0]["logprobs"] == [0.0, -1.0, -2.0]
    assert run(kind="capture+reconstruct", records=[RECORD], selected=["c1"])["outcome"] == "rows"


@pytest.mark.parametrize("kind", [*sorted(UNSUPPORTED_KINDS), "teleport", None, 7])
def test_unknown_kinds_are_said(kind: Any) -> None:
    # A kind that is not run must never look like a pass.
    case = {"input": {"kind": kind}, "expected": {"outcome": "select"}}
    outcome = run_case(case)
    assert outcome == {"outcome": "unsupported", "kind": kind}
    assert check(case, outcome).ok is (kind in UNSUPPORTED_KINDS)


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {"kind": "select", "records": {}},
        {"kind": "select", "records": [7]},
        {"kind": "select", "records": [{"response_id": "r"}]},
        {"kind": "select", "options": [1]},
        {"kind": "select", "options": {"reasoning": 1}},
        {"kind": "select", "policy": 1},
        {"kind": "select", "capture": [1]},
        {"kind": "select", "variants": [7]},
        {"kind": "select", "variants": [{}]},
        {"kind": "reconstruct", "records": [RECORD], "selected": ["c9"]},
        {"kind": "fingerprint", "items": []},
        {"kind": "store+select", "store_events": [{}]},
        {"kind": "store+select", "result": {}},
        {"kind": "lineage", "records": [{}]},
        {"kind": "capture"},
        {"kind": "capture", "timeline": [{}]},
        {"kind": "capture", "calls": [{}]},
    ],
)
def test_malformed_cases(given: Any) -> None:
    # A case that cannot be read is an error with its place, never a pass and never a Python error.
    with pytest.raises(DecodeError):
        run_case({"input": given})


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b"\xff", b'"case"'])
def test_malformed_lines(line: bytes) -> None:
    # The error names the line of the file.
    with pytest.raises(DecodeError) as caught:
        read_case(line, "cases.jsonl:3")
    assert "cases.jsonl:3" in str(caught.value.where)


def test_unknown_policies_and_options() -> None:
    # A case of somebody else's policy must say that it is not here.
    with pytest.raises(PolicyError):
        run(kind="select", policy="psychic")
    with pytest.raises(ConfigError):
        run(kind="select", options={"mood": "good"})
