"""Completions replies, of every profile: vLLM and SGLang differ in few names here, a plain server returns no ids.

Invariant: prompt ids and sampled ids stand in each choice; with `echo` the log-probabilities cover the prompt too, the
ids never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.scripted.answer import Answer, Chunk, chunks_of
from gristmill.scripted.chat_wire import shown_ids, shown_prompt, wants_usage
from gristmill.scripted.generation import Choice
from gristmill.scripted.logprobs import logprobs
from gristmill.scripted.token_json import completions_logprobs, prompt_logprobs
from gristmill.scripted.wire import Sent, dumps, fingerprint, logprob_salt, metrics, usage

__all__ = ["Completions"]

JsonObject = dict[str, Any]


class Completions:
    """The Completions route of a profile."""

    chunk_object = "text_completion"

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._stop_name = {"vllm": "stop_reason", "sglang": "matched_stop"}.get(profile)

    def opening(self, answer: Answer) -> list[bytes]:
        return []

    def tails(self, answer: Answer, choice: Choice) -> Sequence[bytes | None]:
        return [dumps({"choices": [self._chunk(answer, choice, chunk)]})[1:] for chunk in chunks_of(answer, choice)]

    def _chunk(self, answer: Answer, choice: Choice, chunk: Chunk) -> JsonObject:
        sampled = choice.generation.sampled
        first = chunk.start == 0
        echoed = self._echoed(answer, choice) if first else ""
        made: JsonObject = {
            "index": choice.number,
            "text": echoed + "".join(sampled.pieces[chunk.start : chunk.end]),
            "logprobs": self._logprobs(answer, choice, chunk),
            "finish_reason": choice.generation.stream_finish if chunk.last and answer.wrong.finish else None,
        }
        if self._stop_name is not None:
            made[self._stop_name] = self._stop(answer, choice) if chunk.last else None
        self._add_ids(made, answer, choice, chunk)
        if chunk.last and self._profile == "vllm" and answer.asked.flag("return_weight_versions"):
            made["weight_versions"] = [span._asdict() for span in answer.versions(len(sampled.ids))]
        return made

    def _add_ids(self, made: JsonObject, answer: Answer, choice: Choice, chunk: Chunk | None) -> None:
        asked = answer.asked.flag("return_token_ids")
        if self._profile == "plain" or (self._profile == "sglang" and not asked):
            return
        ids = shown_ids(choice.generation.sampled.ids, answer.wrong) if asked else None
        prompt = shown_prompt(answer.prompts[choice.prompt], answer.wrong) if asked else None
        if chunk is not None:
            ids = None if ids is None else ids[chunk.start : None if chunk.last else chunk.end]
            prompt = prompt if chunk.start == 0 else None
        if prompt is not None or self._profile == "vllm":
            made["prompt_token_ids"] = prompt
        made["token_ids"] = ids

    def _stop(self, answer: Answer, choice: Choice) -> str | int | None:
        sampled = choice.generation.sampled
        if self._profile == "sglang" and sampled.finish == "stop" and sampled.stop_reason is None:
            return answer.end_id
        return sampled.stop_reason

    def _echoed(self, answer: Answer, choice: Choice) -> str:
        """Return the prompt's text where it is asked back; a prompt of ids has none."""
        given = answer.asked.prompts[choice.prompt]
        return given if answer.asked.flag("echo") and isinstance(given, str) else ""

    def _logprobs(self, answer: Answer, choice: Choice, chunk: Chunk | None) -> JsonObject | None:
        wanted, wrong = answer.asked.logprobs, answer.wrong
        if wanted is None or wrong.logprobs == "missing":
            return None
        seed = choice.generation.seed ^ logprob_salt(answer)
        ids = list(choice.generation.sampled.ids)
        values: list[float | None] = list(logprobs(seed, tuple(ids)))
        if wrong.logprobs == "nan" and values:
            values[-1] = float("nan")
        if wrong.logprobs == "short":
            ids, values = ids[:-1], values[:-1]
        start, end = (0, len(ids)) if chunk is None else (chunk.start, len(ids) if chunk.last else chunk.end)
        echoed = self._echoed(answer, choice)
        offset = len(echoed) + len("".join(choice.generation.sampled.pieces[:start])) if start else 0
        here, said = ids[start:end], values[start:end]
        if start == 0 and answer.asked.flag("echo"):
            prompt = answer.prompts[choice.prompt]
            said = [None, *logprobs(answer.settings.seed, tuple(prompt))[1:], *said]
            here = [*prompt, *here]
            if answer.asked.body.get("max_tokens") == 0:
                here, said = here[: len(prompt)], said[: len(prompt)]
        return completions_logprobs(here, said, seed, wanted, offset)

    def aborted(self, answer: Answer, choice: Choice) -> bytes:
        made: JsonObject = {"index": choice.number, "text": "", "logprobs": None, "finish_reason": "abort"}
        if self._stop_name is not None:
            made[self._stop_name] = None
        if self._profile == "vllm":
            made["prompt_token_ids"] = None
            made["token_ids"] = [] if answer.asked.flag("return_token_ids") else None
        return dumps({"choices": [made]})[1:]

    def closing(self, answer: Answer, sent: Sent) -> list[bytes]:
        if not wants_usage(answer):
            return []
        counts: JsonObject = {"choices": [], "usage": usage(answer, sent)}
        if self._profile == "vllm":
            counts["system_fingerprint"] = fingerprint(answer)
            times = metrics(answer)
            counts |= {} if times is None else {"metrics": times}
        return [dumps(counts)[1:]]

    def body(self, answer: Answer) -> JsonObject:
        said: JsonObject = {
            "id": answer.response_id,
            "object": "text_completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": [self._choice(answer, choice) for choice in answer.choices],
            "usage": usage(answer),
        }
        if self._profile == "vllm":
            said |= {
                "service_tier": None,
                "system_fingerprint": fingerprint(answer),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": metrics(answer, speculative=True),
            }
        if self._profile == "sglang":
            said["metadata"] = {"weight_version": answer.weights}
        return said

    def _choice(self, answer: Answer, choice: Choice) -> JsonObject:
        asked = answer.asked
        scored_only = asked.body.get("max_tokens") == 0 and asked.flag("echo")
        made: JsonObject = {
            "index": choice.number,
            "text": self._echoed(answer, choice) + ("" if scored_only else choice.generation.sampled.text),
            "logprobs": self._logprobs(answer, choice, None),
            "finish_reason": choice.generation.finish if answer.wrong.finish else None,
        }
        if self._stop_name is not None:
            made[self._stop_name] = self._stop(answer, choice)
        self._add_ids(made, answer, choice, None)
        if self._profile == "vllm":
            wanted = asked.body.get("prompt_logprobs")
            if wanted is None and asked.flag("echo") and asked.logprobs is not None:
                wanted = asked.logprobs.top
            prompt = answer.prompts[choice.prompt]
            said = prompt_logprobs(prompt, answer.settings.seed, wanted) if type(wanted) is int else None
            made["prompt_logprobs"] = said
            made["routed_experts"] = None
            if asked.flag("return_weight_versions"):
                spans = answer.versions(len(choice.generation.sampled.ids))
                made["weight_versions"] = [span._asdict() for span in spans]
        return made
