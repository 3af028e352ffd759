"""The adapter for vLLM.

Its Chat and Completions routes return exact ids with log-probabilities, streamed or not. Two facts need care: with
`include_reasoning: false` it hides ids of the whole reply, and its abort by id, which answers with what was sampled,
exists only with `--enable-scale-out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gristmill.gateway.continuation.renderer import Rendering
from gristmill.gateway.continuation.template_input import template_variables
from gristmill.gateway.upstream.protocol import Ask, Capabilities, EngineKind, Support
from gristmill.gateway.upstream.routes import TOKENIZE, completions_logprobs, has_room, picked, sampling_ask
from gristmill.records import Dialect

__all__ = ["ABORT", "RENDER", "Vllm"]

JsonObject = dict[str, Any]

ABORT: Final = "/inference/v1/abort_requests"
RENDER: Final = "/v1/chat/completions/render"

_COUNTED: Final = (
    "model",
    "prompt",
    "add_special_tokens",
    "return_token_strs",
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_FLAGS: Final = ("add_generation_prompt", "continue_final_message")
# Its own id of a request: on Completions one for each prompt, of which a call has one.
_IDS: Final = {Dialect.CHAT: "chatcmpl-{}", Dialect.COMPLETIONS: "cmpl-{}-0"}


class Vllm:
    """Speaks to vLLM.

    Args:
        found: what the probe found; without it, nothing is asked for that only some versions or settings have.
    """

    def __init__(self, found: Capabilities | None = None) -> None:
        self._found = found or Capabilities(kind=EngineKind.VLLM)

    @property
    def kind(self) -> EngineKind:
        return EngineKind.VLLM

    def ask(self, route: Dialect, body: JsonObject, call_id: str, *, stream: bool) -> Ask:
        """Ask for ids and log-probabilities, as `Engine.ask`."""
        fields: JsonObject = {"return_token_ids": True}
        if route is Dialect.CHAT:
            fields |= {"logprobs": True, "include_reasoning": True}
        else:
            fields["logprobs"] = completions_logprobs(body)
        if self._found.weight_versions is Support.YES:
            fields["return_weight_versions"] = True
        return sampling_ask(route, body, call_id, fields, stream=stream)

    def abort(self, route: Dialect, call_id: str) -> Ask | None:
        """Abort by id where the engine was seen to have the route."""
        if self._found.abort_by_id is not Support.YES:
            return None
        return Ask(ABORT, {"request_ids": [_IDS[route].format(call_id)]})

    def count(self, body: JsonObject) -> Ask:
        """Tokenise messages and tools as Chat renders them."""
        return Ask(TOKENIZE, picked(body, _COUNTED))

    def given(self, body: JsonObject, prompt: Sequence[int]) -> JsonObject | None:
        """Put the prompt where disaggregated prefill puts it, once that was seen to work."""
        if self._found.token_in is not Support.YES:
            return None
        return {**body, "kv_transfer_params": {"prompt_token_ids": list(prompt)}}

    def fits(self, body: JsonObject, prompt_len: int) -> bool:
        """Say whether a prompt leaves room for a token: what is asked for beyond the room is cut."""
        return has_room(prompt_len, self._found.max_model_len)

    def render(self, asked: Rendering) -> Ask | None:
        """Render by Chat's own rules, or by the tokenizer's route, which is always there and knows fewer fields."""
        body: JsonObject = {"model": asked.model, "messages": list(asked.messages)}
        if asked.tools:
            body["tools"] = list(asked.tools)
        if self._found.render is Support.YES:
            return Ask(RENDER, {**body, **asked.settings})
        if self._found.tokenize is not Support.YES:
            return None
        variables = template_variables(asked.settings)
        for name in _FLAGS:
            body[name] = variables.pop(name)
        return Ask(TOKENIZE, {**body, **({"chat_template_kwargs": variables} if variables else {})})

    def missing(self) -> str | None:
        """Say why there are no ids."""
        if self._found.token_ids is Support.NO:
            return "not supported: asked with return_token_ids, the engine or a proxy in front of it returned no ids"
        return None
