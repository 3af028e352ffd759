"""Chat templates of our own, good and awkward ones, tokenised by a tokenizer that merges whatever it can.

Each renders a conversation turn by turn, so that a test knows where a turn ends without asking what it tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gristmill.records import Int32Array

__all__ = ["TEMPLATES", "Template", "tokens"]

Json = dict[str, Any]

_CONTROLS: Final = ("<|a|>", "<|u|>", "<|t|>", "<|s|>", "<|end|>", "<|eom|>", "</s>")
_controls = re.compile("(" + "|".join(map(re.escape, _CONTROLS)) + ")")
_pieces = re.compile(r"[A-Za-z]+|\d+|\n+|[^\sA-Za-z0-9]+\n*| +")
_known: dict[str, int] = {}


def tokens(text: str) -> Int32Array:
    """Tokenise: control tokens; words, numbers, runs of line ends, and signs with the line ends behind them."""
    pieces: list[str] = []
    for part in _controls.split(text):
        pieces += [part] if part in _CONTROLS else _pieces.findall(part)
    return np.array([_known.setdefault(piece, len(_known)) for piece in pieces], np.int32)


class Template(NamedTuple):
    """A template: `turn` renders one message, given all and its place; `ask` is what asks for a reply.

    `end` is what a model samples at the end of a turn of text, `calls_end` of one that calls tools; None where the
    template has nothing that ends one.
    """

    turn: Callable[[Sequence[Json], int, Sequence[Any]], str]
    ask: str
    end: str | None
    calls_end: str | None

    def text(self, messages: Sequence[Json], tools: Sequence[Any] = (), *, asks: bool = True) -> str:
        """Render a conversation."""
        return "".join(self.turn(messages, at, tools) for at in range(len(messages))) + (self.ask if asks else "")


def _calls(message: Mapping[str, Any], *, ids: bool = False) -> str:
    made: list[str] = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(json.loads(call["function"]["arguments"]))
        tail = f', "id": "{call["id"]}"' if ids else ""
        made.append(f'[{{"name": "{call["function"]["name"]}", "arguments": {arguments}{tail}}}]')
    return "\n".join(made)


def _said(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()


_MARK: Final = {"assistant": "<|a|>", "user": "<|u|>", "tool": "<|t|>", "system": "<|s|>"}


def _plain(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """One turn after the other, each with the same end; tools stand before the first."""
    message = messages[at]
    shown = f"<|s|>{json.dumps(tools)}<|end|>\n" if tools and not at else ""
    return f"{shown}{_MARK[message['role']]}\n{_said(message)}{_calls(message)}<|end|>\n"


def _thinking(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """What was thought stays only behind the last user message, and the last turn of all has an empty thought."""
    message = messages[at]
    last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=0)
    thought = message.get("reasoning") if at > last else None
    if message["role"] == "assistant" and (thought or at == len(messages) - 1):
        message = {**message, "content": f"[{thought or ''}]\n\n{_said(message)}"}
    return _plain([*messages[:at], message, *messages[at + 1 :]], at, tools)


def _two_ends(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """A turn that calls tools ends with a token of its own."""
    text = _plain(messages, at, tools)
    return text.replace("<|end|>\n", "<|eom|>") if messages[at].get("tool_calls") else text


def _ids_behind(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """Ids of calls stand behind their arguments, and again with the results."""
    message = messages[at]
    named = f"{message['tool_call_id']}:" if message["role"] == "tool" else ""
    return f"{_MARK[message['role']]}{named}{_said(message)}{_calls(message, ids=True)}</s>"


def _tools_last(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """Tools stand before the last user message, wherever that is."""
    last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=-1)
    shown = f"<|s|>{json.dumps(tools)}</s>" if tools and at == last else ""
    return shown + _ids_behind(messages, at, [])


def _system_last(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """What the system says is put into the last user message."""
    message = messages[at]
    if message["role"] == "system":
        return ""
    last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=-1)
    system = "\n".join(_said(one) for one in messages if one["role"] == "system")
    if at == last and system:
        message = {**message, "content": f"{system}\n\n{_said(message)}"}
    return _plain([*messages[:at], message, *messages[at + 1 :]], at, tools)


def _words(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """No control tokens at all: what ends a turn can be part of a token of its text."""
    return f"{messages[at]['role']}: {_said(messages[at])}{_calls(messages[at])}\n\n"


def _open(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """The last turn of all is never closed."""
    text = _plain(messages, at, tools)
    return text.removesuffix("<|end|>\n") if at == len(messages) - 1 else text


def _forgetful(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """What an assistant said is not shown."""
    message = messages[at]
    hidden = {"role": "assistant", "content": "something"} if message["role"] == "assistant" else message
    return _plain([*messages[:at], hidden, *messages[at + 1 :]], at, tools)


def _counting(messages: Sequence[Json], at: int, tools: Sequence[Any]) -> str:
    """Every message says how many there are, so that new ones change it."""
    return f"{len(messages)}{_plain(messages, at, tools)}"


TEMPLATES: Final[Mapping[str, Template]] = {
    "plain": Template(_plain, "<|a|>\n", "<|end|>", "<|end|>"),
    "thinking": Template(_thinking, "<|a|>\n", "<|end|>", "<|end|>"),
    "two ends": Template(_two_ends, "<|a|>\n", "<|end|>", "<|eom|>"),
    "ids behind": Template(_ids_behind, "<|a|>", "</s>", "</s>"),
    "tools last": Template(_tools_last, "<|a|>", "</s>", "</s>"),
    "system last": Template(_system_last, "<|a|>\n", "<|end|>", "<|end|>"),
    "words": Template(_words, "assistant: ", None, None),
    "open": Template(_open, "<|a|>\n", "<|end|>", "<|end|>"),
    "forgetful": Template(_forgetful, "<|a|>\n", "<|end|>", "<|end|>"),
    "counting": Template(_counting, "<|a|>\n", "<|end|>", "<|end|>"),
}
