"""The adapter for any other server that speaks Chat Completions.

A plain server may refuse fields that it does not know, so nothing is asked for that the probe did not see work: without
ids a call serves selection and exports of conversations, and its record says why it makes no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gristmill.gateway.continuation.renderer import Rendering
from gristmill.gateway.upstream.protocol import Ask, Capabilities, EngineKind, Support
from gristmill.gateway.upstream.routes import TOKENIZE, completions_logprobs, has_room, picked, sampling_ask
from gristmill.records import Dialect

__all__ = ["Generic"]

JsonObject = dict[str, Any]

_COUNTED: Final = ("model", "messages", "tools")


class Generic:
    """Speaks plain Chat Completions.

    Args:
        found: what the probe found; without it, no tokens are asked for.
    """

    def __init__(self, found: Capabilities | None = None) -> None:
        self._found = found or Capabilities(kind=EngineKind.GENERIC)

    @property
    def kind(self) -> EngineKind:
        return EngineKind.GENERIC

    def ask(self, route: Dialect, body: JsonObject, call_id: str, *, stream: bool) -> Ask:
        """Ask for ids where the probe got them, as `Engine.ask`."""
        fields: JsonObject = {}
        if self._found.token_ids is Support.YES:
            fields["return_token_ids"] = True
            if self._found.logprobs is Support.YES:
                fields["logprobs"] = True if route is Dialect.CHAT else completions_logprobs(body)
        return sampling_ask(route, body, call_id, fields, stream=stream)

    def abort(self, route: Dialect, call_id: str) -> Ask | None:
        """Return None: closing the connection is all there is."""
        return None

    def count(self, body: JsonObject) -> Ask:
        """Tokenise messages and tools, at the route that vLLM and SGLang have; others have none."""
        return Ask(TOKENIZE, picked(body, _COUNTED))

    def given(self, body: JsonObject, prompt: Sequence[int]) -> JsonObject | None:
        """Return None: prompts as ids are each engine's own."""
        return None

    def fits(self, body: JsonObject, prompt_len: int) -> bool:
        """Say whether a prompt leaves room for a token."""
        return has_room(prompt_len, self._found.max_model_len)

    def render(self, asked: Rendering) -> Ask | None:
        """Return None: no route is known."""
        return None

    def missing(self) -> str | None:
        """Say why there are no ids."""
        match self._found.token_ids:
            case Support.YES:
                return None
            case Support.NO:
                return "not supported: the engine returned no token ids when the probe asked for them"
            case Support.UNKNOWN:
                return "not requested: whether the engine takes return_token_ids has not been measured"
