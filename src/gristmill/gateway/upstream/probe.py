"""What an engine returns when it samples, found out by asking it.

Invariant: everything is measured on this engine, now; what could not be measured is `unknown`, and whatever went wrong
is a finding. Nothing is changed: requests are tiny, and none is aborted but a probe's own.

Not here: what an engine says of itself (identity), how a reply is read (captures).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

import msgspec

from gristmill.captures import Reply, ReplyChoice, decode_reply
from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.client import Client
from gristmill.gateway.upstream.identity import Identity, identify
from gristmill.gateway.upstream.protocol import Capabilities, EngineKind, Support, UpstreamError
from gristmill.gateway.upstream.spec import UpstreamSpec
from gristmill.records import Dialect

__all__ = ["capabilities_of", "measure", "probe"]

JsonObject = dict[str, Any]

_QUESTION: Final[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}


def capabilities_of(identity: Identity, spec: UpstreamSpec) -> Capabilities:
    """Return what is known of an engine that was only asked what it is."""
    return Capabilities(
        kind=identity.kind,
        version=identity.version,
        models=identity.models,
        max_model_len=identity.max_model_len(spec.models[0] if spec.models else None),
    )


async def probe(client: Client, spec: UpstreamSpec, timeout_s: float) -> Capabilities:
    """Find out what an engine is and what it returns."""
    try:
        identity = await identify(client, spec, timeout_s)
    except UpstreamError as error:
        return Capabilities(kind=spec.kind or EngineKind.GENERIC, notes=(f"unreachable: {error.message}",))
    return await measure(client, spec, identity, timeout_s)


async def measure(client: Client, spec: UpstreamSpec, identity: Identity, timeout_s: float) -> Capabilities:
    """Find out what an engine returns when it samples."""
    found = capabilities_of(identity, spec)
    model = spec.models[0] if spec.models else next(iter(identity.models), None)
    if model is None:
        return msgspec.structs.replace(found, notes=("the engine lists no model, so that nothing was sampled",))
    # Everything is asked for, as of an engine that was seen to have it.
    asking = engine_for(msgspec.structs.replace(found, token_ids=Support.YES, logprobs=Support.YES))
    call_id = f"probe-{uuid4().hex}"
    try:
        ask = asking.ask(Dialect.CHAT, {"model": model, **_QUESTION}, call_id, stream=False)
        answer = await client.answer(spec, ask, timeout_s)
    except UpstreamError as error:
        return msgspec.structs.replace(found, notes=(error.message,))
    reply = decode_reply("chat", answer.status, answer.body)
    return msgspec.structs.replace(found, **_support(reply))


def _support(reply: Reply) -> dict[str, Support]:
    if reply.error is not None:
        return {}
    choice: ReplyChoice = reply.choices[0]
    return {
        "prompt_ids": _said(choice.prompt_ids),
        "token_ids": _said(choice.token_ids),
        "logprobs": _said(choice.logprobs),
    }


def _said(values: Any) -> Support:
    return Support.YES if values else Support.NO
