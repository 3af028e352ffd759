"""Conformance cases that start from what an engine sent: one reply, several, or a timeline of weight updates.

Invariant: a short form is written out as the engine's own wire format and read by the same decoder as every recorded
exchange. What a short form does not mention (prompt ids, log-probabilities) is not part of the case and is filled in;
what it gives as null is missing.

Not here: cases that start from records (run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from gristmill.canonical import JsonValue
from gristmill.captures import CallContext, MadeCall, calls_from_reply, decode_reply
from gristmill.captures.exact import dumps
from gristmill.conformance.inputs import JsonObject, capture_of, list_of, object_of, text_of
from gristmill.errors import DecodeError
from gristmill.records import Capture
from gristmill.tokens import TokenBook

__all__ = ["capture_outcome", "capture_with"]

_CHAT: Final = "/v1/chat/completions"
_FILLED_PROMPT: Final = [0]


def capture_outcome(given: JsonObject) -> dict[str, Any]:
    """Capture what a case describes and say whether its tokens may be trained.

    Raises:
        DecodeError: `file_malformed` where the case is none of the known forms.
    """
    if "timeline" in given:
        return _timeline(given)
    calls = given.get("calls")
    if calls is not None:
        states = {
            text_of(object_of(call, "calls").get("id"), "calls[].id"): _state(_made(object_of(call, "calls")))
            for call in list_of(calls, "calls")
        }
        return {
            "outcome": "capture_many",
            "states": {name: state["state"] for name, state in states.items()},
            "reasons": {name: state["reason"] for name, state in states.items()},
        }
    return {"outcome": "capture", **_state(_made(given))}


def capture_with(given: JsonObject) -> Capture:
    """Read the capture of a case that holds records, engine replies, or both, in that order."""
    capture = capture_of(given)
    made = [_made(object_of(call, "calls")) for call in list_of(given.get("calls"), "calls")]
    if not made:
        return capture
    tokens = {call.record.model_call_id: call.tokens for call in made if call.tokens is not None}
    return Capture(
        rollout_id=capture.rollout_id,
        records=(*capture.records, *(call.record for call in made)),
        tokens={**capture.tokens, **tokens},
        lost=capture.lost,
    )


def _state(call: MadeCall) -> dict[str, Any]:
    record = call.record
    reason = None if record.unusable_reason is None else str(record.unusable_reason)
    return {
        "state": "usable" if record.usable else "incomplete",
        "reason": reason,
        "message": record.unusable_detail or "",
        "token_ids": [] if call.tokens is None else call.tokens.ids_T[record.prompt_len :].tolist(),
    }


def _made(given: JsonObject) -> MadeCall:
    """Decode one reply, in wire form or in short form."""
    call_id = given.get("id", given.get("model_call_id", "call"))
    context = CallContext(model_call_id=text_of(call_id, "id"), request=given.get("request"))
    if "stream" in given:
        reply = decode_reply(_CHAT, 200, sse=_event_stream(given))
    else:
        upstream = object_of(given.get("upstream"), "upstream")
        path = text_of(upstream.get("path", _CHAT), "upstream.path")
        status = upstream.get("status", 200)
        if "sse_raw" in upstream:
            reply = decode_reply(path, status, sse=text_of(upstream["sse_raw"], "upstream.sse_raw"))
        elif "body" in upstream:
            reply = decode_reply(path, status, dumps(upstream["body"]))
        else:
            reply = decode_reply(path, 200, dumps(upstream if "choices" in upstream else _chat_body(upstream)))
    return calls_from_reply(reply, context, TokenBook())[0]


def _logprobs(values: JsonValue, ids: JsonValue, *, given: bool) -> JsonValue:
    """Write the log-probabilities that a short form gives, or fills in where it has ids and does not mention them."""
    numbers = values if given else [0] * len(cast(list[JsonValue], ids)) if isinstance(ids, list) else None
    if not isinstance(numbers, list):
        return None
    return {"content": [{"token": "", "logprob": number} for number in cast(list[JsonValue], numbers)]}


def _chat_body(short: Mapping[str, JsonValue]) -> JsonObject:
    """Write a short reply as a Chat Completions body."""
    ids = short.get("token_ids")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": short.get("text")},
        "finish_reason": short.get("finish_reason"),
        "token_ids": ids,
        "logprobs": _logprobs(short.get("logprobs"), ids, given="logprobs" in short),
    }
    return {
        "id": short.get("id", "case"),
        "model": short.get("model"),
        "prompt_token_ids": short.get("prompt_token_ids", _FILLED_PROMPT),
        "choices": [choice],
        "usage": short.get("usage"),
    }


def _event_stream(short: Mapping[str, JsonValue]) -> str:
    """Write short chunks as a Chat Completions event stream; it ends well unless the case says it does not."""
    events: list[JsonObject] = []
    for index, raw in enumerate(list_of(short.get("stream"), "stream")):
        chunk = object_of(raw, f"stream[{index}]")
        event: JsonObject = {"id": "case", "choices": []}
        if not index:
            event["prompt_token_ids"] = short.get("prompt_token_ids", _FILLED_PROMPT)
        if "usage" in chunk:
            event["usage"] = chunk["usage"]
        if chunk.keys() & {"delta", "token_ids", "finish_reason"}:
            ids = chunk.get("token_ids")
            choice = {"index": 0, "delta": chunk.get("delta", {}), "finish_reason": chunk.get("finish_reason")}
            if ids is not None:
                choice["token_ids"] = ids
                choice["logprobs"] = _logprobs(chunk.get("logprobs"), ids, given="logprobs" in chunk)
            event["choices"] = [choice]
        events.append(event)
    text = "".join(f"data: {dumps(event).decode()}\n\n" for event in events)
    return text if short.get("upstream_close") is not None else text + "data: [DONE]\n\n"


def _timeline(given: JsonObject) -> dict[str, Any]:
    """Replay weight updates around one call: without a word from the engine, only the window is known."""
    weights: JsonValue = None
    window: dict[str, JsonValue] = {}
    reported: JsonValue = None
    complete = False
    for index, raw in enumerate(list_of(given.get("timeline"), "timeline")):
        event = object_of(raw, f"timeline[{index}]")
        if "weights" in event:
            weights = event["weights"]
        elif "dispatch" in event:
            window["start"] = weights
        elif "complete" in event:
            window["end"], complete = weights, True
            reported = event.get("engine_reports")
        else:
            raise DecodeError("expected weights, dispatch or complete", where=f"timeline[{index}]")
    outcome: dict[str, Any] = {
        "outcome": "capture",
        "state": "usable" if complete else "incomplete",
        "reason": None if complete else "lost",
        "weight_version": window,
    }
    if reported is not None:
        outcome["weight_versions"] = reported
    return outcome
