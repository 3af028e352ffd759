"""Prompts of rLLM's traces: whole ones, and those stored as the new tokens after an earlier trace's.

Invariant: a prompt is put together from exactly the traces that it names, prompt and completion of each, or is missing:
a trace that is not there, that stands twice or that names itself in the end gives none.

Not here: everything else of a trace (rllm).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gristmill.canonical import JsonValue
from gristmill.captures.fields import JsonObject, list_at

__all__ = ["Prompts"]


class Prompts:
    """The prompts of one session's traces, whole ones and those that are stored as what follows an earlier trace."""

    def __init__(self, traces: Iterable[JsonObject]) -> None:
        self.missing: list[tuple[str, str]] = []
        self._traces: dict[str, JsonObject] = {}
        self._whole: dict[str, list[JsonValue] | None] = {}
        self._twice: set[str] = set()
        for trace in traces:
            trace_id = trace.get("trace_id")
            if isinstance(trace_id, str):
                if trace_id in self._traces:
                    self._twice.add(trace_id)
                self._traces[trace_id] = trace

    def holds(self, trace_id: str) -> bool:
        """Tell whether the session has a trace."""
        return trace_id in self._traces

    def of(self, trace: JsonObject) -> list[JsonValue] | None:
        """Return the prompt of a trace, None where it has none or a part of it is not there.

        Raises:
            Unexpected: a list is none.
        """
        if trace.get("prompt_delta_token_ids") is None:
            return list_at(trace, "prompt_token_ids", "$") or None
        prompt = self._put_together(trace)
        if prompt is None:
            told = "its prompt follows a trace that is not there: prompt ids are missing"
            self.missing.append((str(trace.get("trace_id")), told))
        return prompt

    def _put_together(self, trace: JsonObject) -> list[JsonValue] | None:
        chain: list[JsonObject] = []
        seen: set[str] = set()
        at = trace
        while at.get("prompt_delta_token_ids") is not None:
            parent = at.get("parent_trace_id")
            if not isinstance(parent, str) or parent in seen or parent in self._twice or parent not in self._traces:
                return None
            seen.add(parent)
            chain.append(at)
            at = self._traces[parent]
            if parent in self._whole:
                break
        first = at.get("trace_id")
        prompt = self._whole.get(str(first)) or list_at(at, "prompt_token_ids", "$")
        for link in reversed(chain):
            if not prompt:
                return None
            prompt = [*prompt, *_completion(at), *(list_at(link, "prompt_delta_token_ids", "$") or ())]
            at = link
            self._whole[str(link.get("trace_id"))] = prompt
        return prompt


def _completion(trace: Mapping[str, JsonValue]) -> list[JsonValue]:
    return list_at(trace, "completion_token_ids", "$") or []
