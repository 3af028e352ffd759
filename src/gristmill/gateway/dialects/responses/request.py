"""A Responses request as a Chat request.

Invariant: every field is translated, echoed, noted as removed or refused; none goes to the engine unknown.

Not here: items (conversation), references (referred), tools (tools), what no dialect may send (gateway.parameters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gristmill.captures.fields import count_at, kind_of, list_at, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.responses.conversation import Conversation
from gristmill.gateway.dialects.responses.referred import referred
from gristmill.gateway.dialects.responses.tools import Choice, Tools, choice_of, noted, tools_of
from gristmill.gateway.front import HistoryOf, JsonObject, RequestRefused, Translated
from gristmill.records import Dialect

__all__ = ["LOGPROBS", "translate", "wants_logprobs"]

LOGPROBS: Final = "message.output_text.logprobs"

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
)
"""Sampling fields that the engine's Responses and Chat routes share."""

_TRANSLATED: Final = frozenset(
    {
        "model",
        "input",
        "instructions",
        "stream",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "include",
        "text",
        "reasoning",
        "max_output_tokens",
        "top_logprobs",
        "previous_response_id",
        "truncation",
        *_SAMPLING,
    }
)
_ECHOED: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Fields that say nothing to the engine and change nothing of the reply."""

_REFUSED: Final[Mapping[str, str]] = {
    "background": "a response cannot be made in the background",
    "conversation": "conversations are not kept; send the items, or previous_response_id",
    "prompt": "prompt templates are not kept; send the items",
}
_EFFORTS: Final[Mapping[str, str]] = {"minimal": "low", "low": "low", "medium": "medium", "high": "high"}
_HIGHEST: Final = "high"


def translate(body: JsonObject, history_of: HistoryOf) -> Translated:
    """Turn a Responses request into a Chat request.

    Raises:
        RequestRefused: `parameter_refused` or `request_malformed`, with the JSON path.
    """
    try:
        return _translate(body, history_of)
    except Unexpected as error:
        raise RequestRefused(400, Code.REQUEST_MALFORMED, error.message, error.where) from error


def wants_logprobs(body: JsonObject) -> bool:
    """Tell whether the client asked for the log-probabilities of what it reads."""
    return LOGPROBS in (list_at(body, "include", "$") or ())


def _translate(body: JsonObject, history_of: HistoryOf) -> Translated:
    for name, why in _REFUSED.items():
        if body.get(name) not in (None, False):
            raise RequestRefused(400, Code.PARAMETER_REFUSED, why, f"$.{name}")
    notes = [
        f"removed:{noted(name)}"
        for name, value in body.items()
        if value is not None and name not in _TRANSLATED and name not in _ECHOED and name not in _REFUSED
    ]
    written = referred(body, history_of)
    conversation = Conversation(text_at(body, "instructions", "$"))
    for item, where in written.items:
        conversation.add(item, where)
    tools = tools_of(body)
    choice = choice_of(body, tools)
    messages = conversation.finished()
    chat: JsonObject = {"model": body.get("model"), "messages": messages, **_tools(body, tools, choice)}
    notes += [*written.notes, *conversation.notes, *tools.notes, *choice.notes]
    notes += _settings(body, chat)
    return Translated(
        route=Dialect.CHAT,
        body=chat,
        understood=written.understood,
        notes=tuple(dict.fromkeys(notes)),
        stream=_stream(body),
    )


def _stream(body: JsonObject) -> bool:
    stream = body.get("stream")
    if stream is None or isinstance(stream, bool):
        return stream is True
    raise Unexpected("a boolean", kind_of(stream), "$.stream")


# Settings


def _tools(body: JsonObject, tools: Tools, choice: Choice) -> JsonObject:
    offered = [tool for name, tool in tools.chat.items() if choice.allowed is None or name in choice.allowed]
    if not offered:
        if choice.tool_choice == "required":
            message = "a tool must be called, and none can be offered"
            raise RequestRefused(400, Code.PARAMETER_REFUSED, message, "$.tool_choice")
        return {}
    made: JsonObject = {"tools": offered}
    if choice.tool_choice is not None:
        made["tool_choice"] = choice.tool_choice
    parallel = body.get("parallel_tool_calls")
    return made if parallel is None else {**made, "parallel_tool_calls": parallel}


def _settings(body: JsonObject, chat: JsonObject) -> list[str]:
    """Add the settings to a Chat request; returns the notes."""
    chat.update((name, body[name]) for name in _SAMPLING if body.get(name) is not None)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    notes = [*_included(body, chat), *_text(body, chat), *_reasoning(body, chat)]
    if body.get("truncation") not in (None, "disabled"):
        notes.append("removed:truncation")
    return notes


def _included(body: JsonObject, chat: JsonObject) -> list[str]:
    asked, alternatives = wants_logprobs(body), count_at(body, "top_logprobs", "$")
    if asked:
        chat["logprobs"] = True
        if alternatives is not None:
            chat["top_logprobs"] = alternatives
    notes = [f"removed:include.{noted(str(name))}" for name in body.get("include") or () if name != LOGPROBS]
    if alternatives and not asked:
        notes.append("removed:top_logprobs")
    return notes


def _text(body: JsonObject, chat: JsonObject) -> list[str]:
    where = "$.text"
    if body.get("text") is None:
        return []
    text = object_at(body["text"], where)
    notes = [f"removed:text.{noted(name)}" for name, value in text.items() if name != "format" and value is not None]
    if text.get("format") is None:
        return notes
    form = object_at(text["format"], f"{where}.format")
    kind = text_at(form, "type", f"{where}.format")
    if kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        chat["response_format"] = {"type": kind, "json_schema": schema}
    elif kind != "text":
        message = "expected a format of type text, json_object or json_schema"
        raise RequestRefused(400, Code.PARAMETER_REFUSED, message, f"{where}.format.type")
    return notes


def _reasoning(body: JsonObject, chat: JsonObject) -> list[str]:
    where = "$.reasoning"
    if body.get("reasoning") is None:
        return []
    reasoning = object_at(body["reasoning"], where)
    notes = [
        f"removed:reasoning.{noted(name)}" for name in reasoning if name != "effort" and reasoning[name] is not None
    ]
    effort = text_at(reasoning, "effort", where)
    if effort is None:
        return notes
    if effort == "none":
        # There is no effort of nothing in Chat; templates that think can be told not to.
        asked: Any = chat.get("chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": False, **object_at(asked, "$.chat_template_kwargs")}
        return [*notes, "replaced:reasoning.effort"]
    chat["reasoning_effort"] = _EFFORTS.get(effort, _HIGHEST)
    return notes if chat["reasoning_effort"] == effort else [*notes, "bounded:reasoning.effort"]
