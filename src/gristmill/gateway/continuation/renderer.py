"""What renders a conversation into prompt ids: an engine's own route, or a tokenizer of this machine.

Invariant: a rendering is a function of what is asked, so that it can be kept by its content.

Not here: the renderers (local; the engines' routes), and what renderings prove (suffix).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

__all__ = ["RenderFailed", "Renderer", "Rendering"]


class RenderFailed(Exception):
    """There is no rendering.

    Args:
        message: why.
    """

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class Rendering(msgspec.Struct, frozen=True):
    """What is rendered.

    Attributes:
        model: the engine's name of it.
        messages: of the Chat body.
        tools: of the Chat body.
        settings: what else of the Chat body reaches the template, by its name there: `chat_template_kwargs`,
            `reasoning_effort`, `documents`, `add_generation_prompt`, `continue_final_message`.
    """

    model: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None
    settings: Mapping[str, Any]


class Renderer(Protocol):
    """Renders."""

    @property
    def name(self) -> str:
        """What it is called in metrics and logs."""
        ...

    async def render(self, asked: Rendering) -> Sequence[int]:
        """Return the ids of a prompt.

        Raises:
            RenderFailed: there are none.
        """
        ...
