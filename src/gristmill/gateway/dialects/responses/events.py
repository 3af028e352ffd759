"""The events of a Responses stream as bytes.

Invariant: the events of an item say what its final form says, in order, numbered without gaps; text is written as it
came, lone surrogates too.

Not here: when an item begins and ends (encoder), the items themselves (items).
"""

from __future__ import annotations

from typing import Final

from gristmill.gateway.dialects.responses.items import emptied
from gristmill.gateway.front import JsonObject
from gristmill.gateway.json_text import dump

__all__ = ["EventWriter"]

_DELTAS: Final = {
    "reasoning_text": "response.reasoning_text",
    "output_text": "response.output_text",
    "refusal": "response.refusal",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
"""What the events of a growing text are called, by the type of the part, or of an item without parts."""

_GROWING: Final = {"function_call": "arguments", "custom_tool_call": "input"}


class EventWriter:
    """Writes and numbers the events of one stream.

    Attributes:
        number: of the next event.
    """

    def __init__(self) -> None:
        self.number = 0

    def event(self, kind: str, fields: JsonObject) -> bytes:
        """Write one event."""
        number = self.number
        self.number = number + 1
        data = dump({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def opened(self, item: JsonObject, output_index: int) -> bytes:
        """Write that an item begins; `item` is its form at any time."""
        begun = emptied(item)
        if "content" not in begun:
            return self.event("response.output_item.added", {"output_index": output_index, "item": begun})
        [part] = begun["content"]
        place: JsonObject = {"item_id": begun["id"], "output_index": output_index, "content_index": 0}
        added: JsonObject = {"output_index": output_index, "item": {**begun, "content": []}}
        return self.event("response.output_item.added", added) + self.event(
            "response.content_part.added", {**place, "part": part}
        )

    @staticmethod
    def head(item: JsonObject, output_index: int) -> tuple[bytes, bytes]:
        """Return what stands before and after the text of each delta event of an item, up to its number."""
        kind = item["content"][0]["type"] if "content" in item else item["type"]
        name = f"{_DELTAS[kind]}.delta"
        place = b'"item_id":%b,"output_index":%d' % (dump(item["id"]), output_index)
        if "content" in item:
            place += b',"content_index":0'
        before = b'event: %b\ndata: {"type":"%b",%b,"delta":' % (name.encode(), name.encode(), place)
        after = b',"logprobs":[],"sequence_number":%d}\n\n' if kind == "output_text" else b',"sequence_number":%d}\n\n'
        return before, after

    def delta(self, head: tuple[bytes, bytes], text: str) -> bytes:
        """Write that an item's text grew; `head` as `head` made it."""
        number = self.number
        self.number = number + 1
        return head[0] + dump(text) + head[1] % number

    def closed(self, item: JsonObject, output_index: int) -> bytes:
        """Write that an item is done; `item` is its final form."""
        kind = item["type"]
        place: JsonObject = {"item_id": item["id"], "output_index": output_index}
        before = b""
        if kind in _GROWING:
            field = _GROWING[kind]
            done = {**place, field: item[field]}
            before = self.event(
                f"{_DELTAS[kind]}.done", {**done, "name": item["name"]} if field == "arguments" else done
            )
        elif "content" in item:
            [part] = item["content"]
            at = {**place, "content_index": 0}
            said = {key: part[key] for key in ("text", "refusal", "logprobs") if key in part}
            before = self.event(f"{_DELTAS[part['type']]}.done", {**at, **said})
            before += self.event("response.content_part.done", {**at, "part": part})
        return before + self.event("response.output_item.done", {"output_index": output_index, "item": item})

    def whole(self, item: JsonObject, output_index: int) -> bytes:
        """Write all events of an item that is there at once."""
        events = self.opened(item, output_index)
        text = _growing_text(item)
        if text:
            events += self.delta(self.head(item, output_index), text)
        return events + self.closed(item, output_index)


def _growing_text(item: JsonObject) -> str:
    if item["type"] in _GROWING:
        return item[_GROWING[item["type"]]]
    if "content" not in item:
        return ""
    [part] = item["content"]
    return part["refusal"] if part["type"] == "refusal" else part["text"]
