"""What the engine is asked for a Responses request, and what the client is told was changed."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.dialects.responses import RESPONSES
from gristmill.gateway.front import RequestRefused
from gristmill.lineage import LineageIndex, request_digests
from gristmill.records import Dialect
from tests.gateway.dialects.responses.exchange import BODY, messages_of, no_history, streamed, translated
from tests.gateway.dialects.responses.exchange import chunk as chat_chunk

USER = {"role": "user", "content": "hi"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", **fields}


def refused(body: dict[str, Any]) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        translated(body)
    assert caught.value.status == 400
    return caught.value


# The shortest request there is.
def test_a_string_is_a_user_message() -> None:
    made = translated({"model": "m", "input": "hi", "instructions": "Be brief.", "stream": True})
    assert made.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    }
    assert (made.route, made.stream, made.choices, made.notes) == (Dialect.CHAT, True, 1, ())


# A body that is not changed must stay the one object that was decoded exactly.
def test_a_request_that_refers_to_nothing_is_understood_as_it_is() -> None:
    body = asked()
    assert translated(body).understood is body
    assert body == asked()


# A setting that is lost, or renamed wrongly, samples from another distribution than the harness asked for.
@pytest.mark.parametrize(
    ("fields", "expected", "notes"),
    [
        ({"temperature": 0, "top_p": 0.9, "top_k": 5, "seed": 1}, None, ()),
        ({"max_output_tokens": 9}, {"max_tokens": 9}, ()),
        ({"temperature": None, "max_output_tokens": None, "tools": None, "text": None, "reasoning": None}, {}, ()),
        ({"store": False, "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"}, {}, ()),
        ({"truncation": "auto"}, {}, ("removed:truncation",)),
        ({"truncation": "disabled", "background": False}, {}, ()),
        ({"client_metadata": {}, "odd, näme": 1}, {}, ("removed:client_metadata", "removed:odd_n_me")),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}, ()),
        (
            {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 3},
            ("removed:include.reasoning.encrypted_content",),
        ),
        ({"top_logprobs": 3}, {}, ("removed:top_logprobs",)),
        ({"reasoning": {"effort": "low", "summary": None}}, {"reasoning_effort": "low"}, ()),
        ({"reasoning": {"summary": "auto"}}, {}, ("removed:reasoning.summary",)),
        ({"reasoning": {"effort": "minimal"}}, {"reasoning_effort": "low"}, ("bounded:reasoning.effort",)),
        ({"reasoning": {"effort": "xhigh"}}, {"reasoning_effort": "high"}, ("bounded:reasoning.effort",)),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            ("replaced:reasoning.effort",),
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}, ("removed:text.verbosity",)),
        ({"text": {"verbosity": "low"}}, {}, ("removed:text.verbosity",)),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}, ()),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True},
                }
            },
            (),
        ),
    ],
)
def test_settings(fields: dict[str, Any], expected: dict[str, Any] | None, notes: tuple[str, ...]) -> None:
    made = translated(asked(**fields))
    rest = {key: value for key, value in made.body.items() if key not in {"model", "messages"}}
    assert rest == (fields if expected is None else expected)
    assert made.notes == notes
    assert all(note.isascii() and "," not in note for note in made.notes)


# A request that cannot be served as it is meant must be refused with the place, not served in another meaning.
@pytest.mark.parametrize(
    ("fields", "code", "where"),
    [
        ({"background": True}, Code.PARAMETER_REFUSED, "$.background"),
        ({"conversation": "conv_1"}, Code.PARAMETER_REFUSED, "$.conversation"),
        ({"prompt": {"id": "p"}}, Code.PARAMETER_REFUSED, "$.prompt"),
        ({"previous_response_id": "resp_1"}, Code.PARAMETER_REFUSED, "$.previous_response_id"),
        ({"previous_response_id": 1}, Code.REQUEST_MALFORMED, "$.previous_response_id"),
        ({"stream": 1}, Code.REQUEST_MALFORMED, "$.stream"),
        ({"top_logprobs": "3"}, Code.REQUEST_MALFORMED, "$.top_logprobs"),
        ({"input": None}, Code.REQUEST_MALFORMED, "$.input"),
        ({"input": 1}, Code.REQUEST_MALFORMED, "$.input"),
        ({"input": ["a"]}, Code.REQUEST_MALFORMED, "$.input[0]"),
        ({"instructions": ["a"]}, Code.REQUEST_MALFORMED, "$.instructions"),
        ({"include": "a"}, Code.REQUEST_MALFORMED, "$.include"),
        ({"text": "json"}, Code.REQUEST_MALFORMED, "$.text"),
        ({"text": {"format": {"type": "grammar"}}}, Code.PARAMETER_REFUSED, "$.text.format.type"),
        ({"reasoning": "low"}, Code.REQUEST_MALFORMED, "$.reasoning"),
        ({"reasoning": {"effort": 1}}, Code.REQUEST_MALFORMED, "$.reasoning.effort"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, Code.PARAMETER_REFUSED, "$.input[0].id"),
        ({"input": [{"type": "item_reference"}]}, Code.PARAMETER_REFUSED, "$.input[0].id"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], code: Code, where: str) -> None:
    error = refused(asked(**fields))
    assert (error.code, error.where) == (code, where)


# A harness that sends only what is new would have the model answer without its history, and every call be a root.
def test_an_earlier_response_is_written_out() -> None:
    output = streamed([chat_chunk({"reasoning": "so"}), chat_chunk({"content": "Hello."}, "stop")]).served["output"]
    first = {**BODY, "input": [USER]}
    history = {"resp_1": [USER, *output]}
    body = {"model": "m", "input": "And?", "previous_response_id": "resp_1", "instructions": "New."}
    made = RESPONSES.translate(body, history.get)
    assert made.body["messages"] == [
        {"role": "system", "content": "New."},
        USER,
        {"role": "assistant", "content": "Hello.", "reasoning": "so"},
        {"role": "user", "content": "And?"},
    ]
    assert made.notes == ("expanded:previous_response_id",)
    assert "previous_response_id" not in made.understood
    index = LineageIndex()
    index.add("c1", request_digests(first, output))
    assert index.parent_of(made.understood).parent_call_id == "c1"
    assert body["input"] == "And?", "the client's request stays as it is"
    with pytest.raises(RequestRefused):
        RESPONSES.translate({**body, "previous_response_id": "resp_2"}, history.get)


# An error in what was written out is in the history, not in what the client sent.
def test_a_place_in_the_history_is_named_as_such() -> None:
    body = {"model": "m", "previous_response_id": "resp_1", "input": "x"}
    with pytest.raises(RequestRefused) as caught:
        RESPONSES.translate(body, lambda _: [USER, {"type": "web_search_call"}])
    assert caught.value.where == "$.previous_response_id[1]"


# A reference that is not written out would be an item that lineage cannot read.
def test_references_to_items_are_written_out() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    reference = {"type": "item_reference", "id": "fc_1"}
    made = RESPONSES.translate(
        {"model": "m", "input": [reference, result], "previous_response_id": "r"}, lambda _: [USER, call, result]
    )
    assert made.understood["input"] == [USER, call, result, call, result]
    inside = translated({"model": "m", "input": [call, result, reference]})
    assert inside.understood["input"] == [call, result, call]
    assert "item_reference" not in str(messages_of([call, result, reference]))
    assert inside.notes == ("expanded:item_reference",)


# Clients that rely on stored responses name the items of each turn and nothing else of it.
def test_an_item_is_found_in_the_reply_that_its_id_names() -> None:
    from gristmill.gateway.dialects.responses import responses_named

    said = {"reasoning": "so", "content": "Hello."}
    output = streamed([chat_chunk(said, "stop")], {**BODY, "input": [USER]}).served["output"]
    references = [{"type": "item_reference", "id": output[0]["id"]}, {"id": output[1]["id"]}]
    body = {"model": "m", "input": [USER, *references, USER]}
    assert responses_named(body) == ("resp_0a1b2c3d",)
    made = RESPONSES.translate(body, {"resp_0a1b2c3d": [USER, *output]}.get)
    assert made.understood["input"] == [USER, *output, USER]
    assert made.body["messages"] == [USER, {"role": "assistant", "content": "Hello.", "reasoning": "so"}, USER]
    index = LineageIndex()
    index.add("c1", request_digests({"model": "m", "input": [USER]}, output))
    assert index.parent_of(made.understood).parent_call_id == "c1"
    with pytest.raises(RequestRefused):
        translated(body)
    assert responses_named({"input": "hi", "previous_response_id": "resp_1"}) == ("resp_1",)
    assert responses_named({"input": [{"type": "item_reference", "id": "msg_foreign"}, 1, {"id": 2}]}) == ()


# A history alone, without anything new, is a request too.
def test_an_earlier_response_may_stand_alone() -> None:
    made = RESPONSES.translate({"model": "m", "previous_response_id": "r"}, lambda _: [USER])
    assert made.body["messages"] == [USER]


# A stream that nobody asked for would not be read.
@pytest.mark.parametrize(("given", "expected"), [(True, True), (False, False), (None, False)])
def test_a_stream_is_made_where_it_was_asked_for(given: Any, expected: bool) -> None:
    made = RESPONSES.translate(asked(stream=given), no_history)
    assert (made.stream, "stream" in made.body) == (expected, False)
