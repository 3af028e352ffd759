"""A Chat reply as a message: streamed chunks as events, a whole body as an object, by the same steps.

Invariant: the served message is what the stream's events add up to, and a body of the same content gives the same
message. Nothing of the engine's token fields is in it. From the finish reason on everything is held: the input of tool
calls, the stop reason, the end.

Blocks come in the order of arrival: thinking, text, tool calls, then whatever came after a tool call began. The first
call's block is opened at once and gets empty deltas while its arguments grow, so that no client takes the stream for
stalled; inputs follow when they are complete (arguments.py says why), with the finish reason. A reply without anything
in it has one empty text block, because clients look at the first.

A reply is complete only by a finish reason that says so. One that was aborted, or ended by a reason unknown here, gets
no stop reason: its stream ends with an `error` event, which client libraries raise (`overloaded_error` for an abort,
which harnesses retry), and its body has `stop_reason: null`.

The signature of a thinking block is made from the call's own token and means nothing; it is ignored when it comes back.

Not here: events as bytes (events), inputs of tools (arguments), a served message streamed again (replay).
"""

from __future__ import annotations

from typing import Any, Final

from gristmill.captures.choices import error_text
from gristmill.captures.fields import count_at, list_at, name_at, object_at, text_at
from gristmill.captures.reply import ABORT_REASONS, Unexpected
from gristmill.gateway.dialects.messages.arguments import input_of
from gristmill.gateway.dialects.messages.calls import ToolCall, ToolCalls
from gristmill.gateway.dialects.messages.errors import error_body
from gristmill.gateway.dialects.messages.events import STOPPED, block_start, block_stop, delta_head, event, quoted
from gristmill.gateway.dialects.messages.usage import prompt_length, usage_of_chat
from gristmill.gateway.front import NOTHING, JsonObject, Served, ServedNames

__all__ = ["MessagesEncoder"]

_STOP_REASONS: Final = {
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "stop": "end_turn",
}
_UNCARRIED: Final = ("audio", "function_call")
_SAID: Final = (("reasoning", "thinking"), ("reasoning_content", "thinking"), ("content", "text"), ("refusal", "text"))


class _Block:
    """A content block of the message; its text grows by `pieces`, its other fields are said once."""

    def __init__(self, kind: str, **fields: Any) -> None:
        self.kind = kind
        self.fields = fields
        self.pieces: list[str] = []

    def value(self) -> JsonObject:
        text = {} if self.kind == "tool_use" else {self.kind: "".join(self.pieces)}
        return {"type": self.kind, **text, **self.fields}


class MessagesEncoder:
    """Encodes one reply, as `Encoder`."""

    def __init__(self, names: ServedNames) -> None:
        self._names = names
        self._usage: JsonObject = {"input_tokens": 0, "output_tokens": 0}
        self._chat_usage: Any = None
        self._sampled = 0
        self._started = False
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._head = b""
        self._calls = ToolCalls()
        self._late: list[_Block] = []
        self._finish: str | None = None
        self._stopped_by: Any = None
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> bytes:
        """Return nothing: the first event says how long the prompt is, which the engine's first chunk tells."""
        return b""

    def chunk(self, chunk: JsonObject) -> Served:
        """Encode one chunk of a Chat stream, as `Encoder.chunk`."""
        choices = list_at(chunk, "choices", "$")
        if not choices and (failed := error_text(chunk)) is not None:
            raise Unexpected("a chunk", f"an error: {failed}", "$")
        now: list[bytes] = []
        if not self._started:
            self._start(chunk, now)
        if chunk.get("usage") is not None:
            self._chat_usage = chunk["usage"]
        held: list[bytes] = []
        for position, raw in enumerate(choices or ()):
            where = f"$.choices[{position}]"
            choice = object_at(raw, where)
            if count_at(choice, "index", where):
                raise Unexpected("one choice", "another", f"{where}.index")
            delta = choice.get("delta")
            if delta:
                self._say(object_at(delta, f"{where}.delta"), f"{where}.delta", now)
            self._take_end(choice, where, held)
        return Served(b"".join(now), b"".join(held)) if now or held else NOTHING

    def end(self) -> Served:
        """Encode the end of the stream, as `Encoder.end`."""
        if self._finish is None:
            return Served(held=self.failure(500, "the engine's stream ended without a finish reason"))
        if self._stop_reason is None:
            aborted = self._finish in ABORT_REASONS
            message = f"the engine ended with finish_reason {self._finish!r}: the reply is not complete"
            return Served(held=self.failure(529 if aborted else 500, message))
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        self._usage = usage_of_chat(self._chat_usage) if self._chat_usage else self._counted()
        return Served(held=event({"type": "message_delta", "delta": delta, "usage": self._usage}) + STOPPED)

    def body(self, body: JsonObject) -> JsonObject:
        """Encode a whole Chat reply, as `Encoder.body`."""
        choices = list_at(body, "choices", "$")
        failed = error_text(body)
        if failed is not None or not choices or len(choices) > 1:
            raise Unexpected("one choice", failed or f"{len(choices or ())}", "$.choices")
        where = "$.choices[0]"
        choice = object_at(choices[0], where)
        message = object_at(choice.get("message"), f"{where}.message")
        calls = list_at(message, "tool_calls", f"{where}.message")
        if calls:
            numbered = [{**object_at(call, where), "index": index} for index, call in enumerate(calls)]
            message = {**message, "tool_calls": numbered}
        self.chunk({**body, "choices": [{**choice, "delta": message}]})
        self.end()
        return self.served()

    def failure(self, status: int, message: str) -> bytes:
        """Return the event that makes a client's stream fail; what was served of the message has no stop reason."""
        self._stop_reason = self._stop_sequence = None
        return event(error_body(status, message))

    def served(self) -> JsonObject:
        """Return the message, as `Encoder.served`."""
        return {
            "id": f"msg_{self._names.token}",
            "type": "message",
            "role": "assistant",
            "model": self._names.model,
            "content": [block.value() for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": dict(self._usage),
        }

    # What a chunk says

    def _start(self, chunk: JsonObject, out: list[bytes]) -> None:
        self._started = True
        self._usage["input_tokens"] = prompt_length(chunk) or 0
        out.append(event({"type": "message_start", "message": self.served()}))

    def _say(self, delta: JsonObject, where: str, out: list[bytes]) -> None:
        for key in _UNCARRIED:
            if delta.get(key) is not None:
                raise Unexpected(f"no {key}", "one", f"{where}.{key}")
        thought = ""
        for key, kind in _SAID:
            text = text_at(delta, key, where)
            if not text or (key == "reasoning_content" and text == thought):
                continue
            if key == "reasoning":
                thought = text
            self._grow(kind, text, where, out)
        calls = list_at(delta, "tool_calls", where)
        if calls:
            self._refuse_after_finish(where)
            self._calls.add(calls, f"{where}.tool_calls")
            first = self._calls[0]
            if first.id and first.name and not self._call_is_open():
                self._open_call(first, 0, out)
            self._keep_alive(out)

    def _refuse_after_finish(self, where: str) -> None:
        if self._finish is not None:
            raise Unexpected("nothing after the finish reason", "more of the reply", where)

    def _grow(self, kind: str, text: str, where: str, out: list[bytes]) -> None:
        self._refuse_after_finish(where)
        if self._calls:
            if not self._late or self._late[-1].kind != kind:
                self._late.append(_new_block(kind))
            self._late[-1].pieces.append(text)
            self._keep_alive(out)
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._open_block(_new_block(kind), out)
        block.pieces.append(text)
        out.append(self._head + quoted(text))

    def _call_is_open(self) -> bool:
        return self._open is not None and self._open.kind == "tool_use"

    def _keep_alive(self, out: list[bytes]) -> None:
        if self._call_is_open():
            out.append(self._head + quoted(""))

    # Blocks

    def _open_block(self, block: _Block, out: list[bytes]) -> _Block:
        self._close_block(out)
        index = len(self._blocks)
        out.append(block_start(index, block.value()))
        self._blocks.append(block)
        self._open = block
        self._head = delta_head(index, block.kind)
        return block

    def _close_block(self, out: list[bytes]) -> None:
        if self._open is None:
            return
        index = len(self._blocks) - 1
        if self._open.kind == "thinking":
            signature = f"unsigned.{self._names.token}.{index}"
            self._open.fields["signature"] = signature
            out.append(delta_head(index, "signature") + quoted(signature))
        out.append(block_stop(index))
        self._open = None

    def _open_call(self, call: ToolCall, index: int, out: list[bytes]) -> None:
        call_id = call.id or f"toolu_{self._names.token}_{index}"
        self._open_block(_Block("tool_use", id=call_id, name=call.name, input={}), out)

    # The end

    def _take_end(self, choice: JsonObject, where: str, out: list[bytes]) -> None:
        self._sampled += len(list_at(choice, "token_ids", where) or ())
        finish = name_at(choice, "finish_reason", where)
        if finish is None:
            return
        if self._finish is not None:
            raise Unexpected("one finish reason", "a second one", f"{where}.finish_reason")
        self._finish = finish
        if finish not in _STOP_REASONS:
            return
        stopped_by = choice.get("stop_reason")
        self._stopped_by = choice.get("matched_stop") if stopped_by is None else stopped_by
        complete = self._serve_calls(out)
        for block in self._late:
            self._open_block(_new_block(block.kind), out).pieces = block.pieces
            out.append(self._head + quoted("".join(block.pieces)))
        if not self._blocks:
            self._open_block(_new_block("text"), out)
        self._close_block(out)
        self._stop(finish, complete)

    def _serve_calls(self, out: list[bytes]) -> bool:
        """Serve the calls with their inputs; tell whether there are any, the last one with arguments that are whole."""
        complete = False
        for index, call in enumerate(self._calls):
            if index or not self._call_is_open():
                self._open_call(call, index, out)
            given = input_of(call.arguments)
            self._blocks[-1].fields["input"] = given.value
            if given.text:
                out.append(self._head + quoted(given.text))
            complete = given.valid
        return complete

    def _stop(self, finish: str, calls_complete: bool) -> None:
        """Choose the stop reason: a stop string wins over calls that it may have cut, the token limit over both."""
        reason = _STOP_REASONS[finish]
        if reason in {"end_turn", "tool_use"}:
            if calls_complete:
                reason = "tool_use"
            elif isinstance(self._stopped_by, str):
                reason, self._stop_sequence = "stop_sequence", self._stopped_by
            elif self._calls:
                reason = "tool_use"
        self._stop_reason = reason

    def _counted(self) -> JsonObject:
        """Make the counts of a reply that brought none of its own."""
        return {**self._usage, "output_tokens": self._sampled}


def _new_block(kind: str) -> _Block:
    return _Block(kind, signature="") if kind == "thinking" else _Block(kind)
