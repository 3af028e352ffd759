"""Joins the chunks of a Chat, Completions or generate stream into the body that the same call would have had.

Invariant: pieces are joined in the order they came, ids and log-probabilities like text; a chunk may carry
none, one or many ids, ids without text, or text without ids. Nothing is complete before every choice has a
finish reason and `[DONE]` has come. A chunk is never changed, and the cost of one does not grow with what came before.

Not here: what the body means (choices).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.choices import ItemsOf, error_text, read_document
from gristmill.captures.fields import JsonObject, count_at, list_at, object_at, text_at
from gristmill.captures.reply import Reply, ReplyChoice, Unexpected, failed_reply, malformed_reply
from gristmill.captures.reply_json import loads_reply
from gristmill.captures.sampled import SlimLogprobs
from gristmill.captures.sse import DONE, ServerEvent, parse_events
from gristmill.errors import Code, DecodeError
from gristmill.records import Dialect, ResponseStatus

__all__ = ["StreamAssembly", "read_stream", "truncated"]

_JOINED_IN_CALL: Final = frozenset({"arguments", "input"})
_ROOT_SAID: Final = ("id", "request_id", "model", "usage", "created", "system_fingerprint", "service_tier", "object")
_LAST_SAID: Final = ("stop_reason", "matched_stop", "weight_versions", "meta_info", "raw_output")
# What all but a few chunks have and no more. These are joined without looking for anything else, and the place of a
# field is written down only where something is wrong with it: either would cost more than the joining.
_USUAL_ROOT: Final = frozenset({"id", "object", "created", "model", "choices"})
_USUAL_SAID: Final = ("id", "model", "created", "object")
_USUAL_CHOICE: Final = frozenset({"index", "delta", "text", "logprobs", "finish_reason", "token_ids"})


def read_stream(stream: bytes | str, dialect: Dialect, items_of: ItemsOf, *, echo: bool = False) -> Reply:
    """Read a raw event stream; `echo` as in `choices.read_body`."""
    assembly = StreamAssembly(dialect, items_of, echo=echo)
    try:
        assembly.add(parse_events(stream))
    except (DecodeError, Unexpected) as error:
        return malformed_reply(dialect, str(error))
    return assembly.reply()


def truncated(reply: Reply, missing: str) -> Reply:
    """Mark a reply whose stream ended before the protocol's terminal event; nothing of it counts as said."""
    detail = f"the stream ended early: {missing}"
    choices = tuple(_cut(choice, detail) for choice in reply.choices)
    return msgspec.structs.replace(reply, choices=choices, status=ResponseStatus.UNKNOWN)


def _cut(choice: ReplyChoice, detail: str) -> ReplyChoice:
    if choice.reason is Code.REPLY_MALFORMED:
        return choice
    return msgspec.structs.replace(
        choice, response_status=ResponseStatus.UNKNOWN, reason=Code.STREAM_TRUNCATED, detail=detail
    )


class _Pieces(list[str]):
    """Text that is still coming; `_whole` puts it together."""


class StreamAssembly:
    """What has come of a stream so far; for one that is read as it arrives, and for a recorded one.

    Args:
        dialect: of the route, for the reply.
        items_of: takes what was served out of a choice.
        echo: as in `choices.read_body`.
        slim: keep of each log-probability entry only the number and the id, a tenth of its size.
    """

    def __init__(self, dialect: Dialect, items_of: ItemsOf, *, echo: bool = False, slim: bool = False) -> None:
        self._slim = slim
        self._dialect = dialect
        self._items_of = items_of
        self._echo = echo
        self._root: JsonObject = {}
        self._choices: dict[int, JsonObject] = {}
        self.done = False
        self.error: str | None = None

    def add(self, events: Iterable[ServerEvent]) -> None:
        """Add events up to `[DONE]`, an error, or the end.

        Raises:
            DecodeError: the data of an event is not JSON.
            Unexpected: it is not a chunk.
        """
        for event in events:
            if event.data.strip() == DONE:
                self.done = True
                return
            self.add_chunk(object_at(loads_reply(event.data), "$"), event.event)
            if self.error is not None:
                return

    def add_chunk(self, chunk: JsonObject, event: str = "message") -> None:
        """Add one chunk, decoded; `event` is the name that the stream gave it.

        Raises:
            Unexpected: it is not a chunk.
        """
        if event == "error" and "error" not in chunk:
            chunk = {"error": chunk}
        self.error = error_text(chunk) if "error" in chunk or chunk.get("object") == "error" else None
        if self.error is not None:
            return
        if event == "sglext" and "sglext" not in chunk:
            chunk = {"sglext": chunk}
        usual = _USUAL_ROOT.issuperset(chunk)
        root = self._root
        for key in _USUAL_SAID if usual else _ROOT_SAID:
            value = chunk.get(key)
            if value is not None:
                root[key] = value
        if not usual:
            self._add_ids(chunk)
        listed: list[JsonValue] | None = list_at(chunk, "choices", "$")
        for position, value in enumerate(listed or ()):
            piece: JsonObject = value if value.__class__ is dict else object_at(value, f"$.choices[{position}]")
            index = piece.get("index")
            if type(index) is not int or index < 0:
                index = count_at(piece, "index", f"$.choices[{position}]") or 0
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {"index": index}
            _join_choice(choice, piece, position, self._slim)

    def _add_ids(self, chunk: JsonObject) -> None:
        """Keep the ids that a chunk has outside of its choices."""
        root = self._root
        extension = chunk.get("sglext")
        if extension is not None:
            said = object_at(extension, "$.sglext")
            kept = cast(JsonObject, root.setdefault("sglext", {}))
            kept.update({key: value for key, value in said.items() if value is not None})
        prompt = chunk.get("prompt_token_ids")
        if prompt is not None and root.setdefault("prompt_token_ids", prompt) != prompt:
            raise Unexpected("the same ids in every chunk", "different ones", "$.prompt_token_ids")

    @property
    def choices_seen(self) -> int:
        """How many choices have appeared."""
        return len(self._choices)

    def body(self) -> JsonObject:
        """Return the body so far; later chunks do not change it."""
        return {**self._root, "choices": [_whole(choice) for choice in self._choices.values()]}

    def missing_end(self) -> str | None:
        """Say what the protocol's end still lacks, None where the stream is complete."""
        for index, choice in self._choices.items():
            if not choice.get("finish_reason"):
                return f"choice {index} has no finish_reason"
        return None if self.done else f"no {DONE}"

    def reply(self) -> Reply:
        """Read what has come as a reply; without the protocol's end it is a truncated one."""
        if self.error is not None:
            return failed_reply(self._dialect, self.error)
        if not self._choices and not self.done:
            nothing = Reply(dialect=self._dialect, status=ResponseStatus.UNKNOWN, choices=(ReplyChoice(),))
            return truncated(nothing, "no choice")
        reply = read_document(self.body(), self._dialect, self._items_of, echo=self._echo)
        missing = self.missing_end()
        return reply if missing is None else truncated(reply, missing)


def _whole(value: JsonValue) -> JsonValue:
    """Copy what was joined, with every text put together; lists of ids and log-probabilities are shared."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if not isinstance(value, dict):
        return value
    whole: JsonObject = {}
    for key, part in cast(JsonObject, value).items():
        calls = key == "tool_calls" and isinstance(part, list)
        whole[key] = [_whole(call) for call in cast("list[JsonValue]", part)] if calls else _whole(part)
    return whole


def _join_choice(choice: JsonObject, piece: JsonObject, position: int, slim: bool) -> None:
    """Add one chunk's piece of a choice."""
    ids, held = piece.get("token_ids"), choice.get("token_ids")
    if isinstance(held, list) and isinstance(ids, list):
        cast("list[JsonValue]", held).extend(cast("list[JsonValue]", ids))
    elif ids is not None:
        _extend(choice, "token_ids", ids)
    usual = _USUAL_CHOICE.issuperset(piece)
    if not usual:
        _join_unusual(choice, piece, position)
    finish = piece.get("finish_reason")
    if finish is not None and choice.setdefault("finish_reason", finish) != finish:
        raise Unexpected("one finish reason", "a second, different one", f"$.choices[{position}].finish_reason")
    logprobs = piece.get("logprobs")
    if logprobs is not None:
        given: JsonObject = (
            logprobs if logprobs.__class__ is dict else object_at(logprobs, f"$.choices[{position}].logprobs")
        )
        if not slim or not _join_slim(choice, given):
            _join_lists(choice, "logprobs", given)
    lists = None if usual else piece.get("provider_specific_fields")
    if lists is not None:
        _join_extra(choice, lists)
    text = piece.get("text")
    if text is not None:
        where = f"$.choices[{position}]"
        choice["text"] = _joined(choice.get("text"), text_at(piece, "text", where), f"{where}.text")
    delta = piece.get("delta")
    if delta is not None:
        message = choice.get("message")
        if message is None:
            choice["message"] = message = JsonObject()
        said: JsonObject = delta if delta.__class__ is dict else object_at(delta, f"$.choices[{position}].delta")
        _join_delta(message, said, position)


def _extend(choice: JsonObject, key: str, ids: JsonValue) -> None:
    """Add ids to those that came; with anything among them that is no list there is none, as in a body."""
    held = choice.get(key)
    if not isinstance(ids, list):
        choice[key] = ids
    elif held is None:
        choice[key] = list(cast("list[JsonValue]", ids))
    elif isinstance(held, list):
        cast("list[JsonValue]", held).extend(cast("list[JsonValue]", ids))


def _join_unusual(choice: JsonObject, piece: JsonObject, position: int) -> None:
    """Add the ids and the last words that few chunks have."""
    ids = piece.get("response_token_ids")
    if ids is not None:
        _extend(choice, "response_token_ids", ids)
    for key in _LAST_SAID:
        if piece.get(key) is not None:
            choice[key] = piece[key]
    if piece.get("prompt_token_ids") is not None:
        choice.setdefault("prompt_token_ids", piece["prompt_token_ids"])


def _join_slim(choice: JsonObject, logprobs: JsonObject) -> bool:
    """Join the numbers of a Chat `logprobs` field; False: it is of another form, or an earlier one was."""
    content = logprobs.get("content")
    slim = choice.get("logprobs")
    if content is None:
        return isinstance(slim, SlimLogprobs)
    if content.__class__ is not list or (slim is not None and not isinstance(slim, SlimLogprobs)):
        return False
    if slim is None:
        slim = choice["logprobs"] = SlimLogprobs()
    slim.extend(content)
    return True


def _join_extra(holder: JsonObject, extra: JsonValue) -> None:
    """Join what a server adds of its own; of another shape than ours it is just what was said last."""
    if isinstance(extra, dict):
        _join_lists(holder, "provider_specific_fields", cast(JsonObject, extra))
    else:
        holder["provider_specific_fields"] = extra


def _join_lists(holder: JsonObject, key: str, piece: JsonObject) -> None:
    """Join the arrays of an object such as `logprobs`; of other values the last one counts."""
    there = holder.get(key)
    joined = cast(JsonObject, there) if isinstance(there, dict) else JsonObject()
    holder[key] = joined
    for name, value in piece.items():
        before = joined.get(name)
        if isinstance(before, list) and isinstance(value, list):
            cast("list[JsonValue]", before).extend(cast("list[JsonValue]", value))
        elif value is not None:
            joined[name] = list(cast("list[JsonValue]", value)) if isinstance(value, list) else value


def _join_delta(message: JsonObject, delta: JsonObject, position: int) -> None:
    for key, value in delta.items():
        before = message.get(key)
        if isinstance(before, _Pieces) and isinstance(value, str):
            before.append(value)
        elif value is None:
            message.setdefault(key, None)
        elif key == "role":
            message["role"] = value
        else:
            _join_member(message, delta, key, f"$.choices[{position}].delta")


def _join_member(message: JsonObject, delta: JsonObject, key: str, where: str) -> None:
    """Add what is no more of a text."""
    place, value = f"{where}.{key}", delta[key]
    if key == "tool_calls":
        _join_tool_calls(message, list_at(delta, key, where) or [], place)
    elif key == "function_call":
        call = object_at(message.get(key) or {}, place)
        message[key] = call
        _join_call(call, object_at(value, place), place)
    elif key == "provider_specific_fields":
        _join_extra(message, value)
    else:
        message[key] = _joined(message.get(key), value, place)


def _copy(value: JsonValue) -> JsonValue:
    return list(cast("list[JsonValue]", value)) if isinstance(value, list) else value


def _joined(before: JsonValue, piece: JsonValue, where: str) -> JsonValue:
    """Join text with text and array with array."""
    if isinstance(before, _Pieces) and isinstance(piece, str):
        before.append(piece)
        return before
    if before is None:
        return _Pieces((piece,)) if isinstance(piece, str) else _copy(piece)
    if isinstance(before, list) and isinstance(piece, list) and not isinstance(before, _Pieces):
        cast("list[JsonValue]", before).extend(cast("list[JsonValue]", piece))
        return cast(JsonValue, before)
    raise Unexpected("pieces of one kind", "different ones", where)


def _join_tool_calls(message: JsonObject, pieces: list[JsonValue], where: str) -> None:
    calls = cast("list[JsonObject]", message.get("tool_calls") or [])
    message["tool_calls"] = calls
    for position, value in enumerate(pieces):
        place = f"{where}[{position}]"
        piece = object_at(value, place)
        index = count_at(piece, "index", place)
        if index is None:  # some servers leave it out and send each call whole
            index = len(calls) if piece.get("id") is not None or not calls else len(calls) - 1
        if index > len(calls):
            raise Unexpected("tool calls in order", "a gap", f"{place}.index")
        if index == len(calls):
            calls.append({})
        _join_call(calls[index], piece, place, numbered=True)


def _join_call(call: JsonObject, piece: JsonObject, where: str, *, numbered: bool = False) -> None:
    """Join one call's piece: arguments and inputs grow, everything else is said once, its number is left out."""
    for key, value in piece.items():
        if numbered and key == "index":
            continue
        before = call.get(key)
        if isinstance(before, _Pieces) and isinstance(value, str):
            before.append(value)
        elif value is None:
            call.setdefault(key, None)
        elif isinstance(value, dict):
            place = f"{where}.{key}"
            nested = object_at(before if before is not None else {}, place)
            call[key] = nested
            _join_call(nested, object_at(value, place), place)
        elif key in _JOINED_IN_CALL:
            call[key] = _joined(before, value, f"{where}.{key}")
        elif before is None or before == "":
            call[key] = value
        elif value not in (before, ""):
            raise Unexpected("one value", "a second, different one", f"{where}.{key}")
