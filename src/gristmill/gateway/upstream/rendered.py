"""Reads the answer of a route that renders: vLLM's render route says `token_ids`, the tokenizers' routes `tokens`."""

from __future__ import annotations

import msgspec

__all__ = ["rendered_ids"]


class _Rendered(msgspec.Struct):
    token_ids: list[int] | None = None
    tokens: list[int] | None = None


_decode = msgspec.json.Decoder(_Rendered).decode


def rendered_ids(status: int, body: bytes) -> list[int] | None:
    """Return the ids of a rendered prompt, None where the answer holds none."""
    if status != 200:
        return None
    try:
        said = _decode(body)
    except msgspec.DecodeError:
        return None
    return said.tokens if said.token_ids is None else said.token_ids
