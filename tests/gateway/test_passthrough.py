"""Chunks of the engine's own dialects, with the gateway's fields taken out."""

from __future__ import annotations

from typing import Any

from gristmill.gateway.dialects.passthrough import CHAT, COMPLETIONS, PassFront
from gristmill.gateway.front import ServedNames


def _encoded(front: PassFront, body: dict[str, Any], chunk: dict[str, Any]) -> bytes:
    given = {"model": "m", "messages": [], "prompt": "p", "stream": True, **body}
    encoder = front.encoder(given, front.translate(given, lambda _: None), ServedNames("t", "m", 0))
    served = encoder.chunk(chunk)
    return served.now + served.held


def _chunk(**choice: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "finish_reason": None, **choice}]}


def test_ids_that_were_asked_for_come_without_text_too() -> None:
    # Half a character has ids and no text; a client that collects ids would miss what was sampled.
    scored = {"token_logprobs": [-1.0], "tokens": ["x"]}
    chunk = _chunk(text="", token_ids=[5], logprobs=scored)
    assert b'"token_ids":[5]' in _encoded(COMPLETIONS, {"return_token_ids": True}, chunk)
    chunk = _chunk(delta={}, token_ids=[5], logprobs={"content": [{"logprob": -1.0}]})
    assert b'"token_ids":[5]' in _encoded(CHAT, {"return_token_ids": True}, chunk)
    chunk = {**_chunk(delta={}, token_ids=None, raw_output={"x": 1}), "prompt_token_ids": [1, 2]}
    assert b'"prompt_token_ids":[1,2]' in _encoded(CHAT, {"return_token_ids": True}, chunk)


def test_what_is_left_empty_is_dropped() -> None:
    # A harness would get events that say nothing, one for each control token.
    assert _encoded(CHAT, {}, _chunk(delta={}, token_ids=[5], logprobs={"content": [{"logprob": -1.0}]})) == b""
    assert _encoded(COMPLETIONS, {}, _chunk(text="", token_ids=[5])) == b""
    assert b'"content":"x"' in _encoded(CHAT, {}, _chunk(delta={"content": "x"}, token_ids=[5]))
