"""What a harness may not send on: parameters that would break the capture or reach past its own call.

Invariant: a parameter that only schedules or labels is removed, with a note; one whose removal would change what the
model is asked is refused, with its path. Media are refused unless they are inline: the engine fetches nothing for a
harness.

Not here: the fields of one dialect (its front).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from gristmill.errors import Code
from gristmill.gateway.front import JsonObject, RequestRefused

__all__ = ["apply_overrides", "permitted"]

_REFUSED: Final = frozenset(
    {
        "chat_template",
        "custom_logit_processor",  # SGLang unpickles it
        "input_embeds",
        "input_ids",
        "logits_processors",
        "prompt_embeds",
        "prompt_token_ids",
    }
)
_REMOVED: Final = frozenset(
    {
        "cache_salt",
        "ec_transfer_params",
        "extra_key",
        "priority",
        "request_id",
        "rid",
        "session_id",
        "vllm_xargs",
        "custom_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "mm_processor_kwargs",
        "media_io_kwargs",
    }
)
_TOKEN_IN: Final = "kv_transfer_params"
_LORA: Final = "lora"

_MEDIA_KEYS: Final = frozenset({"image_url", "video_url", "audio_url", "file_url"})
_SEARCHED: Final = ("messages", "input", "system")


def permitted(body: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """Take out of a request what a harness may not send on.

    Returns:
        The body (the same object where nothing was removed), and a note for each removed parameter.

    Raises:
        RequestRefused: `parameter_refused`.
    """
    removed: list[str] = []
    for name in body:
        if name in _REFUSED or (name == _TOKEN_IN and _says_tokens(body[name])):
            raise RequestRefused(400, Code.PARAMETER_REFUSED, f"{name} may not be set by a harness", f"$.{name}")
        if name == "use_beam_search" and body[name]:
            raise RequestRefused(
                400, Code.PARAMETER_REFUSED, "beam search returns what the policy did not sample", f"$.{name}"
            )
        if name.startswith(_LORA):
            raise RequestRefused(400, Code.PARAMETER_REFUSED, f"{name} may not be set by a harness", f"$.{name}")
        if name in _REMOVED or name == _TOKEN_IN:
            removed.append(name)
    for key in _SEARCHED:
        for where, address in _addresses(body.get(key), f"$.{key}"):
            if not address.startswith("data:"):
                raise RequestRefused(
                    400, Code.PARAMETER_REFUSED, "media are taken inline only (a data: URL), not by address", where
                )
    if not removed:
        return body, ()
    kept = {name: value for name, value in body.items() if name not in removed}
    return kept, tuple(f"removed:{name}" for name in removed)


def _says_tokens(value: Any) -> bool:
    return isinstance(value, Mapping) and "prompt_token_ids" in value


def _addresses(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Find every address of a medium in a conversation; tool arguments and schemas are not looked into."""
    waiting: list[tuple[str, Any]] = [(where, value)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, list):
            waiting.extend((f"{place}[{index}]", each) for index, each in enumerate(cast("list[Any]", part)))
        elif isinstance(part, dict):
            holder = cast(JsonObject, part)
            for key in _MEDIA_KEYS & holder.keys():
                medium = holder[key]
                address: Any = cast(JsonObject, medium).get("url") if isinstance(medium, dict) else medium
                if isinstance(address, str):
                    yield f"{place}.{key}", address
            source = holder.get("source")
            if isinstance(source, dict) and cast(JsonObject, source).get("type") == "url":
                yield f"{place}.source.url", str(cast(JsonObject, source).get("url"))
            waiting.extend((f"{place}.{key}", holder[key]) for key in ("content", "output") if key in holder)


def apply_overrides(body: JsonObject, overrides: Mapping[str, Any]) -> tuple[JsonObject, tuple[str, ...]]:
    """Put a rollout's sampling settings over those of a translated request, with a note for each."""
    if not overrides:
        return body, ()
    changed = dict(body)
    for name, value in overrides.items():
        if name == "max_tokens":
            changed.pop("max_completion_tokens", None)
        asked = body.get(name)
        merge = name == "chat_template_kwargs" and isinstance(asked, dict)
        changed[name] = {**cast(JsonObject, asked), **value} if merge else value
    return changed, tuple(f"override:{name}" for name in overrides)
