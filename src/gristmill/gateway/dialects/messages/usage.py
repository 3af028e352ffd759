"""Token counts of a Chat reply in the terms of the Messages dialect.

Invariant: `input_tokens` plus what the cache gave and took is the whole prompt; counts of the cache are said only where
the engine said them.
"""

from __future__ import annotations

from typing import Any, cast

from gristmill.captures.fields import count_at, object_at
from gristmill.gateway.front import JsonObject

__all__ = ["prompt_length", "usage_of_chat"]


def usage_of_chat(usage: Any) -> JsonObject:
    """Turn `usage` of a Chat reply into that of a message.

    Raises:
        Unexpected: it is not what its dialect says.
    """
    given = object_at(usage, "$.usage")
    prompt = count_at(given, "prompt_tokens", "$.usage") or 0
    made: JsonObject = {"input_tokens": prompt, "output_tokens": count_at(given, "completion_tokens", "$.usage") or 0}
    details = given.get("prompt_tokens_details")
    if details is None:
        return made
    where = "$.usage.prompt_tokens_details"
    named = {"cached_tokens": "cache_read_input_tokens", "created_cache_tokens": "cache_creation_input_tokens"}
    for key, name in named.items():
        count = count_at(object_at(details, where), key, where)
        if count is not None:
            made[name] = count
            prompt -= count
    made["input_tokens"] = max(0, prompt)
    return made


def prompt_length(reply: JsonObject) -> int | None:
    """Count the prompt of a reply, or of a stream's first chunk, from its ids or its usage; None: it does not say."""
    usage = reply.get("usage")
    if isinstance(usage, dict):
        return count_at(cast(JsonObject, usage), "prompt_tokens", "$.usage")
    ids = reply.get("prompt_token_ids")
    return len(cast("list[int]", ids)) if isinstance(ids, list) else None
