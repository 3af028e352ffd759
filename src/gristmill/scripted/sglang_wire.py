"""Chat replies as SGLang writes them.

Invariant: ids stand where SGLang 0.5 puts them: in a body per choice (`prompt_token_ids`, `response_token_ids`), or in
`sglext` where its own fields or headers ask for that; in a stream only in one `sglext` chunk near its end. What it
refuses with a stream is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from gristmill.scripted.answer import Answer, Chunk, chunks_of
from gristmill.scripted.asked import Asked, EngineRefused, Logprobs
from gristmill.scripted.chat_wire import (
    Tails,
    call_json,
    joined,
    shown_ids,
    shown_prompt,
    wants_usage,
    whole_calls,
)
from gristmill.scripted.generation import Choice, Generation
from gristmill.scripted.logprobs import logprobs
from gristmill.scripted.parsing import Delta
from gristmill.scripted.script import Wrong
from gristmill.scripted.token_json import chat_logprobs, token_text
from gristmill.scripted.wire import Sent, dumps, logprob_salt

__all__ = ["SglangChat", "refuse_streamed_ids"]

JsonObject = dict[str, Any]

_REFUSED: Final = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")


def refuse_streamed_ids(asked: Asked) -> None:
    """Refuse what SGLang does not do in a stream.

    Raises:
        EngineRefused: 400.
    """
    if asked.route != "chat" or not asked.stream:
        return
    for name in _REFUSED:
        if asked.flag(name):
            raise EngineRefused(
                400,
                f"{name} is not supported with streaming on /v1/chat/completions. "
                f"Please set stream=false when using {name}=true.",
            )


class SglangChat:
    """SGLang's Chat route."""

    chunk_object = "chat.completion.chunk"

    def opening(self, answer: Answer) -> list[bytes]:
        delta = {"reasoning_content": None, "role": "assistant", "content": ""}
        return [dumps({"choices": [_chunk_choice(choice.number, delta)]})[1:] for choice in answer.choices]

    def tails(self, answer: Answer, choice: Choice) -> Sequence[bytes | None]:
        wrong = answer.wrong
        wanted = None if wrong.logprobs == "missing" else answer.asked.logprobs
        tails = _tails(choice.generation, choice.number, chunks_of(answer, choice), wanted, logprob_salt(answer), wrong)
        return tails.with_call_ids(answer, choice.number)

    def aborted(self, answer: Answer, choice: Choice) -> bytes:
        return _finish_chunk(choice.number, "abort", None)

    def closing(self, answer: Answer, sent: Sent) -> list[bytes]:
        tails: list[bytes] = []
        if all(
            count == len(choice.generation.sampled.ids) for choice, count in zip(answer.choices, sent.ids, strict=True)
        ):
            tails.extend(
                _finish_chunk(
                    choice.number,
                    choice.generation.stream_finish if answer.wrong.finish else None,
                    _matched(answer, choice, choice.generation.stream_finish),
                )
                for choice in answer.choices
            )
        extension = _extension(answer, sent.ids)
        if extension:
            tails.append(dumps({"choices": [], "usage": None, "sglext": extension})[1:])
        if wants_usage(answer):
            tails.append(dumps({"choices": [], "usage": _usage(answer, sent.ids)})[1:])
        return tails

    def body(self, answer: Answer) -> JsonObject:
        counts = [len(choice.generation.sampled.ids) for choice in answer.choices]
        said: JsonObject = {
            "id": answer.response_id,
            "object": "chat.completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": [self._choice(answer, choice) for choice in answer.choices],
            "usage": _usage(answer, counts),
            "metadata": {"weight_version": answer.versions(max(counts))[-1].version},
        }
        extension = _extension(answer, counts)
        return {**said, "sglext": extension} if extension else said

    def _choice(self, answer: Answer, choice: Choice) -> JsonObject:
        asked, generation, wrong = answer.asked, choice.generation, answer.wrong
        said = generation.message
        message = {
            "role": "assistant",
            # Engines that retokenise need a string here, so it is never null.
            "content": said.content or "",
            "reasoning_content": said.reasoning,
            "tool_calls": whole_calls(answer, choice, "call_") if said.calls else None,
        }
        content: JsonObject | None = None
        if asked.logprobs is not None and wrong.logprobs != "missing":
            content = {"content": chat_logprobs(generation, asked.logprobs, logprob_salt(answer), wrong.logprobs)}
        made: JsonObject = {
            "index": choice.number,
            "message": message,
            "logprobs": content,
            "finish_reason": generation.finish if wrong.finish else None,
            "matched_stop": _matched(answer, choice, generation.finish),
        }
        if asked.flag("return_prompt_token_ids") or asked.flag("return_token_ids"):
            prompt = shown_prompt(answer.prompts[0], wrong)
            made |= {} if prompt is None else {"prompt_token_ids": prompt}
        if asked.flag("return_token_ids"):
            ids = shown_ids(generation.sampled.ids, wrong)
            made |= {} if ids is None else {"response_token_ids": ids}
        if asked.flag("return_meta_info"):
            made["meta_info"] = _meta_info(answer, choice)
        return made


def _chunk_choice(index: int, delta: JsonObject) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}


def _finish_chunk(index: int, finish: str | None, matched: str | int | None) -> bytes:
    made = _chunk_choice(index, {"reasoning_content": None})
    return dumps({"choices": [{**made, "finish_reason": finish, "matched_stop": matched}]})[1:]


def _matched(answer: Answer, choice: Choice, finish: str) -> str | int | None:
    sampled = choice.generation.sampled
    if finish != "stop":
        return None
    return answer.end_id if sampled.stop_reason is None else sampled.stop_reason


def _extension(answer: Answer, counts: Sequence[int]) -> JsonObject:
    """Return the ids that `sglext` holds, as fields or headers ask for them."""
    asked, extension = answer.asked, JsonObject()
    prompt = shown_prompt(answer.prompts[0], answer.wrong)
    if prompt is not None and _wants(asked, "return_input_ids_in_sglext", "x-sglext-return-input-ids"):
        extension["input_ids"] = prompt
    if _wants(asked, "return_output_ids_in_sglext", "x-sglext-return-output-ids"):
        pairs = zip(answer.choices, counts, strict=True)
        ids = [shown_ids(choice.generation.sampled.ids[:count], answer.wrong) for choice, count in pairs]
        if None not in ids:
            extension["output_ids"] = ids
    return extension


def _wants(asked: Asked, field: str, header: str) -> bool:
    return asked.flag(field) or asked.headers.get(header) == "1"


def _usage(answer: Answer, counts: Sequence[int]) -> JsonObject:
    completion = sum(counts) + answer.wrong.usage
    reasoning = Sent(counts).reasoning(answer)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": reasoning,
    }


def _meta_info(answer: Answer, choice: Choice) -> JsonObject:
    sampled = choice.generation.sampled
    finish: JsonObject = {"type": sampled.finish}
    if sampled.finish == "stop":
        finish["matched"] = answer.end_id if sampled.stop_reason is None else sampled.stop_reason
    said: JsonObject = {
        "id": answer.response_id,
        "finish_reason": finish,
        "prompt_tokens": answer.prompt_tokens,
        "weight_version": answer.versions(len(sampled.ids))[-1].version,
        "completion_tokens": len(sampled.ids),
        "cached_tokens": 0,
    }
    if answer.asked.logprobs is not None:
        values = logprobs(choice.generation.seed ^ logprob_salt(answer), sampled.ids)
        pairs = zip(values, sampled.ids, strict=True)
        said["output_token_logprobs"] = [[value, token, token_text(token)] for value, token in pairs]
    return said


@lru_cache(512)
def _tails(
    generation: Generation,
    index: int,
    chunks: tuple[Chunk, ...],
    wanted: Logprobs | None,
    salt: int,
    wrong: Wrong,
) -> Tails:
    entries = None if wanted is None else chat_logprobs(generation, wanted, salt, wrong.logprobs)
    tails: list[bytes | None] = []
    for chunk in chunks:
        delta = joined(generation.deltas[chunk.start : chunk.end]) if chunk.end > chunk.start else Delta()
        said: JsonObject = {"reasoning_content": delta.reasoning or None}
        if delta.content:
            said["content"] = delta.content
        if delta.calls:
            said["tool_calls"] = [call_json(piece, "call_") for piece in delta.calls]
        end = None if chunk.last else chunk.end
        here = entries[chunk.start : end] if entries is not None else []
        if not delta and not here:
            tails.append(None)
            continue
        made = _chunk_choice(index, said)
        made["logprobs"] = {"content": here} if here else None
        tails.append(dumps({"choices": [made]})[1:])
    return Tails.of(tails)
