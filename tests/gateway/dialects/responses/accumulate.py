"""Adds the events of a Responses stream up, as a client does that trusts nothing but the events of items."""

from __future__ import annotations

from typing import Any

_TERMINAL = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
_GROWS = {
    "response.reasoning_text.delta": "text",
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
_SAYS = {
    "response.reasoning_text.done": ("text",),
    "response.output_text.done": ("text", "logprobs"),
    "response.refusal.done": ("refusal",),
    "response.function_call_arguments.done": ("arguments",),
    "response.custom_tool_call_input.done": ("input",),
}


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the events add up to, with every rule of the protocol checked on the way."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"] == events[1]["response"]
    assert events[0]["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    done: set[int] = set()
    for event in events[2:-1]:
        _apply(event, items, done)
    last = events[-1]
    output = [item if index in done else {**item, "status": "incomplete"} for index, item in enumerate(items)]
    said = last["response"]
    assert said["status"] == _TERMINAL[last["type"]]
    ended = {key: said[key] for key in ("status", "usage", "error", "incomplete_details")}
    return {**events[0]["response"], **ended, "output": output}


def _apply(event: dict[str, Any], items: list[dict[str, Any]], done: set[int]) -> None:
    kind, index = event["type"], event["output_index"]
    if kind == "response.output_item.added":
        assert (index, done) == (len(items), set(range(index))), "items come one after the other"
        assert event["item"]["status"] == "in_progress"
        items.append(event["item"])
        return
    assert index == len(items) - 1
    assert index not in done, "an item that is done is not touched again"
    item = items[index]
    if kind == "response.output_item.done":
        begun = {key: value for key, value in item.items() if key != "status"}
        finished = {key: value for key, value in event["item"].items() if key != "status"}
        assert begun == finished, "an item is what its events said"
        items[index] = event["item"]
        done.add(index)
        return
    assert event["item_id"] == item["id"]
    if kind == "response.content_part.added":
        assert event["content_index"] == len(item["content"]) == 0
        item["content"].append(event["part"])
        return
    holder = item["content"][event["content_index"]] if "content_index" in event else item
    if kind == "response.content_part.done":
        assert holder == event["part"]
    elif kind in _GROWS:
        holder[_GROWS[kind]] = (holder[_GROWS[kind]] or "") + event["delta"]
    else:
        for field in _SAYS[kind]:
            if field == "logprobs":
                holder[field] = event[field]
            assert holder[field] == event[field]
