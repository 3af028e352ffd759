"""The adapter for SGLang.

Its Chat route refuses `return_token_ids` in a stream; there the ids come at the end, under `sglext`. Its Completions
route returns them either way. The id of a request is a field of its body, `rid`, and its name for what a model thought
is `reasoning_content`, in requests too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from gristmill.gateway.continuation.renderer import Rendering
from gristmill.gateway.upstream.protocol import Ask, Capabilities, EngineKind, Support
from gristmill.gateway.upstream.routes import TOKENIZE, completions_logprobs, has_room, picked, sampling_ask
from gristmill.records import Dialect

__all__ = ["ABORT", "SERVER_INFO", "Sglang"]

JsonObject = dict[str, Any]

ABORT: Final = "/abort_request"
SERVER_INFO: Final = ("/server_info", "/get_server_info")
"""Configuration and state, the current route and that of older versions; answered by the scheduler, paused or not."""

_COUNTED: Final = (
    "model",
    "prompt",
    "add_special_tokens",
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_CHAT: Final[Mapping[bool, Mapping[str, bool]]] = {
    False: {"return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True},
    True: {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
}
"""By whether it is a stream."""


class Sglang:
    """Speaks to SGLang.

    Args:
        found: what the probe found.
    """

    def __init__(self, found: Capabilities | None = None) -> None:
        self._found = found or Capabilities(kind=EngineKind.SGLANG)

    @property
    def kind(self) -> EngineKind:
        return EngineKind.SGLANG

    def ask(self, route: Dialect, body: JsonObject, call_id: str, *, stream: bool) -> Ask:
        """Ask for ids and log-probabilities, as `Engine.ask`."""
        fields: JsonObject = {"rid": call_id}
        if route is Dialect.CHAT:
            fields |= {**_CHAT[stream], "logprobs": True, **_messages(body)}
        else:
            fields |= {"return_token_ids": True, "logprobs": completions_logprobs(body)}
        return sampling_ask(route, body, call_id, fields, stream=stream)

    def abort(self, route: Dialect, call_id: str) -> Ask | None:
        """Abort by `rid`; of several choices the engine makes ids of its own, and ignores this one."""
        return Ask(ABORT, {"rid": call_id}) if self._found.abort_by_id is not Support.NO else None

    def count(self, body: JsonObject) -> Ask:
        """Tokenise messages and tools as Chat renders them."""
        return Ask(TOKENIZE, {**picked(body, _COUNTED), **_messages(body)})

    def given(self, body: JsonObject, prompt: Sequence[int]) -> JsonObject | None:
        """Put the prompt beside the messages, which are then not rendered, once that was seen to work."""
        return {**body, "input_ids": list(prompt)} if self._found.token_in is Support.YES else None

    def fits(self, body: JsonObject, prompt_len: int) -> bool:
        """Say whether prompt and what is asked for fit together: it refuses what does not."""
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        return has_room(prompt_len, self._found.max_model_len, asked if type(asked) is int else 1)

    def render(self, asked: Rendering) -> Ask | None:
        """Render by the tokenizer's route, which goes by Chat's own rules."""
        if self._found.render is not Support.YES:
            return None
        body: JsonObject = {"model": asked.model, "messages": list(asked.messages), **asked.settings}
        if asked.tools:
            body["tools"] = list(asked.tools)
        return Ask(TOKENIZE, {**body, **_messages(body)})

    def missing(self) -> str | None:
        """Say why there are no ids."""
        if self._found.token_ids is Support.NO:
            return "not supported: asked for ids, the engine or a proxy in front of it returned none"
        return None


def _messages(body: Mapping[str, Any]) -> JsonObject:
    """Return the messages with what was thought under the engine's own name, nothing where no message differs."""
    given = body.get("messages")
    if not isinstance(given, list):
        return {}
    messages = [_message(message) for message in cast("list[Any]", given)]
    return {"messages": messages} if any(map(_is_not, messages, cast("list[Any]", given))) else {}


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    said = cast(JsonObject, message)
    thought = said.get("reasoning")
    if not isinstance(thought, str) or said.get("reasoning_content") is not None:
        return said
    kept = {name: value for name, value in said.items() if name not in {"reasoning", "reasoning_content"}}
    return {**kept, "reasoning_content": thought}


def _is_not(made: Any, given: Any) -> bool:
    return made is not given
