from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from gristmill.canonical import JsonNumber, RepeatedKeys, loads
from gristmill.captures import (
    CallContext,
    CapturedRollout,
    CaptureFile,
    calls_from_reply,
    decode_reply,
    read_lines,
    read_result,
    write_lines,
)
from gristmill.captures.call_line import CALL_KEYS
from gristmill.captures.exact import dumps, plain_numbers, written_string
from gristmill.captures.exchange_line import EXCHANGE_KEYS
from gristmill.errors import Code, DecodeError, InternalError
from gristmill.records import (
    CallRecord,
    Capture,
    Continuation,
    ContinuationState,
    Delivery,
    Dialect,
    MediaSpan,
    ParentResolution,
    Purpose,
    PurposeLabel,
    Result,
)
from gristmill.tokens import TokenBook
from tests.captures.engine import FOLDER, load

MESSAGE = {"role": "assistant", "content": "ok"}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.25]}
ADDED: dict[str, Any] = {
    "requested_model": "asked",
    "upstream": "a",
    "upstream_id": "chatcmpl-1",
    "engine_epoch": 1,
    "weights_at_start": "7",
    "weights_at_end": "8",
    "changes": ["removed:cache_salt"],
    "retry_of": "c0",
    "request_digest": "d",
}
CALL = {"model_call_id": "c1", "response_id": "r1", "output_items": [MESSAGE], **TOKENS}


def read(*lines: Any, **options: Any) -> CaptureFile:
    return read_lines([line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines], **options)


def only(*lines: Any, **options: Any) -> CapturedRollout:
    [rollout] = read(*lines, **options).rollouts.values()
    return rollout


def record(**fields: Any) -> CallRecord:
    [made] = only({**CALL, **fields}).capture.records
    return made


def refused(*lines: Any) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        read(*lines)
    return caught.value


# The plain case: what a line states is what the record says.
def test_a_call_line_becomes_a_record() -> None:
    made = record(
        rollout_id="r",
        attempt=3,
        parent_call_id="c0",
        response_status="completed",
        finish_reason="stop",
        usage={"completion_tokens": 2},
        model="m",
        dialect="chat",
        weight_versions=[{"version": 4, "start": 0, "end": 2}],
        sampling={"temperature": 1, "logprobs_mode": "raw"},
        media=[{"digest": "d", "offset": 0, "length": 1}],
        request_media=["d"],
        session_id="s",
        parent_session_id="p",
        purpose={"label": "subagent", "evidence": "header"},
        delivered=False,
        admitted_at=1.5,
        completed_at=2,
        adapter="lora",
        tokenizer="t",
    )
    assert made.usable
    assert (made.rollout_id, made.attempt, made.parent_resolution) == ("r", 3, ParentResolution.RESOLVED)
    assert (made.prompt_len, made.cum_len, made.dialect) == (2, 4, Dialect.CHAT)
    assert made.weight_versions[0].version == "4"
    assert (made.sampling.temperature, made.sampling.logprobs_mode) == (1.0, "raw")
    assert made.media == (MediaSpan("d", 0, 1),)
    assert (made.purpose.label, made.delivery) == (PurposeLabel.SUBAGENT, Delivery.ABORTED)
    assert (made.admitted_at, made.completed_at) == (1.5, 2.0)


# What a line does not state stays unknown: no status, no parent, no delivery is ever inferred.
def test_silence_is_unknown() -> None:
    made = record()
    assert (made.response_status, made.finish_reason, made.parent_resolution) == (None, None, None)
    assert (made.delivery, made.dialect, made.model) == (Delivery.UNKNOWN, Dialect.UNKNOWN, None)
    assert only({"model_call_id": "c"}).capture.records[0].response_id == "c"


# Tokens that may not be trained are told apart by their reason.
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"prompt_token_ids": None, "generation_token_ids": None, "generation_log_probs": None},
            Code.TOKEN_IDS_MISSING,
        ),
        ({"generation_log_probs": None}, Code.LOGPROBS_MISSING),
        ({"generation_token_ids": None}, Code.TOKEN_IDS_MISSING),
        ({"prompt_token_ids": None}, Code.PROMPT_IDS_MISSING),
        ({"generation_token_ids": [3, -4]}, Code.TOKEN_ID_INVALID),
        ({"generation_token_ids": [3, "4"]}, Code.TOKEN_ID_INVALID),
        ({"generation_log_probs": [-0.5]}, Code.LOGPROB_COUNT_MISMATCH),
        ({"generation_log_probs": [-0.5, None]}, Code.LOGPROB_NOT_FINITE),
        ({"usage": {"completion_tokens": 3}}, Code.TOKEN_COUNT_MISMATCH),
        ({"finish_reason": "abort"}, Code.ABORTED),
        ({"unusable_reason": "stream_truncated", "unusable_detail": "cut"}, Code.STREAM_TRUNCATED),
    ],
)
def test_unusable_calls_say_why(fields: dict[str, Any], reason: Code) -> None:
    made = record(**fields)
    assert (made.usable, made.unusable_reason) == (False, reason)
    assert made.unusable_detail


# One reply with n = 2 on two lines carries the reply's usage twice: the sum is what counts.
def test_usage_of_sibling_choices_is_their_sum() -> None:
    one = {**CALL, "choice_index": 0, "usage": {"completion_tokens": 5}}
    two = {**CALL, "model_call_id": "c2", "choice_index": 1, "usage": {"completion_tokens": 5}}
    two |= {"generation_token_ids": [5, 6, 7], "generation_log_probs": [-1, -1, -1]}
    assert [made.usable for made in only(one, two).capture.records] == [True, True]
    one["usage"] = two["usage"] = {"completion_tokens": 4}
    assert [made.usable for made in only(one, two).capture.records] == [False, False]
    # A response id that was used again for another completion is no sibling.
    again = {**two, "choice_index": 0, "usage": {"completion_tokens": 3}}
    assert [made.usable for made in only({**one, "usage": None}, again).capture.records] == [True, True]


# Both calls are kept: selection refuses the attempt, and must see both to say so.
def test_a_repeated_call_id_is_kept_twice_and_noted() -> None:
    found = read(CALL, {**CALL, "generation_token_ids": [8, 9]})
    [(capture, _)] = found.rollouts.values()
    assert [made.model_call_id for made in capture.records] == ["c1", "c1"]
    assert capture.tokens["c1"].ids_T.tolist() == [1, 2, 3, 4]
    assert [note.message for note in found.notes] == ["this call id occurs more than once"]
    assert len(list(write_lines(capture))) == 2


# The lineage of imported calls comes from their requests.
def test_requests_give_digests_and_media() -> None:
    request = {"model": "asked", "temperature": 0.5, "messages": [{"role": "user", "content": "hi"}], "images": ["d"]}
    made = record(request=request)
    assert made.context_digest
    assert made.continuation_digest
    assert (made.model, made.request_media, made.sampling.temperature) == ("asked", ("d",), 0.5)
    assert only({**CALL, "request": request}).capture.exchanges["c1"].request == loads(dumps(request))


# A line in our own stored form keeps its fingerprints and digests; mixing forms has no reading.
def test_stored_items() -> None:
    item = {"kind": "text", "fingerprint": "f", "id": "i"}
    made = record(output_items=[item], continuation_digest="cd")
    assert (made.output_items[0].fingerprint, made.continuation_digest) == ("f", "cd")
    assert refused({**CALL, "output_items": [item, MESSAGE]}).where == "line 1 $.output_items"


# A field of the wrong type is a mistake in the file: the error must lead to it.
@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b"{", "line 1"),
        (b"\xff", "line 1"),
        (b"[" * 5000, "line 1"),
        (b"[]", "line 1 $"),
        (b'{"model_call_id": "a", "model_call_id": "b"}', "line 1 $"),
        ({}, "line 1 $.model_call_id"),
        ({"model_call_id": ""}, "line 1 $.model_call_id"),
        ({"model_call_id": 1}, "line 1 $.model_call_id"),
        ({"model_call_id": "\ud800"}, "line 1 $.model_call_id"),
        ({"kind": "new"}, "line 1 $.kind"),
        ({"kind": 1}, "line 1 $.kind"),
        ({"kind": []}, "line 1 $.kind"),
        ({"schema": 99}, "line 1"),
        ({**CALL, "attempt": -1}, "line 1 $.attempt"),
        ({**CALL, "attempt": True}, "line 1 $.attempt"),
        ({**CALL, "prompt_token_ids": "1"}, "line 1 $.prompt_token_ids"),
        ({**CALL, "sampling": {"temperature": "hot"}}, "line 1 $.sampling.temperature"),
        ({**CALL, "sampling": {"heat": 1}}, "line 1 $.sampling"),
        (b'{"model_call_id": "c", "sampling": {"temperature": 1e999}}', "line 1 $.sampling.temperature"),
        (b'{"model_call_id": "c", "admitted_at": 1e999}', "line 1 $.admitted_at"),
        ({**CALL, "media": [{"digest": "d"}]}, "line 1 $.media[0]"),
        (
            {**CALL, "weight_versions": [{"version": None, "start": 0, "end": 1}]},
            "line 1 $.weight_versions[0].version",
        ),
        ({**CALL, "dialect": "morse"}, "line 1 $.dialect"),
        ({**CALL, "dialect": "\ud800"}, "line 1 $.dialect"),
        ({**CALL, "delivered": "yes"}, "line 1 $.delivered"),
        ({**CALL, "delivery": "maybe"}, "line 1 $.delivery"),
        ({**CALL, "usable": False}, "line 1 $.usable"),
        ({**CALL, "usable": 1}, "line 1 $.usable"),
        ({**CALL, "unusable_reason": "because"}, "line 1 $.unusable_reason"),
        ({**CALL, "request_headers": {"a": 1}}, "line 1 $.request_headers[...]"),
        ({**CALL, "extras": {"x": {"dtype": "object", "shape": [0], "data": ""}}}, "line 1 $.extras.x.dtype"),
        ({**CALL, "extras": {"x": {"dtype": "int8", "shape": [3], "data": "AA=="}}}, "line 1 $.extras.x"),
        ({**CALL, "extras": {"x": {"dtype": "int8", "shape": [1], "data": "?"}}}, "line 1 $.extras.x"),
        ({"kind": "lost"}, "line 1 $.model_call_id"),
        ({"kind": "lost", "model_call_id": "c", "maybe_received": 1}, "line 1 $.maybe_received"),
        ({"kind": "delivery", "model_call_id": "c", "state": "maybe"}, "line 1 $.state"),
        ({"kind": "delivery", "model_call_id": "c", "state": ["x"]}, "line 1 $.state"),
        ({"kind": "delivery", "model_call_id": "c", "state": "partial"}, "line 1"),
        ({"kind": "result"}, "line 1 $.result"),
        ({"kind": "result", "result": {}, "reward": "1"}, "line 1 $.reward"),
        ({"kind": "result", "result": {"reward": True}}, "line 1 $.reward"),
        (b'{"kind": "result", "result": {"reward": 1e999}}', "line 1 $.reward"),
        ({"kind": "result", "result": {"metadata": 1}}, "line 1 $.metadata"),
        ({"kind": "exchange"}, "line 1 $.request"),
        ({"kind": "exchange", "request": {}}, "line 1 $.request.path"),
        ({"kind": "exchange", "request": {"path": "/v1/messages"}}, "line 1 $.status"),
        ({"kind": "exchange", "request": {"path": "/v1/messages"}, "status": 200}, "line 1 $"),
        (
            {"kind": "exchange", "request": {"path": "/v1/messages"}, "status": 200, "body": {}, "sse_raw": ""},
            "line 1 $",
        ),
        (
            {
                "kind": "exchange",
                "request": {"path": "/v1/messages", "headers": {"User-Agent": 1}},
                "status": 200,
                "body": {},
            },
            "line 1 $.request.headers.User-Agent",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_place(line: Any, where: str) -> None:
    error = refused(line)
    assert error.where == where
    assert error.code in {Code.FILE_MALFORMED, Code.SCHEMA_UNSUPPORTED}
    assert error.message.startswith("expected")


# Lines of two attempts that do not say which is theirs could be put into the wrong one.
def test_rollout_ids_on_all_lines_or_none() -> None:
    assert list(read(CALL, {"kind": "lost", "model_call_id": "l"}).rollouts) == [("rollout", 0)]
    assert refused({**CALL, "rollout_id": "a"}, CALL).where == "line 2 $.rollout_id"
    assert refused(CALL, {**CALL, "rollout_id": "a"}).where == "line 2 $.rollout_id"
    named = read({**CALL, "rollout_id": "a"}, {**CALL, "rollout_id": "a", "attempt": 1})
    assert list(named.rollouts) == [("a", 0), ("a", 1)]


# A skipped line is a hole in its attempt: an attempt with a hole must not look complete.
def test_skipped_lines_leave_lost_calls() -> None:
    bad = {"model_call_id": "c2", "prompt_token_ids": 1}
    found = read(CALL, bad, b"{", {"kind": "delivery", "model_call_id": "x", "state": "partial"}, skip_bad=True)
    [(capture, _)] = found.rollouts.values()
    assert [(lost.model_call_id, lost.maybe_received) for lost in capture.lost] == [("c2", True), ("line-3", True)]
    assert [error.where for error in found.bad_lines] == ["line 2 $.prompt_token_ids", "line 3", "line 4"]
    assert read(b"{", skip_bad=True).rollouts[("rollout", 0)].capture.lost[0].model_call_id == "line-1"
    two = [{**CALL, "rollout_id": "a"}, {**CALL, "rollout_id": "b"}]
    unplaced = read(*two, {"rollout_id": 1}, {"kind": "result", "rollout_id": "a"}, skip_bad=True)
    assert [len(rollout.capture.lost) for rollout in unplaced.rollouts.values()] == [1, 1]
    assert len(unplaced.bad_lines) == 2


# Lost calls decide whether a rollout may be trained; an import that cannot say must not say "not received".
def test_lost_calls() -> None:
    lost = only({"kind": "lost", "model_call_id": "l", "parent_call_id": "p", "reason": "crash"}).capture.lost[0]
    assert (lost.parent_call_id, lost.reason, lost.maybe_received) == ("p", "crash", True)
    stated = only({"kind": "lost", "model_call_id": "l", "maybe_received": False}).capture.lost[0]
    assert stated.maybe_received is False
    assert stated.reason


# A delivery is an event of its own and may come later than its call; the last one counts.
def test_deliveries() -> None:
    state = {"kind": "delivery", "model_call_id": "c1"}
    lines = [{**state, "state": "partial"}, CALL, {**state, "state": "delivered"}]
    assert only(*lines).capture.records[0].delivery is Delivery.DELIVERED
    assert record(delivered=True).delivery is Delivery.DELIVERED
    assert record(delivery="partial").delivery is Delivery.PARTIAL
    lost = {"kind": "lost", "model_call_id": "c1"}
    assert only(lost, lines[0]).capture.records == ()


# A missing reward is not 0; two results have no order.
def test_results() -> None:
    result = only({"kind": "result", "result": {"reward": 1, "group_id": "g", "metadata": {"k": 1.5}}}).result
    assert result is not None
    assert (result.reward, result.group_id, result.metadata) == (1.0, "g", {"k": 1.5})
    stated = only({"kind": "result", "result": {"reward": 1}, "reward": None, "metadata": {"a": 1}}).result
    assert stated is not None
    assert (stated.reward, stated.metadata) == (None, {"a": 1})
    assert only(CALL).result is None
    assert refused({"kind": "result", "result": 1}, {"kind": "result", "result": 1}).where == "line 2 $"
    assert read_result(b"[1]") == Result(value=[1])
    with pytest.raises(DecodeError) as caught:
        read_result(b'{"group_id": 1}')
    assert caught.value.where == "$.group_id"


# A key that is misspelt would be lost without a word.
def test_unknown_keys_are_noted() -> None:
    found = read({**CALL, "respnse_status": "completed", "\ud800": 1})
    assert [(note.where, note.message) for note in found.notes] == [("line 1", "unknown keys: respnse_status, \\ud800")]


# Commit order decides between equal calls; going back would change it without a word.
def test_ordinals() -> None:
    lines = [CALL, {**CALL, "model_call_id": "c2", "ordinal": 7}, {**CALL, "model_call_id": "c3"}]
    assert [made.ordinal for made in only(*lines).capture.records] == [0, 7, 8]
    assert refused(*lines, {**CALL, "model_call_id": "c4", "ordinal": 3}).where == "line 4 $.ordinal"


def exchange(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "exchange", **load(name), **fields}


# One exchange with several choices is several calls, each with an id of its own.
def test_exchanges() -> None:
    found = read(exchange("chat_n2"), exchange("chat_error_model"), exchange("stream_no_logprobs", model_call_id="s"))
    [(capture, _)] = found.rollouts.values()
    assert [(made.model_call_id, made.choice_index, made.ordinal) for made in capture.records] == [
        ("line-1", 0, 0),
        ("line-1#1", 1, 1),
        ("line-2", 0, 2),
        ("s", 0, 3),
    ]
    assert capture.records[0].response_id == capture.records[1].response_id
    assert (capture.records[2].response_status, capture.records[2].response_id) == ("failed", "line-2")
    assert set(capture.exchanges) == {made.model_call_id for made in capture.records}
    assert capture.exchanges["s"].reply == load("stream_no_logprobs")["sse_raw"]
    assert found.notes == ()
    state = {"kind": "delivery", "model_call_id": "n", "state": "aborted"}
    both = only(exchange("chat_n2", model_call_id="n"), state).capture.records
    assert [made.delivery for made in both] == [Delivery.ABORTED, Delivery.ABORTED]


# Keys and cookies in recorded headers must not get into a ledger, while session headers must.
def test_headers_are_kept_by_an_allow_list() -> None:
    line = exchange("messages_basic")
    line["request"]["headers"] = {"Authorization": "secret", "X-Session-Id": "s", "x-parent-session-id": "p"}
    found = read(line)
    [(capture, _)] = found.rollouts.values()
    made = capture.records[0]
    assert (made.session_id, made.parent_session_id) == ("s", "p")
    assert "secret" not in repr(capture.exchanges)
    assert found.notes[0].message == "request headers not kept: authorization"


# Token counters and other routes are no calls; they are named instead of being taken for lost ones.
def test_routes_that_sample_nothing_are_noted() -> None:
    found = read(exchange("tokenize_prompt"), exchange("get_version"), exchange("render_messages"))
    assert len(found.notes) == 3
    assert found.rollouts[("rollout", 0)].capture.records == ()


# Some recorders keep a body as the text it was.
def test_bodies_as_text_and_without_body() -> None:
    line = exchange("chat_length", body=json.dumps(load("chat_length")["body"]))
    assert only(line).capture.records[0].usable
    error = exchange("chat_error_model", body=None)
    assert only(error).capture.records[0].response_status == "failed"
    assert only(exchange("chat_error_model", body=[1])).capture.records[0].response_status == "failed"


def everything() -> tuple[Capture, Result]:
    request = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "n": 1.50, "k": {"a": 1, "a": 2}}'
    packed = {"dtype": "int16", "shape": [2, 1], "data": "AQACAA=="}
    lines: list[Any] = [
        {"kind": "exchange", "model_call_id": path.stem, **json.loads(path.read_bytes())}
        for path in sorted(FOLDER.iterdir())
    ]
    lines.append(b'{"model_call_id": "exact", "request": ' + request + b"}")
    lines.append(
        {**CALL, "extras": {"experts": packed}, "ordinal": 500, "delivered": True, "purpose": {"label": "agent"}}
    )
    lines.append({**CALL, "model_call_id": "c2", "prompt_token_ids": [1, 2, 3, 4, 9], "parent_call_id": "c1"})
    lines.append({"kind": "lost", "model_call_id": "l", "maybe_received": False})
    lines.append(b'{"kind": "result", "result": {"x": 1e999, "reward": 0.5}, "metadata": {"m": 1.5}, "group_id": "g"}')
    capture, result = only(*lines)
    assert result is not None
    return capture, result


# A capture that changes when it is written and read again is not a capture.
def test_a_capture_round_trips() -> None:
    capture, result = everything()
    lines = list(write_lines(capture, result))
    again, result_again = only(*lines)
    assert again.records == capture.records
    assert (again.lost, result_again) == (capture.lost, result)
    assert list(write_lines(again, result_again)) == lines
    assert set(again.tokens) == set(capture.tokens)
    for call_id, delta in capture.tokens.items():
        other = again.tokens[call_id]
        assert np.array_equal(delta.ids_T, other.ids_T)
        assert np.array_equal(delta.mask_T, other.mask_T)
        assert np.array_equal(delta.logprobs_T, other.logprobs_T)
        assert set(delta.extras) == set(other.extras)
    assert again.tokens["c1"].extras["experts"].tolist() == [[1], [2]]
    assert again.records[-1].base_call_id == "c1"
    for call_id, exchange_ in capture.exchanges.items():
        assert dumps(again.exchanges[call_id].reply) == dumps(exchange_.reply)
        assert dumps(again.exchanges[call_id].request) == dumps(exchange_.request)


# Empty attempts and captures made by hand are written too.
def test_writing_little() -> None:
    assert list(write_lines(Capture(rollout_id="r"))) == []
    record = CallRecord(
        model_call_id="c",
        response_id="r",
        purpose=msgspec.convert({}, type(CallRecord(model_call_id="", response_id="").purpose)),
    )
    [line] = write_lines(Capture(rollout_id="r", records=(record,)))
    assert b"purpose" not in line


# What only a gateway knows of a call must survive a file, and a reader that does not know it must refuse the line.
def test_what_a_gateway_knows_is_written_and_read() -> None:
    made = record(**ADDED, model="m")
    assert {name: getattr(made, name) for name in ADDED} == {**ADDED, "changes": ("removed:cache_salt",)}
    assert made.schema == 2
    [line] = write_lines(Capture(rollout_id="rollout", records=(msgspec.structs.replace(made, usable=False),)))
    assert json.loads(line)["schema"] == 2
    [rollout] = read_lines([line]).rollouts.values()
    assert all(getattr(rollout.capture.records[0], name) == getattr(made, name) for name in (*ADDED, "model", "schema"))
    [plain] = write_lines(Capture(rollout_id="rollout", records=(record(),)))
    assert "schema" not in json.loads(plain)
    assert record(requested_model="asked").model == "asked"


# Whether a call was continued survives a file, and a reason that there is not is no reason.
def test_a_continuation_is_written_and_read() -> None:
    said = {"state": "continued", "parent_call_id": "c0", "closed": True, "suffix_len": 2, "model": "m"}
    made = record(continuation=said)
    assert made.continuation == Continuation(
        state=ContinuationState.CONTINUED, parent_call_id="c0", closed=True, suffix_len=2, model="m"
    )
    [line] = write_lines(Capture(rollout_id="rollout", records=(msgspec.structs.replace(made, usable=False),)))
    assert (json.loads(line)["schema"], json.loads(line)["continuation"]) == (4, said)
    [rollout] = read_lines([line]).rollouts.values()
    assert rollout.capture.records[0].continuation == made.continuation
    assert record(continuation=None).continuation is None
    wrong = refused({**CALL, "continuation": {"state": "refused", "reason": "luck"}})
    assert wrong.where == "line 1 $.continuation.reason"


# The path of a call in a gateway: all of it in the context, and each choice's record has it.
def test_a_context_passes_on_what_a_gateway_knows() -> None:
    reply = decode_reply("chat", body=json.dumps({"id": "r", "choices": [{"message": MESSAGE}] * 2}).encode())
    stated = {**ADDED, "changes": ("removed:cache_salt",)}
    purpose = Purpose(PurposeLabel.SUBAGENT, "header")
    context = CallContext(model_call_id="c", request={"model": "body"}, purpose=purpose, **stated)
    for made, _ in calls_from_reply(reply, context, TokenBook()):
        assert {name: getattr(made, name) for name in ADDED} == stated
        assert (made.purpose, made.schema, made.model) == (purpose, 2, "asked")
    [plain, _] = calls_from_reply(reply, CallContext(model_call_id="c", request={"model": "body"}), TokenBook())
    assert (plain.record.schema, plain.record.model) == (1, "body")


# What goes through our own writer comes back as exactly the same value.
def test_exact_writing() -> None:
    text = b'{"a":[1,2.50,1e999,-0.0,null,true,false,"\\ud800\\n"],"b":{"k":1,"k":2},"c":{}}'
    value = loads(text)
    assert dumps(value) == text
    assert isinstance(value["b"], RepeatedKeys)
    assert dumps((1, 0.5)) == b"[1,0.5]"
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert dumps(deep) == b"[" * 5001 + b"]" * 5001
    for wrong in (float("nan"), object(), b""):
        with pytest.raises(InternalError):
            dumps(wrong)


# Strings of any kind and length are written by two ways that must agree, or equal texts would be stored twice.
@pytest.mark.parametrize("text", ["", '"', "\\", "/", "\x7f", "é", "\ud800", "\U0001f600", *map(chr, range(32))])
def test_strings_are_written_alike(text: str) -> None:
    for long in (text, "a" * 40 + text, text * 60, text + "b" * 300):
        assert written_string(long) == json.dumps(long)


# Settings are used as numbers; what no float can hold must not become infinite.
def test_plain_numbers() -> None:
    assert plain_numbers(loads(b'{"a": [1.5, 2, "x"]}'), "$") == {"a": [1.5, 2, "x"]}
    assert plain_numbers(JsonNumber("1e999"), "$") == JsonNumber("1e999")
    deep = {"kind": "result", "result": 1, "metadata": {"a": loads("[" * 300 + "]" * 300)}}
    assert refused(deep).where == "line 1 $.metadata"


# A key that is read and not documented cannot be used; one that is documented and not read is a trap.
def test_every_key_is_documented() -> None:
    page = (FOLDER.parents[2] / "docs" / "reference" / "capture-format.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", page))
    assert documented >= CALL_KEYS | EXCHANGE_KEYS
    table = page.partition("## `call`")[2].partition("## `exchange`")[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z_]+)`", first_cells)) <= CALL_KEYS
