"""The engine's parsers: reasoning before `</think>`, calls between call tags, everything else content.

Invariant: as the engines do it. Without `</think>` a thinking model's text is all reasoning. In a whole reply a call's
arguments are parsed and written anew, and one that is no JSON leaves the entire text in the content; in a stream they
are passed on as they were sampled, character by character.

Not here: which text is parsed (sampling), how fields are served (the wire modules).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple, cast

__all__ = ["CallPiece", "Delta", "Message", "StreamParser", "parse_message"]

_THINK: Final = "<think>"
_THOUGHT: Final = "</think>"
_CALL: Final = "<tool_call>"
_CALLED: Final = "</tool_call>"
_CALLS: Final = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_NAME: Final = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS: Final = re.compile(r'"arguments"\s*:\s*(?=[{\[])')


class CallPiece(NamedTuple):
    """A piece of a call in a stream: the name comes once and first, then arguments."""

    number: int
    name: str | None = None
    arguments: str | None = None


class Delta(NamedTuple):
    """What some sampled text adds to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Message(NamedTuple):
    """A whole message; None where there is no such part."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...]


def parse_message(text: str, *, thinking: bool, tools: bool) -> Message:
    """Parse a whole reply.

    Args:
        text: what was sampled, without end of turn.
        thinking: a reasoning parser is on.
        tools: a tool parser is on.
    """
    reasoning: str | None = None
    if thinking:
        thought, closed, rest = text.partition(_THOUGHT)
        reasoning = thought.removeprefix(_THINK) or None
        if not closed:
            return Message(reasoning, None, ())
        text = rest
    calls = _whole_calls(text) if tools else ()
    if calls:
        text = text[: text.index(_CALL)]
    return Message(reasoning, None if calls and not text.strip() else text or None, calls)


def _whole_calls(text: str) -> tuple[tuple[str, str], ...]:
    calls: list[tuple[str, str]] = []
    for found in _CALLS.finditer(text):
        try:
            call: Any = json.loads(found[1] or found[2] or "")
            name, arguments = cast("dict[str, Any]", call)["name"], cast("dict[str, Any]", call)["arguments"]
        except (ValueError, KeyError, TypeError):
            return ()
        calls.append((str(name), json.dumps(arguments, ensure_ascii=False)))
    return tuple(calls)


class StreamParser:
    """The same parsers on a stream; used for one choice.

    Args:
        thinking: a reasoning parser is on.
        tools: a tool parser is on.
    """

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._tools = tools
        self._state = "begin" if thinking else "content"
        self._waiting = ""
        self._index = -1
        self._call = _CallScanner()

    @property
    def called(self) -> bool:
        """Whether a call was passed on."""
        return self._index > 0 or self._call.named

    def feed(self, text: str, *, final: bool = False) -> Delta:
        """Take the next text; at the end nothing is held back any more."""
        self._waiting += text
        reasoning = content = ""
        calls: list[CallPiece] = []
        while True:
            match self._state:
                case "begin":
                    if not final and _THINK.startswith(self._waiting) and self._waiting != _THINK:
                        break
                    self._waiting = self._waiting.removeprefix(_THINK)
                    self._state = "reasoning"
                case "reasoning":
                    taken, closed = self._until(_THOUGHT, final)
                    reasoning += taken
                    if not closed:
                        break
                    self._state = "content"
                case "content":
                    if not self._tools:
                        content += self._waiting
                        self._waiting = ""
                        break
                    taken, opened = self._until(_CALL, final)
                    content += taken if self._index < 0 else ""
                    if not opened:
                        break
                    self._index += 1
                    self._call = _CallScanner()
                    self._state = "call"
                case _:
                    taken, closed = self._until(_CALLED, final)
                    calls.extend(self._call.feed(taken, self._index))
                    if not closed:
                        break
                    self._state = "content"
        return Delta(reasoning, content, tuple(calls))

    def _until(self, tag: str, final: bool) -> tuple[str, bool]:
        """Take what stands before a tag, and the tag; without one, all that cannot be its beginning."""
        before, found, after = self._waiting.partition(tag)
        if found:
            self._waiting = after
            return before, True
        held = 0
        if not final:
            held = next((n for n in range(min(len(tag) - 1, len(before)), 0, -1) if tag.startswith(before[-n:])), 0)
        self._waiting = before[len(before) - held :]
        return before[: len(before) - held], False


class _CallScanner:
    """Reads one call as it is sampled: its name, then its arguments up to the bracket that closes them."""

    def __init__(self) -> None:
        self.named = False
        self._text = ""
        self._at: int | None = None
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._closed = False

    def feed(self, text: str, number: int) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        self._text += text
        if not self.named:
            name = _NAME.search(self._text)
            if name is None:
                return pieces
            self.named = True
            pieces.append(CallPiece(number, name=name[1]))
        if self._at is None:
            begin = _ARGUMENTS.search(self._text)
            self._at = None if begin is None else begin.end()
        if self._at is not None and not self._closed:
            taken = self._scan(self._at)
            if taken > self._at:
                pieces.append(CallPiece(number, arguments=self._text[self._at : taken]))
                self._at = taken
        return pieces

    def _scan(self, at: int) -> int:
        """Return how far the arguments reach."""
        for place in range(at, len(self._text)):
            sign = self._text[place]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._quoted = False
            elif sign == '"':
                self._quoted = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._closed = True
                    return place + 1
        return len(self._text)
