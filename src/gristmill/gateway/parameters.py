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
from gristmill.gateway.config import CONTINUE
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
        "session_params",  # SGLang: another session's tokens
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
        "routed_dp_rank",
        "routing_key",
        "session_id",
        "vllm_xargs",
        "custom_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "mm_processor_kwargs",
        "media_io_kwargs",
    }
)
_TOKEN_IN: Final = "kv_transfer_params"
_LORA: Final = "lora"

_TEMPLATE_REFUSED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
    }
)
"""Arguments of a template's renderer, as opposed to variables of the template."""
_EMBEDDED: Final = frozenset({"audio_embeds", "image_embeds", "prompt_embeds", "video_embeds"})
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
    _check_template(body.get("chat_template_kwargs"))
    for key in _SEARCHED:
        for where, part in _parts(body.get(key), f"$.{key}"):
            _check_part(where, part)
    if not removed:
        return body, ()
    kept = {name: value for name, value in body.items() if name not in removed}
    return kept, tuple(f"removed:{name}" for name in removed)


def _says_tokens(value: Any) -> bool:
    return isinstance(value, Mapping) and "prompt_token_ids" in value


def _refuse(message: str, where: str) -> RequestRefused:
    return RequestRefused(400, Code.PARAMETER_REFUSED, message, where)


def _check_template(given: Any) -> None:
    """Let through what switches a template (`enable_thinking`), not what replaces it or what it renders."""
    if given is None:
        return
    if not isinstance(given, dict):
        raise RequestRefused(400, Code.REQUEST_MALFORMED, "expected an object", "$.chat_template_kwargs")
    for name, value in cast(JsonObject, given).items():
        if name in _TEMPLATE_REFUSED or not isinstance(value, str | int | float | bool | None):
            raise _refuse("only switches of the template may be set by a harness", f"$.chat_template_kwargs.{name}")


def _parts(value: Any, where: str) -> Iterator[tuple[str, JsonObject]]:
    """Find every object of a conversation; tool arguments and schemas are not looked into."""
    waiting: list[tuple[str, Any]] = [(where, value)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, list):
            waiting.extend((f"{place}[{index}]", each) for index, each in enumerate(cast("list[Any]", part)))
        elif isinstance(part, dict):
            holder = cast(JsonObject, part)
            yield place, holder
            waiting.extend((f"{place}.{key}", holder[key]) for key in ("content", "output") if key in holder)


def _check_part(where: str, part: JsonObject) -> None:
    """Refuse media that an engine would have to fetch, unpack or look up."""
    kind = part.get("type")
    if (isinstance(kind, str) and kind in _EMBEDDED) or _EMBEDDED & part.keys():
        raise _refuse("embeddings may not be set by a harness", where)
    media = _MEDIA_KEYS & part.keys()
    for key in media:
        medium = part[key]
        address: Any = cast(JsonObject, medium).get("url") if isinstance(medium, dict) else medium
        if isinstance(address, str) and not address.startswith("data:"):
            raise _refuse("media are taken inline only (a data: URL), not by address", f"{where}.{key}")
    if (media or "input_audio" in part) and part.get("uuid") is not None:
        raise _refuse("media may not be named by a harness", f"{where}.uuid")
    source = part.get("source")
    if isinstance(source, dict) and cast(JsonObject, source).get("type") == "url":
        raise _refuse("media are taken inline only (a data: URL), not by address", f"{where}.source.url")


def apply_overrides(body: JsonObject, overrides: Mapping[str, Any]) -> tuple[JsonObject, tuple[str, ...]]:
    """Put a rollout's sampling settings over those of a translated request, with a note for each."""
    sampling = {name: value for name, value in overrides.items() if name != CONTINUE}
    if not sampling:
        return body, ()
    changed = dict(body)
    for name, value in sampling.items():
        if name == "max_tokens":
            changed.pop("max_completion_tokens", None)
        asked = body.get(name)
        merge = name == "chat_template_kwargs" and isinstance(asked, dict)
        changed[name] = {**cast(JsonObject, asked), **value} if merge else value
    return changed, tuple(f"override:{name}" for name in sampling)
