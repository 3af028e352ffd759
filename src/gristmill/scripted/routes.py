"""The routes that do not sample: models, tokens of a text, text of tokens, the prompt of a request; and errors.

Invariant: what they say of a request's prompt is what sampling it says.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, cast

from gristmill.scripted.asked import Asked, EngineRefused, read_chat
from gristmill.scripted.model import prompt_of_chat, prompts_of
from gristmill.scripted.script import Settings
from gristmill.scripted.tokenizer import Tokenizer, the_tokenizer

__all__ = ["detokenized", "error_body", "models_json", "rendered", "tokenized"]

JsonObject = dict[str, Any]


def error_body(refused: EngineRefused, profile: str) -> JsonObject:
    """Return the body of an error."""
    said = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.status}
    return {"object": "error", **said} if profile == "sglang" else {"error": said}


def models_json(models: Sequence[str], settings: Settings, created_s: int) -> JsonObject:
    """Return the list of models; `*` is none that has a name."""
    owner = settings.profile if settings.profile != "plain" else "scripted"
    data: list[JsonObject] = []
    for name in models:
        if name != "*":
            model: JsonObject = {"id": name, "object": "model", "created": created_s, "owned_by": owner}
            if settings.profile != "plain":
                model |= {"root": name, "parent": None, "max_model_len": settings.max_model_len}
            data.append(model)
    return {"object": "list", "data": data}


def tokenized(body: JsonObject, settings: Settings) -> JsonObject:
    """Answer `/tokenize`: a prompt, or messages and tools.

    Raises:
        EngineRefused: 400.
    """
    tokenizer = the_tokenizer()
    if "messages" in body:
        asked = read_chat({**body, "tool_choice": None}, {})
        tools = cast("list[Any]", body.get("tools") or [])
        ids = tokenizer.encode(prompt_of_chat(body, asked.messages, tools, settings))
    elif isinstance(body.get("prompt"), str):
        ids = tokenizer.encode(body["prompt"])
    else:
        raise EngineRefused(400, "expected a prompt or messages", param="prompt")
    said: JsonObject = {"count": len(ids), "max_model_len": settings.max_model_len, "tokens": ids}
    if settings.profile == "vllm":
        said["token_strs"] = _token_strs(ids, tokenizer) if body.get("return_token_strs") else None
    return said


def _token_strs(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode((token,)) for token in ids]


def detokenized(body: JsonObject, settings: Settings) -> JsonObject:
    """Answer `/detokenize`.

    Raises:
        EngineRefused: 400.
    """
    tokenizer = the_tokenizer()
    ids: Any = body.get("tokens")
    if not isinstance(ids, list):
        raise EngineRefused(400, "expected a list of token ids", param="tokens")
    for token in cast("list[Any]", ids):
        if type(token) is not int or not 0 <= token < tokenizer.size:
            raise EngineRefused(400, f"Token id {token} is out of vocabulary")
    name = "text" if settings.profile == "sglang" else "prompt"
    return {name: tokenizer.decode(cast("list[int]", ids))}


def rendered(asked: Asked, settings: Settings) -> JsonObject | list[JsonObject]:
    """Answer `/render`: the request as the engine's token route takes it; a list for Completions.

    Raises:
        EngineRefused: 400.
    """
    prompts = prompts_of(asked, settings)
    prefix = "chatcmpl-" if asked.route == "chat" else "cmpl-"
    made: list[JsonObject] = [
        {
            "request_id": f"{prefix}{uuid.uuid4().hex[:16]}",
            "token_ids": ids,
            "token_offsets": _offsets(ids) if asked.flag("return_token_offsets") else None,
            "features": None,
            "content_parts": None,
            "sampling_params": _sampling_params(asked),
            "model": asked.model,
            "reasoning_ended": False if asked.route == "chat" else None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": asked.stream,
            "stream_options": None,
            "cache_salt": None,
            "priority": 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        for ids in prompts
    ]
    return made[0] if asked.route == "chat" else made


def _sampling_params(asked: Asked) -> JsonObject:
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    said = {name: asked.body[name] for name in names if asked.body.get(name) is not None}
    said |= {"stop": list(asked.stop), "stop_token_ids": sorted(asked.stop_ids), "max_tokens": asked.max_tokens}
    if asked.logprobs is not None:
        said["logprobs"] = asked.logprobs.top
    return said


def _offsets(ids: Sequence[int]) -> list[list[int]]:
    """Return where the text of each token begins and ends, in characters."""
    tokenizer = the_tokenizer()
    offsets: list[list[int]] = []
    data = b""
    for token in ids:
        begin = len(data.decode("utf-8", "ignore"))
        data += tokenizer.bytes_of(token)
        offsets.append([begin, len(data.decode("utf-8", "ignore"))])
    return offsets
