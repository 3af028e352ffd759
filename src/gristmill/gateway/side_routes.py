"""Routes that sample nothing: model lists, token counts, metrics. They make no call and no record."""

from __future__ import annotations

from typing import Final, cast

from gristmill.errors import Code, DecodeError
from gristmill.gateway.asked import engine_model
from gristmill.gateway.desk import Desk
from gristmill.gateway.dialects.messages import count_body
from gristmill.gateway.front import JsonObject, RequestRefused
from gristmill.gateway.json_text import dump, parse
from gristmill.gateway.metrics import CONTENT_TYPE
from gristmill.gateway.parameters import permitted
from gristmill.gateway.request import Request
from gristmill.gateway.routes import Purpose
from gristmill.gateway.upstream.protocol import UpstreamError
from gristmill.gateway.upstream.replicas import Replica, Replicas
from gristmill.ledger import AttemptKey

__all__ = ["answer_count", "answer_metrics", "answer_models"]

_TOKENIZED: Final = (
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "return_token_strs",
)


async def answer_metrics(desk: Desk, replicas: Replicas, request: Request) -> None:
    """Answer with all counters."""
    desk.metrics.ledger_waiting.set(desk.ledger.waiting())
    for replica in replicas:
        desk.metrics.engine_up.labels(replica.label).set(replica.up)
    text = desk.metrics.text()
    length = str(len(text)).encode()
    await request.client.start(200, [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", length)])
    await request.client.end(text)


async def answer_models(desk: Desk, replicas: Replicas, request: Request) -> None:
    """Answer with the names that are served, in the shape of the dialect that asks."""
    named = [name for name in desk.config.models if name != "*"]
    names = named or sorted({model for replica in replicas for model in replica.capabilities.models})
    lengths = [replica.max_model_len for replica in replicas if replica.max_model_len is not None]
    body: JsonObject
    if "anthropic-version" in request.headers:
        body = {
            "data": [
                {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
                for name in names
            ],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    else:
        extra: JsonObject = {"max_model_len": min(lengths)} if lengths else {}
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "gristmill", **extra} for name in names]
        body = {"object": "list", "data": listed}
    await request.client.answer(200, dump(body))


async def answer_count(desk: Desk, replicas: Replicas, request: Request, key: AttemptKey) -> None:
    """Have the engine tokenise.

    Raises:
        RequestRefused: the request is none, or the engine cannot.
        CaptureError: no engine is there.
    """
    raw = await request.body(desk.config.max_body_bytes)
    try:
        parsed = parse(raw)
    except DecodeError as error:
        raise RequestRefused(400, Code.REQUEST_MALFORMED, f"expected a JSON body: {error.message}") from error
    if not isinstance(parsed, dict):
        raise RequestRefused(400, Code.REQUEST_MALFORMED, "expected a JSON object")
    body, _ = permitted(cast(JsonObject, parsed))
    counting = request.found.route.purpose is Purpose.COUNT
    wanted = body.get("model")
    known = [model for replica in replicas if replica.up for model in replica.capabilities.models]
    model = engine_model(desk.config.models, wanted if isinstance(wanted, str) else "", known)
    chat = count_body(body) if counting else {name: body[name] for name in _TOKENIZED if name in body}
    value = await _tokenised(replicas.for_attempt(key, model), {**chat, "model": model})
    count = value.get("count")
    if counting and type(count) is not int:
        raise RequestRefused(502, Code.ENGINE_UNFIT, "the engine gave no count of tokens")
    await request.client.answer(200, dump({"input_tokens": count} if counting else value))


async def _tokenised(replica: Replica, body: JsonObject) -> JsonObject:
    try:
        upstream = await replica.open(replica.engine.count(body))
        try:
            answer = await upstream.read()
        finally:
            await upstream.close()
        value = parse(answer) if upstream.status < 300 else None
    except (UpstreamError, DecodeError) as error:
        raise RequestRefused(502, Code.ENGINE_UNREACHABLE, "the engine could not be asked to tokenise") from error
    if not isinstance(value, dict):
        status = upstream.status if 400 <= upstream.status < 500 and upstream.status not in {401, 403} else 502
        raise RequestRefused(
            status, Code.REQUEST_MALFORMED, f"the engine answered status {upstream.status} when asked to tokenise"
        )
    return cast(JsonObject, value)
