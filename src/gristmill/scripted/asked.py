"""A request to the scripted engine, read: what conditions look at and what sampling needs.

Invariant: a request that the engine would refuse is refused here, with its status and its words.

Not here: which reply it gets (choice), the prompt's tokens (template).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec
import orjson

__all__ = ["Asked", "EngineRefused", "Logprobs", "Tool", "read_chat", "read_completions", "text_of"]

JsonObject = dict[str, Any]

MAX_LOGPROBS: Final = 20
_UNCOUNTED: Final = frozenset(
    {
        "include_reasoning",
        "logprobs",
        "metadata",
        "request_id",
        "return_meta_info",
        "return_prompt_token_ids",
        "return_token_ids",
        "return_weight_versions",
        "rid",
        "stream",
        "stream_options",
        "user",
    }
)
"""Fields in which a repeated request may differ from the first: a gateway asks for more once it knows the engine."""


class EngineRefused(Exception):
    """A request that the engine answers with an error: HTTP status, words, and the parameter."""

    def __init__(self, status: int, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or {404: "NotFoundError", 403: "PermissionDeniedError"}.get(status, "BadRequestError")
        super().__init__(message)


class Tool(NamedTuple):
    """A tool that the request offers: its name and the schema of its arguments."""

    name: str
    schema: JsonObject


class Logprobs(NamedTuple):
    """How many log-probabilities are asked for at each position, and how their tokens are written."""

    top: int
    as_ids: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One request that samples.

    Attributes:
        route: `chat` or `completions`.
        body: the decoded body; not changed.
        headers: header fields, names in lower case.
        messages: of Chat, else empty.
        prompts: of Completions, else empty.
        tools: offered tools.
        choice: `auto`, `none`, `required` or `named`; `auto` without tools too.
        named: the tool that must be called.
        format_schema: the schema of the JSON that is asked for, empty for any; None where text is.
        logprobs: None where none are asked for.
    """

    route: Literal["chat", "completions"]
    body: JsonObject
    headers: Mapping[str, str]
    messages: Sequence[JsonObject] = ()
    prompts: Sequence[str | list[int]] = ()
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    named: str | None = None
    format_schema: JsonObject | None = None
    logprobs: Logprobs | None = None
    model: str = ""
    stream: bool = False
    n: int = 1
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()

    @cached_property
    def turn(self) -> int:
        """How many assistant messages there are."""
        return sum(message.get("role") == "assistant" for message in self.messages)

    @cached_property
    def step(self) -> int:
        """How many assistant messages follow the last user message."""
        count = 0
        for message in reversed(self.messages):
            if message.get("role") == "user":
                break
            count += message.get("role") == "assistant"
        return count

    def last_text(self, role: str) -> str:
        """Return the text of the last message of a role, empty where there is none."""
        return next((text_of(each) for each in reversed(self.messages) if each.get("role") == role), "")

    @cached_property
    def user(self) -> str:
        return self.last_text("user")

    @cached_property
    def tool(self) -> str:
        return self.last_text("tool")

    @cached_property
    def last(self) -> str:
        """The text of the last message, or the prompt."""
        return text_of(self.messages[-1]) if self.messages else self.prompt

    @cached_property
    def first_user(self) -> str:
        return next((text_of(each) for each in self.messages if each.get("role") == "user"), "")

    @cached_property
    def system(self) -> str:
        """All system and developer text."""
        return "\n".join(text_of(each) for each in self.messages if each.get("role") in ("system", "developer"))

    @cached_property
    def prompt(self) -> str:
        return "\n".join(prompt for prompt in self.prompts if isinstance(prompt, str))

    @cached_property
    def everything(self) -> str:
        """The text of all messages, or the prompt."""
        return "\n".join(map(text_of, self.messages)) if self.messages else self.prompt

    @cached_property
    def digest(self) -> str:
        """What two requests share of which the second repeats the first."""
        counted = {key: value for key, value in self.body.items() if key not in _UNCOUNTED}
        return hashlib.blake2b(orjson.dumps(counted, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()

    @property
    def thinking(self) -> bool:
        """Whether the request leaves thinking on, if the model thinks at all."""
        settings = self.body.get("chat_template_kwargs")
        return not (isinstance(settings, dict) and cast(JsonObject, settings).get("enable_thinking") is False)

    @property
    def stream_options(self) -> JsonObject:
        """What the request says about its stream; empty where it says nothing."""
        options: Any = self.body.get("stream_options")
        return cast(JsonObject, options) if isinstance(options, dict) else {}

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field."""
        value = self.body.get(name)
        return default if value is None else bool(value)


def text_of(message: JsonObject) -> str:
    """Return a message's text; parts are joined by line ends, those without text are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = cast(JsonObject, part).get("text")
            if isinstance(text, str):
                texts.append(text)
    return "\n".join(texts)


def read_chat(body: JsonObject, headers: Mapping[str, str]) -> Asked:
    """Read the body of a Chat request.

    Raises:
        EngineRefused: 400.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _invalid("list_type", "messages", "Input should be a valid list", messages)
    listed = cast("list[Any]", messages)
    if not listed:
        raise EngineRefused(400, "At least one message is required", param="messages")
    for at, message in enumerate(listed):
        if not isinstance(message, dict) or not isinstance(cast(JsonObject, message).get("role"), str):
            raise _invalid("dict_type", f"messages.{at}", "Input should be a message with a role", message)
    tools = tuple(_tools(body))
    choice, named = _tool_choice(body, tools)
    wanted: Logprobs | None = None
    if body.get("logprobs"):
        wanted = _logprobs(body, body.get("top_logprobs") or 0)
    limit = body.get("max_completion_tokens")
    return Asked(
        route="chat",
        body=body,
        headers=headers,
        messages=cast("list[JsonObject]", listed),
        tools=tools,
        choice=choice,
        named=named,
        format_schema=_format_schema(body),
        logprobs=wanted,
        max_tokens=_max_tokens(body, body.get("max_tokens") if limit is None else limit, 1),
        **_common(body),
    )


def read_completions(body: JsonObject, headers: Mapping[str, str]) -> Asked:
    """Read the body of a Completions request.

    Raises:
        EngineRefused: 400.
    """
    given = body.get("prompt")
    prompts: list[Any] = [given]
    if isinstance(given, list) and given and not isinstance(cast("list[Any]", given)[0], int):
        prompts = cast("list[Any]", given)
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(token) is int for token in cast("list[Any]", prompt))
        if not prompt or not (isinstance(prompt, str) or ids):
            raise EngineRefused(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    wanted = None if body.get("logprobs") is None else _logprobs(body, body["logprobs"])
    limit = body.get("max_tokens")
    return Asked(
        route="completions",
        body=body,
        headers=headers,
        prompts=prompts,
        format_schema=_format_schema(body),
        logprobs=wanted,
        max_tokens=_max_tokens(body, 16 if limit is None else limit, 0),
        **_common(body),
    )


def _common(body: JsonObject) -> dict[str, Any]:
    stop = body.get("stop") or ()
    n = body.get("n")
    n = 1 if n is None else n
    if type(n) is not int or not 1 <= n <= 128:
        raise EngineRefused(400, f"n must be between 1 and 128, got {n}.", param="n")
    return {
        "model": body.get("model") or "",
        "stream": bool(body.get("stream")),
        "n": n,
        "seed": body["seed"] if type(body.get("seed")) is int else 0,
        "stop": (stop,) if isinstance(stop, str) else tuple(cast("list[str]", stop)),
        "stop_ids": frozenset(cast("list[int]", body.get("stop_token_ids") or ())),
    }


def _logprobs(body: JsonObject, top: Any) -> Logprobs:
    if type(top) is not int or top < 0:
        raise EngineRefused(400, f"top_logprobs must be non-negative, got {top!r}.", param="top_logprobs")
    if top > MAX_LOGPROBS:
        raise EngineRefused(
            400,
            f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_LOGPROBS} "
            f"(parameter=logprobs, value={top})",
            param="logprobs",
        )
    return Logprobs(top, bool(body.get("return_tokens_as_token_ids")))


def _max_tokens(body: JsonObject, limit: Any, least: int) -> int | None:
    if limit is None:
        return None
    if type(limit) is not int or limit < least:
        raise EngineRefused(400, f"max_tokens must be at least {least}, got {limit!r}.", param="max_tokens")
    return max(1, limit)


def _tools(body: JsonObject) -> list[Tool]:
    found: list[Tool] = []
    for at, given in enumerate(cast("list[Any]", body.get("tools") or [])):
        function = cast(JsonObject, given).get("function") if isinstance(given, dict) else None
        name = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise _invalid("missing", f"tools.{at}.function.name", "Field required", given)
        schema = cast(JsonObject, function).get("parameters")
        found.append(Tool(name, cast(JsonObject, schema) if isinstance(schema, dict) else {}))
    return found


def _tool_choice(
    body: JsonObject, tools: Sequence[Tool]
) -> tuple[Literal["auto", "none", "required", "named"], str | None]:
    given = body.get("tool_choice")
    if isinstance(given, dict):
        function = cast(JsonObject, given).get("function")
        name = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
        if not any(tool.name == name for tool in tools):
            raise EngineRefused(400, "The tool specified in `tool_choice` does not match any of the specified `tools`")
        return "named", cast(str, name)
    if given in ("required", "none"):
        if given == "required" and not tools:
            raise EngineRefused(400, "When using `tool_choice`, `tools` must be set.")
        return given, None
    if given not in (None, "auto"):
        raise EngineRefused(400, f"Invalid value for `tool_choice`: {given!r}", param="tool_choice")
    return "auto", None


def _format_schema(body: JsonObject) -> JsonObject | None:
    given: Any = body.get("response_format")
    if isinstance(given, dict):
        kind = cast(JsonObject, given).get("type")
        if kind == "json_object":
            return {}
        if kind == "json_schema":
            holder: Any = cast(JsonObject, given).get("json_schema")
            schema: Any = cast(JsonObject, holder).get("schema") if isinstance(holder, dict) else None
            return cast(JsonObject, schema) if isinstance(schema, dict) else {}
    outputs: Any = body.get("structured_outputs")
    schema = cast(JsonObject, outputs).get("json") if isinstance(outputs, dict) else body.get("guided_json")
    return cast(JsonObject, schema) if isinstance(schema, dict) else None


def _invalid(kind: str, place: str, message: str, given: Any) -> EngineRefused:
    words = (
        f"1 validation error:\n  {{'type': '{kind}', 'loc': 'body.{place}', 'msg': '{message}', 'input': {given!r}}}"
    )
    return EngineRefused(400, words[:2000], param=f"body.{place}", kind="Bad Request")
