"""Chat replies as vLLM writes them, and as a server without token ids does.

Invariant: fields stand where vLLM 0.32 was seen to put them. Prompt ids at the top, once for each choice of a stream
and in its first chunk; sampled ids in the choice; a chunk may hold several ids or none, and ids without text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gristmill.scripted.answer import Answer, Chunk, VersionSpan, chunks_of
from gristmill.scripted.asked import Logprobs
from gristmill.scripted.generation import Choice, Generation
from gristmill.scripted.parsing import CallPiece, Delta
from gristmill.scripted.script import Wrong
from gristmill.scripted.token_json import chat_logprobs, prompt_logprobs
from gristmill.scripted.wire import Sent, dumps, fingerprint, logprob_salt, metrics, usage

__all__ = [
    "PlainChat",
    "Tails",
    "VllmChat",
    "call_json",
    "joined",
    "shown_ids",
    "shown_prompt",
    "wants_usage",
    "whole_calls",
]

JsonObject = dict[str, Any]

_CALL_MARK: Final = b"@call-id-of-gristmill@"
_MARK_TEXT: Final = _CALL_MARK.decode()
_CACHED: Final = 512


def call_key(answer: Answer, index: int) -> str:
    """Return what the ids of a choice's calls are made of: they differ from turn to turn, and not from run to run."""
    digest = hashlib.blake2b(digest_size=5)
    for prompt in answer.prompts:
        digest.update(array("q", prompt))
    digest.update(f"{index},{answer.asked.seed}".encode())
    return digest.hexdigest()


def shown_ids(ids: Sequence[int], wrong: Wrong) -> list[int] | None:
    """Return sampled ids as they are served: wrongly, where the script says so."""
    match wrong.token_ids:
        case "missing":
            return None
        case "short":
            return list(ids[:-1])
        case "long":
            return [*ids, *ids[-1:]]
        case _:
            return list(ids)


def shown_prompt(ids: Sequence[int], wrong: Wrong) -> Sequence[int] | None:
    """Return prompt ids as they are served."""
    if wrong.prompt_ids == "missing":
        return None
    return [*ids[:-1], (ids[-1] + 1) % 256] if wrong.prompt_ids == "differ" and ids else ids


def joined(deltas: Sequence[Delta]) -> Delta:
    """Add up what several ids add to a message; the arguments of one call come together."""
    if len(deltas) == 1:
        return deltas[0]
    calls: list[CallPiece] = []
    for piece in (piece for delta in deltas for piece in delta.calls):
        before = calls[-1] if calls else None
        if before is not None and before.number == piece.number and before.arguments is not None and not piece.name:
            calls[-1] = before._replace(arguments=before.arguments + (piece.arguments or ""))
        else:
            calls.append(piece)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return Delta(reasoning, "".join(delta.content for delta in deltas), tuple(calls))


def call_json(piece: CallPiece, prefix: str) -> JsonObject:
    """Return a piece of a call as a stream's delta holds it."""
    if piece.name is None:
        return {"index": piece.number, "function": {"arguments": piece.arguments}}
    return {
        "id": f"{prefix}{_MARK_TEXT}{piece.number:02x}",
        "type": "function",
        "index": piece.number,
        "function": {"name": piece.name},
    }


class Tails(NamedTuple):
    """Encoded chunks of a choice, the same for every reply with this generation.

    Attributes:
        tails: one for each chunk, None where nothing is sent.
        marked: which of them hold marks in place of the ids of calls.
    """

    tails: tuple[bytes | None, ...]
    marked: tuple[int, ...]

    @classmethod
    def of(cls, tails: Sequence[bytes | None]) -> Tails:
        """Find the marks."""
        return cls(tuple(tails), tuple(at for at, tail in enumerate(tails) if tail and _CALL_MARK in tail))

    def with_call_ids(self, answer: Answer, index: int) -> Sequence[bytes | None]:
        """Return the tails with the ids of this reply's calls."""
        if not self.marked:
            return self.tails
        key, written = call_key(answer, index).encode(), list(self.tails)
        for at in self.marked:
            written[at] = (written[at] or b"").replace(_CALL_MARK, key)
        return written


class _Style(NamedTuple):
    """What a request makes of the chunks of a choice.

    Attributes:
        wanted: log-probabilities that are served, None for none.
        salt: of their values.
        ids: sampled ids are asked for.
        reasoning: reasoning is served; without it vLLM takes ids and log-probabilities away too.
        wrong: what is said wrongly.
        versions: weight versions, where they are asked for.
        fingerprint: stands in the last chunk where no token counts follow.
        plain: a server without ids: reasoning under another name, no stop reason.
    """

    wanted: Logprobs | None
    salt: int
    ids: bool
    reasoning: bool
    wrong: Wrong
    versions: tuple[VersionSpan, ...] = ()
    fingerprint: str | None = None
    plain: bool = False


class VllmChat:
    """vLLM's Chat route."""

    chunk_object = "chat.completion.chunk"

    def opening(self, answer: Answer) -> list[bytes]:
        chunks = [role_chunk(choice) for choice in answer.choices]
        if answer.asked.flag("return_token_ids"):
            for chunk in chunks:
                chunk["prompt_token_ids"] = shown_prompt(answer.prompts[0], answer.wrong)
                chunk["prompt_text"] = None
        return [dumps(chunk)[1:] for chunk in chunks]

    def tails(self, answer: Answer, choice: Choice) -> Sequence[bytes | None]:
        versions = answer.versions(len(choice.generation.sampled.ids))
        last = choice is answer.choices[-1]
        style = _Style(
            wanted=_served_logprobs(answer),
            salt=logprob_salt(answer),
            ids=answer.asked.flag("return_token_ids"),
            reasoning=answer.asked.flag("include_reasoning", True),
            wrong=answer.wrong,
            versions=tuple(versions) if answer.asked.flag("return_weight_versions") else (),
            fingerprint=fingerprint(answer) if last and not wants_usage(answer) else None,
        )
        tails = _tails(choice.generation, choice.number, chunks_of(answer, choice), style)
        return tails.with_call_ids(answer, choice.number)

    def aborted(self, answer: Answer, choice: Choice) -> bytes:
        ended = {**_ended(choice), "finish_reason": "abort", "stop_reason": None}
        if answer.asked.flag("return_token_ids"):
            ended["token_ids"] = []
        chunk: JsonObject = {"choices": [ended]}
        if not wants_usage(answer):
            chunk["system_fingerprint"] = fingerprint(answer)
        return dumps(chunk)[1:]

    def closing(self, answer: Answer, sent: Sent) -> list[bytes]:
        if not wants_usage(answer):
            return []
        counts: JsonObject = {"choices": [], "usage": usage(answer, sent), "system_fingerprint": fingerprint(answer)}
        times = metrics(answer)
        return [dumps(counts if times is None else {**counts, "metrics": times})[1:]]

    def body(self, answer: Answer) -> JsonObject:
        asked = answer.asked
        wanted = asked.body.get("prompt_logprobs")
        prompt = answer.prompts[0]
        said = prompt_logprobs(prompt, answer.settings.seed, wanted) if type(wanted) is int else None
        return {
            "id": answer.response_id,
            "object": "chat.completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": [self._choice(answer, choice) for choice in answer.choices],
            "service_tier": None,
            "system_fingerprint": fingerprint(answer),
            "usage": usage(answer),
            "prompt_logprobs": said,
            "prompt_token_ids": shown_prompt(prompt, answer.wrong) if asked.flag("return_token_ids") else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": metrics(answer, speculative=True),
        }

    def _choice(self, answer: Answer, choice: Choice) -> JsonObject:
        asked, generation = answer.asked, choice.generation
        hidden = not asked.flag("include_reasoning", True)
        said = generation.message
        message: JsonObject = {
            "role": "assistant",
            "content": said.content if said.content or asked.choice not in ("required", "named") else "",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if said.calls:
            message["tool_calls"] = whole_calls(answer, choice, "chatcmpl-tool-")
        message["reasoning"] = None if hidden else said.reasoning
        ids = asked.flag("return_token_ids") and not hidden
        made: JsonObject = {
            "index": choice.number,
            "message": message,
            "logprobs": whole_logprobs(answer, choice),
            "finish_reason": generation.finish if answer.wrong.finish else None,
            "stop_reason": generation.sampled.stop_reason,
            "token_ids": shown_ids(generation.sampled.ids, answer.wrong) if ids else None,
            "routed_experts": None,
        }
        if asked.flag("return_weight_versions"):
            spans = answer.versions(len(generation.sampled.ids))
            made["weight_versions"] = [span._asdict() for span in spans]
        return made


class PlainChat:
    """The Chat route of a server that returns no token ids."""

    chunk_object = "chat.completion.chunk"

    def opening(self, answer: Answer) -> list[bytes]:
        return [dumps(role_chunk(choice))[1:] for choice in answer.choices]

    def tails(self, answer: Answer, choice: Choice) -> Sequence[bytes | None]:
        style = _Style(
            wanted=_served_logprobs(answer),
            salt=logprob_salt(answer),
            ids=False,
            reasoning=True,
            wrong=answer.wrong,
            plain=True,
        )
        tails = _tails(choice.generation, choice.number, chunks_of(answer, choice), style)
        return tails.with_call_ids(answer, choice.number)

    def aborted(self, answer: Answer, choice: Choice) -> bytes:
        return dumps({"choices": [{**_ended(choice), "finish_reason": "abort"}]})[1:]

    def closing(self, answer: Answer, sent: Sent) -> list[bytes]:
        counts: JsonObject = {"choices": [], "usage": _plain_usage(usage(answer, sent))}
        return [dumps(counts)[1:]] if wants_usage(answer) else []

    def body(self, answer: Answer) -> JsonObject:
        choices: list[JsonObject] = []
        for choice in answer.choices:
            said = choice.generation.message
            message: JsonObject = {"role": "assistant", "content": said.content}
            if said.reasoning is not None:
                message["reasoning_content"] = said.reasoning
            if said.calls:
                message["tool_calls"] = whole_calls(answer, choice, "call_")
            finish = choice.generation.finish if answer.wrong.finish else None
            made = {"index": choice.number, "message": message, "finish_reason": finish}
            choices.append({**made, "logprobs": whole_logprobs(answer, choice)})
        return {
            "id": answer.response_id,
            "object": "chat.completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": choices,
            "usage": _plain_usage(usage(answer)),
        }


def _plain_usage(said: JsonObject) -> JsonObject:
    return {key: said[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}


def role_chunk(choice: Choice) -> JsonObject:
    """Return the chunk that a choice begins with."""
    delta = {"role": "assistant", "content": ""}
    return {"choices": [{"index": choice.number, "delta": delta, "logprobs": None, "finish_reason": None}]}


def _ended(choice: Choice) -> JsonObject:
    return {"index": choice.number, "delta": {}, "logprobs": None}


def _served_logprobs(answer: Answer) -> Logprobs | None:
    hidden = not answer.asked.flag("include_reasoning", True) and answer.settings.profile == "vllm"
    return None if hidden or answer.wrong.logprobs == "missing" else answer.asked.logprobs


def whole_logprobs(answer: Answer, choice: Choice) -> JsonObject | None:
    """Return the log-probabilities of a whole choice."""
    wanted = _served_logprobs(answer)
    if wanted is None:
        return None
    return {"content": chat_logprobs(choice.generation, wanted, logprob_salt(answer), answer.wrong.logprobs)}


def wants_usage(answer: Answer) -> bool:
    """Say whether a stream ends with its token counts."""
    return bool(answer.asked.stream_options.get("include_usage"))


def whole_calls(answer: Answer, choice: Choice, prefix: str) -> list[JsonObject]:
    """Return the calls of a whole message."""
    key = call_key(answer, choice.number)
    return [
        {
            "id": f"{prefix}{key}{number:02x}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(choice.generation.message.calls)
    ]


@lru_cache(_CACHED)
def _tails(generation: Generation, index: int, chunks: tuple[Chunk, ...], style: _Style) -> Tails:
    wrong = style.wrong
    entries = None if style.wanted is None else chat_logprobs(generation, style.wanted, style.salt, wrong.logprobs)
    ids = shown_ids(generation.sampled.ids, wrong) if style.ids and style.reasoning else None
    tails: list[bytes | None] = []
    for chunk in chunks:
        delta = joined(generation.deltas[chunk.start : chunk.end]) if chunk.end > chunk.start else Delta()
        said = _delta(delta, style)
        if not said and not chunk.last and ids is None:
            tails.append(None)
            continue
        end = None if chunk.last else chunk.end
        here = entries[chunk.start : end] if entries is not None else []
        made: JsonObject = {
            "index": index,
            "delta": said,
            "logprobs": {"content": here} if here else None,
            "finish_reason": generation.stream_finish if chunk.last and wrong.finish else None,
        }
        if chunk.last and not style.plain:
            made["stop_reason"] = generation.sampled.stop_reason
        if style.ids:
            made["token_ids"] = None if ids is None else ids[chunk.start : end]
        if chunk.last and style.versions:
            made["weight_versions"] = [span._asdict() for span in style.versions]
        tail: JsonObject = {"choices": [made]}
        if chunk.last and style.fingerprint is not None:
            tail["system_fingerprint"] = style.fingerprint
        tails.append(dumps(tail)[1:])
    return Tails.of(tails)


def _delta(delta: Delta, style: _Style) -> JsonObject:
    said: JsonObject = {}
    if delta.reasoning and style.reasoning:
        said["reasoning_content" if style.plain else "reasoning"] = delta.reasoning
    if delta.calls:
        if delta.content or not style.plain:
            said["content"] = delta.content or None
        prefix = "call_" if style.plain else "chatcmpl-tool-"
        said["tool_calls"] = [call_json(piece, prefix) for piece in delta.calls]
    elif delta.content:
        said["content"] = delta.content
    if said and not style.reasoning:
        said["reasoning"] = None
    return said
