"""Messages and tools of a Chat body as engines hand them to a chat template.

Invariant: what a template sees here is what it sees inside the engine (vLLM 0.32, as measured): content as text, or as
parts where the template reads parts; arguments parsed, `{}` where they are no JSON object; what was thought under both
its names; `developer` as `system` where the template knows no developer; nothing that a template is not given there.

Not here: the template itself (render_worker). Media: a conversation that holds any is not rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

__all__ = ["UnrenderableMessageError", "template_messages", "template_tools", "template_variables"]

JsonObject = dict[str, Any]

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_BILLING: Final = "x-anthropic-billing-header"


class UnrenderableMessageError(ValueError):
    """A message that no template is given."""


def template_messages(messages: Sequence[Any], *, parts: bool, developer: bool) -> list[JsonObject]:
    """Return messages as a template is given them; those that were given are not changed.

    Args:
        messages: of the Chat body.
        parts: the template reads content as a list of parts.
        developer: the template has a developer role.

    Raises:
        UnrenderableMessageError: a message is no object with a role, or has content that is no text.
    """
    made = [_message(message, f"messages[{at}]", parts) for at, message in enumerate(messages)]
    if developer or all(message["role"] != "developer" for message in made):
        return made
    return _one_system(
        [{**message, "role": "system"} if message["role"] == "developer" else message for message in made]
    )


def _message(given: Any, where: str, parts: bool) -> JsonObject:
    message = cast(JsonObject, given) if isinstance(given, dict) else {}
    role = message.get("role")
    if not isinstance(role, str):
        raise UnrenderableMessageError(f"{where}: expected an object with a role")
    texts = _texts(message.get("content"), where)
    if role == "system":
        texts = [kept for text in texts if (kept := _without_billing(text)) is not None]
    if not parts:
        texts = [text for text in texts if text]
    # Results are text even where the template reads parts.
    as_parts = parts and role != "tool"
    made: JsonObject = {"role": role}
    made["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            made["tool_calls"] = [_call(call, where) for call in cast("list[Any]", calls)]
        thought = message.get("reasoning")
        if thought is None:
            thought = message.get("reasoning_content")
        if thought is not None:
            made |= {"reasoning": thought, "reasoning_content": thought}
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UnrenderableMessageError(f"{where}.content: expected text or parts")
    texts: list[str] = []
    for at, part in enumerate(cast("list[Any]", content)):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = cast(JsonObject, part).get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise UnrenderableMessageError(f"{where}.content[{at}]: expected a text part, got {kind!r}")
        text = cast(JsonObject, part).get(
            "refusal" if kind == "refusal" else "thinking" if kind == "thinking" else "text"
        )
        if isinstance(text, str):
            texts.append(text)
    return texts


def _without_billing(text: str) -> str | None:
    """Take the line off that says what a request is billed as; None where nothing else was said."""
    return (text.partition("\n")[2] or None) if text.startswith(_BILLING) else text


def _call(given: Any, where: str) -> JsonObject:
    call = cast(JsonObject, given) if isinstance(given, dict) else {}
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise UnrenderableMessageError(f"{where}.tool_calls: expected calls of functions")
    return {**call, "function": {**cast(JsonObject, function), "arguments": _arguments(cast(JsonObject, function))}}


def _arguments(function: Mapping[str, Any]) -> JsonObject:
    """Read arguments; what is no JSON object becomes an empty one, as engines have it."""
    value = function.get("arguments")
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def _one_system(messages: list[JsonObject]) -> list[JsonObject]:
    """Put what the system said into one message at the start, which engines do once a developer spoke as the system."""
    said = [message for message in messages if message["role"] == "system"]
    if len(said) == 1 and messages[0]["role"] == "system":
        return messages
    texts = [_flat(message["content"]) for message in said]
    system: JsonObject = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [system, *(message for message in messages if message["role"] != "system")]


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def template_tools(tools: Sequence[Any] | None) -> list[JsonObject] | None:
    """Return tools as a template is given them: the keys that engines know, in their order; None where there are none.

    Raises:
        UnrenderableMessageError: a tool is no function.
    """
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)] if tools else None


def _tool(given: Any, where: str) -> JsonObject:
    tool = cast(JsonObject, given) if isinstance(given, dict) else {}
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UnrenderableMessageError(f"{where}: expected a function")
    said = cast(JsonObject, function)
    made: JsonObject = {name: said.get(name) for name in ("name", "description", "parameters")}
    if said.get("strict") is not None:
        made["strict"] = said["strict"]
    return {"type": "function", "function": made}


def template_variables(settings: Mapping[str, Any]) -> JsonObject:
    """Return the variables of a template beside messages and tools, by what a Chat body says.

    Args:
        settings: fields of the body. `add_generation_prompt` is true unless they say otherwise; an effort of reasoning
            also says whether there is any, where nothing else does.
    """
    given = settings.get("chat_template_kwargs")
    variables: JsonObject = dict(cast(JsonObject, given)) if isinstance(given, dict) else {}
    effort = settings.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    if settings.get("documents") is not None:
        variables["documents"] = settings["documents"]
    variables["add_generation_prompt"] = settings.get("add_generation_prompt") is not False
    variables["continue_final_message"] = settings.get("continue_final_message") is True
    return variables
