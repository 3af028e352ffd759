"""Small captured calls for the tests of selection, ours and foreign ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.fingerprint import output_items
from gristmill.records import CallRecord

__all__ = ["ForeignCall", "ForeignItem", "Json", "call", "function_call", "history", "own_fingerprint", "said", "user"]

Json = dict[str, Any]


def said(text: str, **fields: Any) -> Json:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **fields}


def function_call(call_id: str, given: str = "{}", **fields: Any) -> Json:
    """A tool call as a Responses item."""
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": given, **fields}


def user(text: str = "go on") -> Json:
    """A turn of the user."""
    return {"role": "user", "content": text}


def history(*items: Json, **fields: Any) -> Json:
    """A result of one envelope."""
    return {"response": {"output": list(items)}, **fields}


def call(
    call_id: str, *items: Json | str, parent: str | None = None, twin: str | None = None, **fields: Any
) -> CallRecord:
    """A finished call; calls with one `twin` name sampled the same tokens."""
    served = [said(item) if isinstance(item, str) else item for item in items]
    tokens: Json = {"sequence_digest": twin or call_id, "logprobs_digest": "p", "prompt_len": 1, "cum_len": 3}
    made = {
        "response_id": f"r-{call_id}",
        "parent_call_id": parent,
        "response_status": "completed",
        "finish_reason": "stop",
        "output_items": output_items(served),
        "usable": True,
        **tokens,
    }
    return CallRecord(model_call_id=call_id, **{**made, **fields})


class ForeignItem:
    """An output item of another system: an id and a fingerprint, and nothing else."""

    def __init__(self, fingerprint: str, item_id: str | None = None) -> None:
        self.id = item_id
        self.fingerprint = fingerprint


class ForeignCall:
    """A record of another system, without any optional attribute."""

    def __init__(self, call_id: str, items: Sequence[ForeignItem], parent: str | None = None) -> None:
        self.model_call_id = call_id
        self.response_id = f"r-{call_id}"
        self.parent_call_id = parent
        self.output_items = tuple(items)
        self.response_status = "completed"
        self.finish_reason = "stop"


def own_fingerprint(item: Any) -> str:
    """Somebody's own way of making fingerprints."""
    return f"own:{item.get('content')}"
