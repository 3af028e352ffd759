"""Steps of the Agent Trajectory Interchange Format: which are model calls, what those said, and the transcript of all.

Invariant: a step is a call exactly if it is the agent's, was made for this trajectory (`is_copied_context`) and stands
for an inference (`llm_call_count`). A step that stands for several has no tokens that could be told apart.

Not here: documents and their references (atif).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, cast

from gristmill.canonical import JsonValue
from gristmill.captures.exact import dumps, plain_numbers
from gristmill.captures.fields import JsonObject, count_at, kind_of, list_at, name_at, text_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.captures.request import media_digests
from gristmill.errors import Code, DecodeError
from gristmill.interop.foreign import kept, object_at, objects_at, unknown_keys
from gristmill.interop.importer import Report
from gristmill.tokens import CheckedTokens, check_tokens

__all__ = ["OWN", "TRAJECTORY", "StepReader", "check_version", "is_call", "own_of"]

OWN: Final = "gristmill"
"""Key of `extra` under which our own exports keep what the format has no field for."""

TRAJECTORY: Final = frozenset(
    {
        *("schema_version", "session_id", "trajectory_id", "agent", "steps", "continued_trajectory_ref"),
        *("subagent_trajectories", "extra"),
    }
)
_STEP: Final = frozenset(
    {
        *("step_id", "source", "model_name", "message", "reasoning_content", "tool_calls", "observation", "metrics"),
        *("extra", "llm_call_count", "is_copied_context", "timestamp"),
    }
)
_METRICS: Final = frozenset(
    {"prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs", "extra"}
)
_TOOL_CALL: Final = frozenset({"tool_call_id", "function_name", "arguments"})
_RESULT: Final = frozenset({"source_call_id", "content", "subagent_trajectory_ref"})
_SOURCES: Final = frozenset({"system", "user", "agent"})
_OWN_KEYS: Final = frozenset(
    {
        *("model_call_id", "response_id", "choice_index", "parent_call_id", "parent_resolution", "dialect", "model"),
        *("requested_model", "adapter", "tokenizer", "session_id", "parent_session_id", "response_status"),
        *("finish_reason", "weight_versions", "weights_at_start", "weights_at_end", "sampling", "purpose"),
    }
)
_VERSION: Final = re.compile(r"ATIF-v1\.(\d{1,3})(?:\.\d{1,3})?\Z", re.ASCII)
_NEWEST: Final = 8


def check_version(trajectory: JsonObject, place: str) -> None:
    """Refuse what is no trajectory, or of a version that is not known.

    Raises:
        DecodeError: `schema_unsupported`.
        Unexpected: there is no version.
    """
    stated = name_at(trajectory, "schema_version", "$")
    if stated is None:
        raise Unexpected("a schema_version such as ATIF-v1.8", "none", "$.schema_version")
    match = _VERSION.match(stated)
    if match is None or int(match[1]) > _NEWEST:
        message = f"expected ATIF-v1.0 to ATIF-v1.{_NEWEST}, got {stated!r}"
        raise DecodeError(message, code=Code.SCHEMA_UNSUPPORTED, where=f"{place} $.schema_version")


def own_of(holder: Mapping[str, JsonValue], where: str) -> JsonObject:
    """Return what our own export put beside the fields of the format, empty where there is nothing."""
    extra = holder.get("extra")
    value = object_at(extra, f"{where}.extra").get(OWN) if extra is not None else None
    place = f"{where}.extra.{OWN}"
    return {} if value is None else object_at(kept(value, place), place)


def is_call(step: JsonObject, where: str) -> bool:
    """Tell whether a step stands for model calls that were made for this trajectory."""
    source = step.get("source")
    if not isinstance(source, str) or source not in _SOURCES:
        got = repr(encodable(source)) if isinstance(source, str) else kind_of(source)
        raise Unexpected("system, user or agent", got, f"{where}.source")
    return source == "agent" and not _copied(step, where) and count_at(step, "llm_call_count", where) != 0


def _copied(step: JsonObject, where: str) -> bool:
    stated = step.get("is_copied_context")
    if stated is not None and not isinstance(stated, bool):
        raise Unexpected("true or false", "another value", f"{where}.is_copied_context")
    return bool(stated)


class StepReader:
    """The steps of one trajectory: its calls and the chat messages that its harness kept.

    Args:
        agent: the trajectory's agent.
        report: gets the losses.

    Attributes:
        messages: the transcript so far, without steps that were copied or that no model was asked for.
    """

    def __init__(self, agent: JsonObject, report: Report) -> None:
        self.messages: list[JsonValue] = []
        self._model = name_at(agent, "model_name", "$.agent")
        self._report = report

    def call(self, step: JsonObject, where: str) -> JsonObject:
        """Write a step as a `call` line without its id.

        Raises:
            Unexpected: a field is none that the format has.
        """
        own = own_of(step, where)
        line: JsonObject = {
            "output_items": [self._said(step, where)],
            "model": name_at(step, "model_name", where) or self._model,
            "request_media": list(media_digests({"messages": self.messages})) or None,
            **self._tokens(step, where),
            **{key: value for key, value in own.items() if key in _OWN_KEYS},
        }
        if not own:
            self._report.lose("finish_reasons")
            self._report.lose("requests")
        return line

    def _tokens(self, step: JsonObject, where: str) -> JsonObject:
        given = step.get("metrics")
        metrics = {} if given is None else object_at(given, f"{where}.metrics")
        place = f"{where}.metrics"
        self._report.lose("fields", len(unknown_keys(metrics, _METRICS)) + _more(metrics.get("extra"), place))
        inferences = count_at(step, "llm_call_count", where)
        if inferences is not None and inferences > 1:
            detail = f"the step stands for {inferences} inferences together"
            return {"unusable_reason": str(Code.TOKEN_IDS_MISSING), "unusable_detail": detail}
        usage: JsonObject = {
            name: count
            for name in ("prompt_tokens", "completion_tokens")
            if (count := count_at(metrics, name, place)) is not None
        }
        sampled, prompt = (list_at(metrics, f"{part}_token_ids", place) for part in ("completion", "prompt"))
        logprobs = list_at(metrics, "logprobs", place)
        plain = None if logprobs is None else plain_numbers(logprobs, f"{place}.logprobs")
        checked = check_tokens(prompt, sampled, plain, reported=usage.get("completion_tokens"))
        stated = usage.get("prompt_tokens")
        differs: JsonObject = {}
        # What else is wrong with the tokens is found again, and says more.
        if isinstance(checked, CheckedTokens) and stated not in {None, checked.prompt_T.size}:
            detail = f"{checked.prompt_T.size} prompt_token_ids, {stated} prompt_tokens reported"
            differs = {"unusable_reason": str(Code.TOKEN_COUNT_MISMATCH), "unusable_detail": detail}
        return {
            **differs,
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": logprobs,
            "usage": usage if usage and sampled is not None else None,
        }

    def add(self, step: JsonObject, where: str) -> None:
        """Add a step to the transcript; it counts what the step has and no call holds."""
        self._report.lose("fields", len(unknown_keys(step, _STEP)))
        extra = step.get("extra")
        if extra is not None:
            self._report.lose("fields", len(unknown_keys(object_at(extra, f"{where}.extra"), frozenset({OWN}))))
        self._report.lose("timestamps", step.get("timestamp") is not None)
        if step.get("source") == "agent":
            if is_call(step, where):
                self.messages.append(self._said(step, where))
            else:
                self._report.lose("copied_steps" if _copied(step, where) else "dispatched_steps")
        else:
            content = _content(step.get("message"), f"{where}.message")
            if content:
                self.messages.append({"role": step["source"], "content": content})
        for result, _ in self.results(step, where):
            content = _content(result.get("content"), f"{where}.observation")
            call_id = name_at(result, "source_call_id", f"{where}.observation")
            role = {"role": "user"} if call_id is None else {"role": "tool", "tool_call_id": call_id}
            if content is not None and not _copied(step, where):
                self.messages.append({**role, "content": content})

    def results(self, step: JsonObject, where: str) -> Iterator[tuple[JsonObject, str]]:
        """Give the results that a step observed."""
        observation = step.get("observation")
        if observation is None:
            return
        held = object_at(observation, f"{where}.observation")
        for result, place in objects_at(held, "results", f"{where}.observation"):
            self._report.lose("fields", len(unknown_keys(result, _RESULT)))
            yield result, place

    def _said(self, step: JsonObject, where: str) -> JsonObject:
        """Write what the agent said as a chat message."""
        message: JsonObject = {"role": "assistant", "content": _content(step.get("message"), f"{where}.message") or ""}
        reasoning = text_at(step, "reasoning_content", where)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        calls = [self._tool_call(call, place) for call, place in objects_at(step, "tool_calls", where)]
        if calls:
            message["tool_calls"] = calls
        return message

    def _tool_call(self, call: JsonObject, where: str) -> JsonValue:
        arguments = own_of(call, where).get("arguments")
        if arguments is None:
            arguments = dumps(kept(object_at(call.get("arguments"), f"{where}.arguments"), where)).decode()
        elif not isinstance(arguments, str):
            raise Unexpected("a string", "another value", f"{where}.extra.{OWN}.arguments")
        name = name_at(call, "function_name", where)
        if name is None:
            raise Unexpected("a function_name", "none", where)
        self._report.lose("fields", len(unknown_keys(call, _TOOL_CALL | {"extra"})))
        function = {"name": name, "arguments": arguments}
        return {"id": name_at(call, "tool_call_id", where), "type": "function", "function": function}


def _more(extra: JsonValue, where: str) -> int:
    """Count what metrics have beside the fields; that every token of a call is trained, as our own say, is no news."""
    return 0 if extra is None else len(unknown_keys(object_at(extra, f"{where}.extra"), frozenset({"loss_mask"})))


def _content(value: JsonValue, where: str) -> JsonValue:
    """Read text, or parts of which some are media: those become addresses."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Unexpected("a string or content parts", "another value", where)
    parts: list[JsonValue] = []
    for index, member in enumerate(cast("list[JsonValue]", value)):
        place = f"{where}[{index}]"
        part = object_at(member, place)
        kind = name_at(part, "type", place)
        if kind == "text":
            parts.append({"type": "text", "text": text_at(part, "text", place) or ""})
        elif kind in {"image", "audio"}:
            source = object_at(part.get("source"), f"{place}.source")
            address = {"url": text_at(source, "path", f"{place}.source") or ""}
            parts.append({"type": f"{kind}_url", f"{kind}_url": address})
        else:
            raise Unexpected("text, image or audio", repr(kind), f"{place}.type")
    return parts
