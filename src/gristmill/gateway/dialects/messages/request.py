"""A Messages request as a Chat request.

Invariant: what is not said in the Chat request is noted, by its path, or the request is refused. What only transports
(`cache_control`, signatures) and `stream` are not noted.

`thinking` sets `chat_template_kwargs.enable_thinking`, which the client's own `chat_template_kwargs` override; a budget
of thinking tokens is noted and not sent, since engines enforce one by forcing tokens that the model did not sample.
`output_config.effort` becomes `reasoning_effort`, unless thinking is disabled. A last message of the assistant is the
beginning of the reply: the engine continues it (`continue_final_message`).

Not here: messages (conversation), tools (tools), parameters that no harness may set (parameters).
"""

from __future__ import annotations

from typing import Any, Final, cast

from gristmill.canonical import JsonNumber
from gristmill.captures.exact import plain_numbers
from gristmill.captures.fields import kind_of, name_at, object_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.messages.blocks import note_left_out, refused
from gristmill.gateway.dialects.messages.conversation import chat_messages, continues_last
from gristmill.gateway.dialects.messages.notes import Notes
from gristmill.gateway.dialects.messages.tools import chat_tools
from gristmill.gateway.front import JsonObject, RequestRefused, Translated
from gristmill.records import Dialect

__all__ = ["count_body", "translate"]

_NUMBERS: Final = ("temperature", "top_p", "top_k")
_CARRIED: Final = frozenset(
    {
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "stream",
        "thinking",
        "output_config",
        "output_format",
        "chat_template_kwargs",
        *_NUMBERS,
    }
)


def translate(body: JsonObject) -> Translated:
    """Turn a Messages request into one of the engine's Chat route.

    Raises:
        RequestRefused: `parameter_refused` for what cannot be carried over, `request_malformed` for what is not a
            Messages request.
    """
    notes = Notes()
    try:
        made = _prompt(body, notes)
        _add_sampling(made, body)
        _add_format(made, body, notes)
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise Unexpected("true or false", kind_of(stream), "$.stream")
    except Unexpected as error:
        raise _malformed(error) from error
    note_left_out(body, _CARRIED, "", notes)
    return Translated(route=Dialect.CHAT, body=made, understood=body, notes=notes.all(), stream=stream is True)


def count_body(body: JsonObject) -> JsonObject:
    """Turn a `count_tokens` request into the Chat body whose prompt is to be tokenised.

    The prompt is the one that `translate` would make of the same fields; nothing in the body samples.

    Raises:
        RequestRefused: as `translate`.
    """
    try:
        return _prompt(body, Notes())
    except Unexpected as error:
        raise _malformed(error) from error


def _malformed(error: Unexpected) -> RequestRefused:
    return RequestRefused(400, Code.REQUEST_MALFORMED, error.message, error.where)


def _prompt(body: JsonObject, notes: Notes) -> JsonObject:
    """Make the fields of the Chat request that decide what the prompt is."""
    model = name_at(body, "model", "$")
    if not model:
        raise Unexpected("the name of a model", "nothing", "$.model")
    messages = chat_messages(body, notes)
    continued = continues_last(messages, f"$.messages[{len(body['messages']) - 1}]", notes)
    if not messages:
        raise refused("expected a message to answer, got an empty one", "$.messages")
    made: JsonObject = {"model": model, "messages": messages, **chat_tools(body, notes)}
    if continued:
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    _add_thinking(made, body, notes)
    return made


def _add_thinking(made: JsonObject, body: JsonObject, notes: Notes) -> None:
    settings: JsonObject = {}
    if body.get("thinking") is not None:
        thinking = object_at(body["thinking"], "$.thinking")
        kind = name_at(thinking, "type", "$.thinking")
        if kind not in {"enabled", "disabled", "adaptive"}:
            raise Unexpected("enabled, disabled or adaptive", repr(kind)[:40], "$.thinking.type")
        note_left_out(thinking, frozenset(), "thinking", notes)
        settings["enable_thinking"] = kind != "disabled"
    if body.get("output_config") is not None:
        effort = name_at(object_at(body["output_config"], "$.output_config"), "effort", "$.output_config")
        if effort is not None and settings.get("enable_thinking", True):
            made["reasoning_effort"] = effort
        elif effort is not None:
            notes.removed("output_config.effort")
    if body.get("chat_template_kwargs") is not None:
        settings |= object_at(body["chat_template_kwargs"], "$.chat_template_kwargs")
    if settings:
        made["chat_template_kwargs"] = settings


def _add_sampling(made: JsonObject, body: JsonObject) -> None:
    limit = body.get("max_tokens")
    if type(limit) is not int or limit < 1:
        raise Unexpected("a number of tokens, at least 1", repr(limit)[:40], "$.max_tokens")
    made["max_tokens"] = limit
    for key in _NUMBERS:
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | JsonNumber):
            raise Unexpected("a number", kind_of(value), f"$.{key}")
        made[key] = plain_numbers(value, f"$.{key}")
    stops = body.get("stop_sequences")
    if stops is None:
        return
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in cast("list[Any]", stops)):
        raise Unexpected("an array of strings", kind_of(stops), "$.stop_sequences")
    if stops:
        made["stop"] = stops


def _add_format(made: JsonObject, body: JsonObject, notes: Notes) -> None:
    """Carry over the schema of the answer; `output_format` is the older place of `output_config.format`."""
    config = object_at(body.get("output_config") or {}, "$.output_config")
    note_left_out(config, frozenset({"effort", "format"}), "output_config", notes)
    given, where = config.get("format"), "$.output_config.format"
    older = body.get("output_format")
    if given is None:
        given, where = older, "$.output_format"
    elif older is not None and older != given:
        raise refused("expected one format of the answer, got two that differ", "$.output_format")
    if given is None:
        return
    answer = object_at(given, where)
    kind = name_at(answer, "type", where)
    if kind != "json_schema":
        raise refused(f"expected json_schema, got {kind!r}", f"{where}.type")
    schema = object_at(answer.get("schema"), f"{where}.schema")
    made["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
