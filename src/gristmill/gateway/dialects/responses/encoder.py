"""One Chat reply as a Responses stream or object.

Invariant: a body is encoded as a stream of one piece, so both give the same object. Text is served as it came, white
space too; only what is empty makes no item. An item ends where the next begins; the last one, and the response, end
when the engine's stream has, and all of that is held: a client that runs a tool as soon as its item is done waits for
the record. What is said after a call makes a new item, since the items before it are done.

Not here: items (growing, items), events (events), how a reply ended (response).
"""

from __future__ import annotations

from collections.abc import Mapping

from gristmill.captures.fields import count_at, list_at, name_at, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.gateway.dialects.responses.events import EventWriter
from gristmill.gateway.dialects.responses.growing import Call, Said, Speech
from gristmill.gateway.dialects.responses.items import COMPLETED, IN_PROGRESS, INCOMPLETE
from gristmill.gateway.dialects.responses.logprobs import TextLogprobs
from gristmill.gateway.dialects.responses.response import (
    FAILED,
    Ending,
    ending_of,
    error_code,
    failed,
    opening,
    usage_of,
)
from gristmill.gateway.dialects.responses.tools import Tool, ToolKind
from gristmill.gateway.front import NOTHING, JsonObject, Served, ServedNames

__all__ = ["ResponsesEncoder"]


class ResponsesEncoder:
    """Encodes one reply.

    Args:
        body: the client's request.
        names: what the client is told.
        tools: the client's tools by the names that the engine knows.
        logprobs: how many alternatives the client wants beside each log-probability, None where it wants none at all.
    """

    def __init__(
        self, body: JsonObject, names: ServedNames, tools: Mapping[str, Tool], logprobs: int | None = None
    ) -> None:
        self._response = opening(body, names)
        self._token = names.token
        self._tools = tools
        self._logprobs = None if logprobs is None else TextLogprobs(logprobs)
        self._writer = EventWriter()
        self._output: list[JsonObject] = []
        self._open: Said | Call | None = None
        self._calls = 0
        self._usage: JsonObject | None = None
        self._finish: str | None = None
        self._held_from: int | None = None
        self._final: JsonObject | None = None
        self._began = False

    def begin(self) -> bytes:
        """Return `response.created` and `response.in_progress`."""
        self._began = True
        started = {"response": self._response}
        return self._writer.event("response.created", started) + self._writer.event("response.in_progress", started)

    def chunk(self, chunk: JsonObject) -> Served:
        """Encode one chunk; nothing of it is held, unless it comes after the finish reason."""
        if chunk.get("usage") is not None:
            self._usage = usage_of(chunk["usage"])
        if chunk.get("error") is not None:
            raise Unexpected("a chunk", "an error", "$.error")
        choices = list_at(chunk, "choices", "$")
        if not choices:
            return NOTHING
        finished = self._finish is not None
        events = b""
        for position, value in enumerate(choices):
            where = f"$.choices[{position}]" if position else "$.choices[0]"
            events += self._choice(object_at(value, where), where)
        if finished:
            return Served(held=events)
        if self._finish is not None:
            self._held_from = self._writer.number
        return Served(now=events)

    def end(self) -> Served:
        """Encode the end: the last item is done, and the response."""
        if self._held_from is None:
            self._held_from = self._writer.number
        ending = ending_of(self._finish)
        events = b""
        output = self._output
        if self._open is not None and ending.status == FAILED:
            output = self._so_far()
        elif self._open is not None:
            item = self._item(self._open, ending.item_status)
            events = self._done(self._open, item)
            output = [*output, item]
        return Served(held=events + self._conclude(ending, output))

    def body(self, body: JsonObject) -> JsonObject:
        """Encode a whole reply."""
        self._usage = usage_of(body.get("usage"))
        [choice, *others] = list_at(body, "choices", "$") or [None]
        if choice is None or others:
            raise Unexpected("one choice", f"{len(others)} more" if others else "none", "$.choices")
        where = "$.choices[0]"
        said = object_at(choice, where)
        message = object_at(said.get("message"), f"{where}.message")
        calls = list_at(message, "tool_calls", f"{where}.message") or []
        numbered = [
            {**object_at(call, f"{where}.message.tool_calls[{index}]"), "index": index}
            for index, call in enumerate(calls)
        ]
        self._choice({**said, "delta": {**message, "tool_calls": numbered}}, where)
        self.end()
        return self.served()

    def failure(self, status: int, message: str) -> bytes:
        """Return `response.failed`, after which nothing is sent; what was held and never sent does not count."""
        events = b"" if self._began else self.begin()
        if self._held_from is not None:
            self._writer.number = self._held_from
        return events + self._conclude(failed(error_code(status), message), self._so_far())

    def served(self) -> JsonObject:
        """Return the response; before it ended, as far as the client knows it."""
        if self._final is not None:
            return self._final
        return {**self._response, "output": self._so_far()}

    # The parts of a chunk

    def _choice(self, choice: JsonObject, where: str) -> bytes:
        if choice.get("index"):
            raise Unexpected("choice 0 alone", "another", f"{where}.index")
        if self._logprobs is not None:
            self._logprobs.add(choice.get("logprobs"), f"{where}.logprobs")
        delta = choice.get("delta")
        events = b"" if delta is None else self._delta(object_at(delta, f"{where}.delta"), f"{where}.delta")
        finish = name_at(choice, "finish_reason", where)
        if finish is not None:
            self._finish = finish
        return events

    def _delta(self, delta: JsonObject, where: str) -> bytes:
        events = b""
        thought = _thought(delta, where)
        if thought:
            events += self._say(Speech.REASONING, thought)
        content = text_at(delta, "content", where)
        if content:
            events += self._say(Speech.TEXT, content)
        refusal = text_at(delta, "refusal", where)
        if refusal:
            events += self._say(Speech.REFUSAL, refusal)
        calls = delta.get("tool_calls")
        if calls:
            for position, raw in enumerate(list_at(delta, "tool_calls", where) or ()):
                place = f"{where}.tool_calls[{position}]"
                events += self._call(object_at(raw, place), place)
        for name in ("function_call", "audio"):
            if delta.get(name) is not None:
                raise Unexpected("text and tool calls", "something else", f"{where}.{name}")
        return events

    def _say(self, speech: Speech, text: str) -> bytes:
        said = self._open
        if isinstance(said, Said) and said.speech is speech and said.head is not None:
            said.pieces.append(text)
            return self._writer.delta(said.head, text)
        events = self._close()
        said = Said(speech, self._token, len(self._output), self._logprobs)
        self._open = said
        events += self._opened(said, said.begun())
        said.pieces.append(text)
        return events + self._writer.delta(self._head_of(said), text)

    def _call(self, piece: JsonObject, where: str) -> bytes:
        kind = text_at(piece, "type", where)
        if kind not in {None, "", "function"}:
            raise Unexpected("a function call", "another kind", f"{where}.type")
        function = object_at(piece.get("function") or {}, f"{where}.function")
        arguments = text_at(function, "arguments", f"{where}.function") or ""
        events = b""
        call = self._open
        index = count_at(piece, "index", where)
        if index is None:
            index = self._calls if piece.get("id") or not isinstance(call, Call) else call.index
        if not isinstance(call, Call) or call.index != index:
            if index < self._calls and not arguments:
                return b""
            if index != self._calls:
                raise Unexpected("the pieces of one call together, calls in order", "another order", f"{where}.index")
            name = text_at(function, "name", f"{where}.function")
            if not name:
                raise Unexpected("the name of the called function first", "none", f"{where}.function.name")
            events = self._close()
            call_id = name_at(piece, "id", where) or f"call_{self._token}_{index}"
            call = self._open = Call(index, name, call_id, self._token, len(self._output))
            self._calls += 1
        if arguments:
            call.pieces.append(arguments)
        if call.head is not None:
            return events + (self._writer.delta(call.head, arguments) if arguments else b"")
        if self._kind(call) is not ToolKind.FUNCTION:
            return events
        events += self._opened(call, self._item(call, IN_PROGRESS))
        return events + (self._writer.delta(self._head_of(call), "".join(call.pieces)) if call.pieces else b"")

    # Items

    def _kind(self, call: Call) -> ToolKind:
        tool = self._tools.get(call.name)
        return ToolKind.FUNCTION if tool is None else tool.kind

    def _item(self, growing: Said | Call, status: str) -> JsonObject:
        if isinstance(growing, Said):
            return growing.item(status)
        return growing.item(self._tools.get(growing.name), status)

    def _opened(self, growing: Said | Call, item: JsonObject) -> bytes:
        growing.head = self._writer.head(item, growing.output_index)
        return self._writer.opened(item, growing.output_index)

    @staticmethod
    def _head_of(growing: Said | Call) -> tuple[bytes, bytes]:
        assert growing.head is not None
        return growing.head

    def _close(self) -> bytes:
        """End the item that is being said, since another begins."""
        growing, self._open = self._open, None
        if growing is None:
            return b""
        item = self._item(growing, COMPLETED)
        self._output.append(item)
        return self._done(growing, item)

    def _done(self, growing: Said | Call, item: JsonObject) -> bytes:
        if growing.head is None:
            return self._writer.whole(item, growing.output_index)
        return self._writer.closed(item, growing.output_index)

    def _so_far(self) -> list[JsonObject]:
        """Return the items that the client was told of; the one that was not done is incomplete."""
        growing = self._open
        if growing is None or growing.head is None:
            return self._output
        item = growing.unfinished() if isinstance(growing, Said) else self._item(growing, INCOMPLETE)
        return [*self._output, item]

    def _conclude(self, ending: Ending, output: list[JsonObject]) -> bytes:
        self._final = {
            **self._response,
            "status": ending.status,
            "output": output,
            "error": ending.error,
            "incomplete_details": None if ending.reason is None else {"reason": ending.reason},
            "usage": self._usage,
        }
        return self._writer.event(f"response.{ending.status}", {"response": self._final})


def _thought(delta: JsonObject, where: str) -> str | None:
    """Return what was thought, under either of the names that engines have for it."""
    first, second = text_at(delta, "reasoning", where), text_at(delta, "reasoning_content", where)
    if first and second and first != second:
        raise Unexpected("one reasoning text", "two different ones", f"{where}.reasoning_content")
    return first or second
