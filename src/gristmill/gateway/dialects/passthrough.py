"""Chat Completions and Completions: the engine's own dialects, passed on with the token fields taken out.

Invariant: what the client gets is what the engine said, less what the gateway asked for and the client did not, with
the response id of the gateway and the model name that was asked for. A chunk that is left empty by that is dropped.

Not here: what is asked of an engine (upstream).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec

from gristmill.captures import chat, completions
from gristmill.captures.assembly import StreamAssembly
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.front import (
    NOTHING,
    HistoryOf,
    JsonObject,
    RequestRefused,
    Served,
    ServedNames,
    Translated,
)
from gristmill.gateway.json_text import dump
from gristmill.records import Dialect

__all__ = ["CHAT", "COMPLETIONS", "PassEncoder", "PassFront", "openai_error", "without_tokens"]

_DONE: Final = b"data: [DONE]\n\n"
_ROOT_TOKENS: Final = frozenset(
    {"prompt_token_ids", "kv_transfer_params", "ec_transfer_params", "sglext", "routed_experts"}
)
_IDS: Final = frozenset({"token_ids", "prompt_token_ids"})
_CHOICE_TOKENS: Final = _IDS | {
    "response_token_ids",
    "weight_versions",
    "routed_experts",
    "raw_output",
    "meta_info",
    "sampling_mask",
}
_EXTRA: Final = "provider_specific_fields"
_EXTRA_TOKENS: Final = (
    "token_ids",
    "response_token_ids",
    "completion_token_ids",
    "output_token_ids",
    "prompt_token_ids",
)
_SAYS_SOMETHING: Final = ("text", "delta", "logprobs", "token_ids", "prompt_token_ids")
_REASONING: Final = ("reasoning", "reasoning_content")
_MOST_CHOICES: Final = 128


class _Asked(msgspec.Struct, frozen=True):
    """What the client asked for of the things that the gateway asks for anyway."""

    ids: bool
    logprobs: bool
    usage: bool
    reasoning: bool


class PassFront:
    """Serves one of the engine's own dialects.

    Args:
        dialect: `chat` or `completions`.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect: Final = dialect

    def translate(self, body: JsonObject, history_of: HistoryOf) -> Translated:
        """Check the few fields that the gateway itself depends on; everything else is the engine's to check."""
        del history_of
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise _malformed("a boolean", "stream")
        choices = body.get("n")
        if choices is None:
            choices = 1
        if type(choices) is not int or not 1 <= choices <= _MOST_CHOICES:
            raise _malformed(f"1 to {_MOST_CHOICES}", "n")
        if self.dialect is Dialect.CHAT:
            if not isinstance(body.get("messages"), list):
                raise _malformed("an array", "messages")
        else:
            choices *= _prompts(body.get("prompt"))
            if choices > _MOST_CHOICES:
                raise _malformed(f"at most {_MOST_CHOICES} choices in all", "n")
        return Translated(route=self.dialect, body=body, understood=body, choices=choices, stream=stream is True)

    def encoder(self, body: JsonObject, translated: Translated, names: ServedNames) -> PassEncoder:
        """Make the encoder of one call."""
        return PassEncoder(self.dialect, body, translated, names)

    def error(self, status: int, code: str, message: str) -> JsonObject:
        """Return an error as both dialects have it."""
        return openai_error(status, code, message)

    def replay(self, served: JsonObject) -> Iterable[bytes]:
        """Return a stream that adds up to a body: a chunk with everything, one with the finish, usage, the end."""
        head = {key: value for key, value in served.items() if key not in {"choices", "usage"}}
        if self.dialect is Dialect.CHAT:
            head["object"] = "chat.completion.chunk"
        choices = cast("list[JsonObject]", served.get("choices") or [])
        for choice in choices:
            rest = {
                key: value for key, value in choice.items() if key not in {"message", "finish_reason", "stop_reason"}
            }
            if self.dialect is Dialect.CHAT:
                rest["delta"] = _as_delta(cast(JsonObject, choice.get("message") or {}))
            yield _event({**head, "choices": [{**rest, "finish_reason": None}]})
        for choice in choices:
            last: JsonObject = {"index": choice.get("index", 0), "finish_reason": choice.get("finish_reason")}
            if "stop_reason" in choice:
                last["stop_reason"] = choice["stop_reason"]
            last["delta" if self.dialect is Dialect.CHAT else "text"] = {} if self.dialect is Dialect.CHAT else ""
            yield _event({**head, "choices": [last]})
        if served.get("usage") is not None:
            yield _event({**head, "choices": [], "usage": served["usage"]})
        yield _DONE


def _as_delta(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    numbered = [{"index": index, **call} for index, call in enumerate(cast("list[JsonObject]", calls))]
    return {**message, "tool_calls": numbered}


def _malformed(expected: str, name: str) -> RequestRefused:
    return RequestRefused(400, Code.REQUEST_MALFORMED, f"expected {expected}", f"$.{name}")


def _prompts(prompt: Any) -> int:
    """Return how many prompts a Completions request holds."""
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list):
        raise _malformed("a string, or an array of strings or token ids", "prompt")
    listed = cast("list[Any]", prompt)
    if listed and all(isinstance(each, str | list) for each in listed):
        if len(listed) > _MOST_CHOICES:
            raise _malformed(f"at most {_MOST_CHOICES} prompts", "prompt")
        return len(listed)
    return 1


def _event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


class PassEncoder:
    """Passes one reply on; it also puts it together, since both need every chunk.

    Attributes:
        assembly: what the engine has said so far, token fields included.
    """

    def __init__(self, dialect: Dialect, body: JsonObject, translated: Translated, names: ServedNames) -> None:
        options = body.get("stream_options")
        self._asked: Final = _Asked(
            ids=body.get("return_token_ids") is True,
            logprobs=bool(body.get("logprobs")) or (body.get("logprobs") == 0 and dialect is Dialect.COMPLETIONS),
            usage=isinstance(options, dict) and cast(JsonObject, options).get("include_usage") is True,
            reasoning=body.get("include_reasoning") is not False,
        )
        self._hidden: Final = _CHOICE_TOKENS - _IDS if self._asked.ids else _CHOICE_TOKENS
        self._chat: Final = dialect is Dialect.CHAT
        self._names: Final = names
        self._id: Final = ("chatcmpl-" if self._chat else "cmpl-") + names.token
        self._outstanding = translated.choices
        self._holding = False
        self._body: JsonObject | None = None
        items_of = chat.stream_items if self._chat else completions.stream_items
        self.assembly: Final = StreamAssembly(
            dialect, items_of, echo=body.get("echo") is True, slim=not self._asked.logprobs
        )

    def begin(self) -> bytes:
        """Begin with what the engine begins with."""
        return b""

    def chunk(self, chunk: JsonObject, event: str = "message") -> Served:
        """Pass a chunk on; from the one with the last choice's finish reason on it is held."""
        assembly = self.assembly
        assembly.add_chunk(chunk, event)
        if event == "sglext" or assembly.error is not None:
            return NOTHING
        removed = False if _ROOT_TOKENS.isdisjoint(chunk) else self._strip_root(chunk)
        chunk["id"] = self._id
        if "model" in chunk:
            chunk["model"] = self._names.model
        choices = cast("list[JsonObject]", chunk.get("choices") or ())
        empty = True
        for choice in choices:
            removed |= self._strip(choice)
            if choice.get("finish_reason") is not None:
                self._outstanding -= 1
                self._holding |= self._outstanding <= 0
                empty = False
            elif empty and any(choice.get(key) for key in _SAYS_SOMETHING):
                empty = False
        if not choices and "usage" in chunk:
            if not self._asked.usage:
                return NOTHING
        elif "usage" in chunk and not self._asked.usage:
            del chunk["usage"]
            removed = True
        if removed and empty and "usage" not in chunk and "prompt_token_ids" not in chunk:
            return NOTHING
        data = _event(chunk)
        return Served(b"", data) if self._holding else Served(data)

    def _strip_root(self, holder: JsonObject) -> bool:
        """Take out the token fields of a chunk or a body that are not in its choices."""
        found = [key for key in holder if key in _ROOT_TOKENS and not (self._asked.ids and key == "prompt_token_ids")]
        for key in found:
            del holder[key]
        return bool(found)

    def _strip(self, choice: JsonObject) -> bool:
        removed = False
        asked = self._asked
        if not asked.ids and "token_ids" in choice:
            removed = choice.pop("token_ids") is not None
        if not self._hidden.isdisjoint(choice):
            for key in self._hidden.intersection(choice):
                removed |= choice.pop(key) is not None
        if not asked.logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
            removed = True
        said = choice.get("delta") or choice.get("message")
        if isinstance(said, dict):
            message = cast(JsonObject, said)
            if not asked.reasoning:
                for key in _REASONING:
                    removed |= message.pop(key, None) is not None
            if _EXTRA in message:
                removed |= _strip_extra(message)
        if _EXTRA in choice:
            removed |= _strip_extra(choice)
        return removed

    def end(self) -> Served:
        """Pass the end on."""
        self.assembly.done = True
        return Served(held=_DONE)

    def body(self, body: JsonObject) -> JsonObject:
        """Pass a whole reply on.

        Raises:
            Unexpected: it has no choices.
        """
        choices = body.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in cast("list[Any]", choices)):
            raise Unexpected("an array of choices", "something else", "$.choices")
        self._strip_root(body)
        for choice in cast("list[JsonObject]", choices):
            self._strip(choice)
        body["id"] = self._id
        body["model"] = self._names.model
        self._body = body
        return body

    def failure(self, status: int, message: str) -> bytes:
        """Return an error event; no `[DONE]` follows, so that nothing looks complete."""
        return _event(openai_error(status, str(Code.CALL_FAILED), message))

    def served(self) -> JsonObject:
        """Return the body as the client got it."""
        if self._body is not None:
            return self._body
        whole = self.assembly.body()
        whole["object"] = "chat.completion" if self._chat else "text_completion"
        whole.setdefault("created", self._names.created_s)
        for choice in cast("list[JsonObject]", whole["choices"]):
            if not self._asked.logprobs:
                choice.pop("logprobs", None)
            if self._chat:
                choice.setdefault("message", {"role": "assistant", "content": None})
        return self.body(whole)


def _strip_extra(holder: JsonObject) -> bool:
    extra = holder[_EXTRA]
    if not isinstance(extra, dict) or not any(key in extra for key in _EXTRA_TOKENS):
        return False
    kept = {key: value for key, value in cast(JsonObject, extra).items() if key not in _EXTRA_TOKENS}
    if kept:
        holder[_EXTRA] = kept
    else:
        del holder[_EXTRA]
    return True


Choices = list[dict[str, msgspec.Raw]]
_ABSENT: Final = msgspec.Raw()


class _UsualRoot(msgspec.Struct, forbid_unknown_fields=True):
    """What engines put beside the choices; with no other field in it, one pass over a body is enough."""

    choices: Choices
    id: msgspec.Raw = _ABSENT
    object: msgspec.Raw = _ABSENT
    created: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    service_tier: msgspec.Raw = _ABSENT
    system_fingerprint: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    prompt_logprobs: msgspec.Raw = _ABSENT
    metrics: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    prompt_text: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    ec_transfer_params: msgspec.Raw = _ABSENT
    sglext: msgspec.Raw = _ABSENT


_usual_root = msgspec.json.Decoder(_UsualRoot)
_any_root = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_choices = msgspec.json.Decoder(Choices)


def without_tokens(body: bytes, *, logprobs: bool, ids: bool = False) -> bytes:
    """Take the long token fields out of a whole reply without decoding them.

    Returns the body itself where it is not of the usual form; then they are taken out the slow way.
    """
    try:
        root, choices = _fields(body)
    except (msgspec.DecodeError, KeyError, RecursionError):
        return body
    dropped = _CHOICE_TOKENS - _IDS if ids else _CHOICE_TOKENS
    if not logprobs:
        dropped |= {"logprobs"}
    for key in _ROOT_TOKENS & root.keys():
        if not (ids and key == "prompt_token_ids"):
            del root[key]
    kept = [{key: raw for key, raw in choice.items() if key not in dropped} for choice in choices]
    root["choices"] = msgspec.Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(root)


def _fields(body: bytes) -> tuple[dict[str, msgspec.Raw], Choices]:
    """Return the fields of a body, those of its choices apart."""
    try:
        usual = _usual_root.decode(body)
    except msgspec.ValidationError:
        root = _any_root.decode(body)
        return root, _any_choices.decode(root["choices"])
    named = ((key, getattr(usual, key)) for key in usual.__struct_fields__[1:])
    return {key: value for key, value in named if value is not _ABSENT}, usual.choices


_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def openai_error(status: int, code: str, message: str) -> JsonObject:
    """Return an error body in the shape of the OpenAI dialects."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


CHAT: Final = PassFront(Dialect.CHAT)
COMPLETIONS: Final = PassFront(Dialect.COMPLETIONS)
