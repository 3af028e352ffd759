"""The line of a rollout in NeMo Gym's files: what the agent handed back, and calls whose tokens its items carry.

Invariant: an item with token arrays is the end of one call, as Gym's converters write them; calls are linked where the
next prompt begins with all tokens of the call before it, which is what Gym demands of such items, and nowhere else.

Not here: calls that were captured beside the result (tokens, reading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from gristmill.atoms import read_item
from gristmill.canonical import JsonValue
from gristmill.captures.fields import JsonObject, kind_of, list_at, name_at, text_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import SelectionError
from gristmill.interop.foreign import kept, object_at
from gristmill.interop.reward import reward_at
from gristmill.records import Attribution, Failure, Result

__all__ = ["TOKEN_FIELDS", "bears_tokens", "item_calls", "result_of"]

TOKEN_FIELDS: Final = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"})
"""Keys of an item that are about the tokens of its call."""

_ARRAYS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_MASK: Final = "mask_sample"


def result_of(line: JsonObject) -> Result:
    """Make the result of a rollout's line; token arrays of items are left out of it.

    Raises:
        Unexpected: a reward, a mask or a number is none that a result can have.
    """
    task = line.get("_ng_task_index")
    return Result(
        value=kept(_without_tokens(line), "$"),
        reward=reward_at(line.get("reward"), "$.reward"),
        group_id=None if task is None else str(task),
        failure=_masked(line),
    )


def _masked(line: JsonObject) -> Failure | None:
    """Read `mask_sample`: Gym says that nothing of the rollout is to be trained."""
    inner = line.get("instance_config")
    nested = cast(JsonObject, inner) if isinstance(inner, dict) else {}
    for holder, place in ((line, "$"), (nested, "$.instance_config")):
        flag = holder.get(_MASK)
        if flag is not None and not isinstance(flag, bool):
            raise Unexpected("true or false", kind_of(flag), f"{place}.{_MASK}")
        if flag is True:
            return Failure(reason=_why_masked(line), attribution=Attribution.MASK)
    return None


def _why_masked(line: JsonObject) -> str:
    capture = line.get("_ng_token_capture")
    told = [line.get("failure_reason"), line.get("failure_kind")]
    if isinstance(capture, dict):
        told.append(cast(JsonObject, capture).get("error"))
    why = [text for text in told if isinstance(text, str) and text]
    return f"NeMo Gym masked it: {encodable(why[0])}" if why else "NeMo Gym masked it"


def _without_tokens(line: JsonObject) -> JsonObject:
    """Return the line with the items of its envelopes freed of token arrays."""
    made = dict(line)
    if isinstance(line.get("response"), dict):
        made["response"] = _bare_envelope(cast(JsonObject, line["response"]))
    if isinstance(line.get("responses"), list):
        envelopes = cast("list[JsonValue]", line["responses"])
        made["responses"] = [
            _bare_envelope(cast(JsonObject, envelope)) if isinstance(envelope, dict) else envelope
            for envelope in envelopes
        ]
    return made


def _bare_envelope(envelope: JsonObject) -> JsonObject:
    output = envelope.get("output")
    if not isinstance(output, list):
        return envelope
    items = [_bare(item) for item in cast("list[JsonValue]", output)]
    return {**envelope, "output": items}


def _bare(item: JsonValue) -> JsonValue:
    if isinstance(item, list):
        return [_bare(member) for member in cast("list[JsonValue]", item)]
    if type(item) is not dict:
        return item
    return {key: value for key, value in cast(JsonObject, item).items() if key not in TOKEN_FIELDS}


class _Item(NamedTuple):
    """An item of the output: its place, whether a model made it, whether it carries token arrays."""

    at: int
    value: JsonObject
    authored: bool
    bears: bool


def bears_tokens(line: JsonObject) -> bool:
    """Tell whether an item of the response carries token arrays."""
    return any(item.bears for item in _items(line))


def item_calls(line: JsonObject) -> Iterator[JsonObject]:
    """Give the calls of a response as `call` lines, one for each item that carries token arrays.

    Authored items between two items of the environment in which none carries tokens are a call without tokens.

    Raises:
        Unexpected: a token array is none.
    """
    response = object_at(line["response"], "$.response")
    before: list[JsonValue] = []
    previous: str | None = None
    calls = [run for group in _runs(_items(line)) for run in _cut(group)]
    for position, run in enumerate(calls):
        bearer = next((item for item in run if item.bears), run[-1])
        place = f"$.response.output[{bearer.at}]"
        prompt, generation, logprobs = (list_at(bearer.value, key, place) for key in _ARRAYS)
        call_id = f"item-{bearer.at}"
        continues = bool(before) and prompt is not None and prompt[: len(before)] == before
        yield {
            "model_call_id": call_id,
            "parent_call_id": previous if continues else None,
            "parent_resolution": "root" if position == 0 else "resolved" if continues else "unresolved",
            "model": name_at(response, "model", "$.response"),
            "output_items": [_bare(item.value) for item in run],
            "prompt_token_ids": prompt,
            "generation_token_ids": generation,
            "generation_log_probs": logprobs,
            **(_finish(response) if position == len(calls) - 1 else {}),
        }
        before = [*(prompt or ()), *(generation or ())] if generation is not None else []
        previous = call_id


def _finish(response: JsonObject) -> JsonObject:
    """Read how the response ended: it is the last call's, with the items of all calls in it."""
    details = response.get("incomplete_details")
    reason: Any = cast(Mapping[str, JsonValue], details).get("reason") if isinstance(details, dict) else None
    return {"response_status": text_at(response, "status", "$.response"), "finish_reason": reason}


def _items(line: JsonObject) -> list[_Item]:
    response = line.get("response")
    output = cast(JsonObject, response).get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        return []
    made: list[_Item] = []
    for index, value in enumerate(cast("list[JsonValue]", output)):
        if isinstance(value, dict):
            item = cast(JsonObject, value)
            bears = any(item.get(key) is not None for key in _ARRAYS)
            made.append(_Item(index, item, bears or _is_authored(item), bears))
    return made


def _is_authored(item: JsonObject) -> bool:
    try:
        return read_item(_bare(item)).authored
    except SelectionError:
        # What cannot be read is kept with the call it stands in, and matches nothing.
        return True


def _runs(items: list[_Item]) -> Iterator[list[_Item]]:
    """Give the authored items between items of the environment."""
    run: list[_Item] = []
    for item in items:
        if item.authored:
            run.append(item)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _cut(run: list[_Item]) -> Iterator[list[_Item]]:
    """Cut a run behind every item with tokens; what follows the last one is that call's, too."""
    ends = [position + 1 for position, item in enumerate(run) if item.bears]
    begin = 0
    for end in ends[:-1]:
        yield run[begin:end]
        begin = end
    yield run[begin:]
