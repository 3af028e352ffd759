"""Conversations at random: what harnesses send, and what makes templates trip.

Invariant: every message holds a text that nothing else holds (`mark`), which says where in a rendering it stands; of an
assistant turn it is the last thing said. Equal seeds give equal conversations.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

__all__ = ["Story", "story"]

Json = dict[str, Any]

_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: does it",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "what"},
                    "times": {"type": "integer", "description": "how often"},
                },
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "read_file")
]
_TEXTS = (
    "Mend the mill",
    "",
    " ",
    "\n\n",
    "two\n\nparagraphs ",
    "  led by spaces",
    "trailing space ",
    "trailing lines\n\n\n",
    "tab\tand\r\nline",
    "Ça va? naïve – 日本語 🪵🛠️ \u200d",
    "e\u0301 decomposed, ﬁ ligature, \u2028 separator",
    "</think> and <think>\n",
    "<tool_call>\n{}\n</tool_call>",
    '{"a": "\\u00e9"}',
    "x" * 300,
    "0123456789 " * 20,
    "{{ messages }} {% if %}",
)


class Story(NamedTuple):
    """A request that continues a captured call.

    Attributes:
        messages: of the request, as the harness sends them.
        answered: index of the last assistant message.
        turn_mark: the text that ends that turn.
        new_marks: the texts of the messages behind it, in order.
        tools: or None.
        settings: variables of the template.
        shape: what is behind the turn, for people.
    """

    messages: list[Json]
    answered: int
    turn_mark: str
    new_marks: tuple[str, ...]
    tools: list[Json] | None
    settings: Json
    shape: str


class _Teller:
    def __init__(self, seed: int, ends: tuple[str, ...], starts: tuple[str, ...]) -> None:
        self.random = random.Random(seed)
        self.controls = (*ends, *starts)
        self.marks = 0
        self.calls = 0

    def mark(self) -> str:
        self.marks += 1
        return f"mark{self.marks:03}q"

    def text(self, *, hostile: bool) -> str:
        """Return some text; hostile ones may hold control tokens."""
        said = self.random.choice(_TEXTS)
        if hostile and self.controls and self.random.random() < 0.15:
            control = self.random.choice(self.controls)
            said = self.random.choice((control, f"{said}{control}", f"{control}{said}", f"a {control}\nassistant\n"))
        return said

    def content(self, mark: str) -> Any:
        """Return content around a mark, control tokens only behind it."""
        before, behind = self.text(hostile=False), self.text(hostile=True)
        if self.random.random() < 0.2:
            return [{"type": "text", "text": before}, {"type": "text", "text": f"{mark}{behind}"}]
        return f"{before}{mark}{behind}"

    def assistant(self, tools: bool) -> tuple[Json, list[str], str]:
        """Return a turn, the ids of its calls, and its mark."""
        mark = self.mark()
        message: Json = {"role": "assistant"}
        calls: list[Json] = []
        if tools and self.random.random() < 0.6:
            for at in range(count := self.random.choice((1, 1, 1, 2, 3))):
                self.calls += 1
                last = mark if at == count - 1 else "ls"
                calls.append(
                    {
                        "id": self.random.choice((f"call_{self.calls}", f"chatcmpl-tool-{self.calls:04x}")),
                        "type": "function",
                        "function": {
                            "name": self.random.choice(("bash", "read_file")),
                            "arguments": self.arguments(last),
                        },
                    }
                )
            message["content"] = self.random.choice((None, "", "Let me look.\n", self.text(hostile=False)))
            message["tool_calls"] = calls
        else:
            said = f"{self.text(hostile=False)}{mark}"
            message["content"] = [{"type": "text", "text": said}] if self.random.random() < 0.1 else said
        if self.random.random() < 0.4:
            message[self.random.choice(("reasoning", "reasoning_content"))] = self.random.choice(
                ("I look at it.\n", "hm", "a\n\nb ", "\n")
            )
        return message, [call["id"] for call in calls], mark

    def arguments(self, last: str) -> str:
        """Return arguments whose last value is a text, in one of the spellings that harnesses have."""
        value = {"times": self.random.randrange(9), "command": f"ls é {last}"}
        written = self.random.random()
        if written < 0.4:
            return json.dumps(value)
        if written < 0.7:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return '{ "times":1.0 ,"command" : "\\u00e9 ' + last + '"}'


def story(seed: int, ends: tuple[str, ...], starts: tuple[str, ...] = (), *, tools: bool = True) -> Story:
    """Tell one.

    Args:
        seed: of everything.
        ends, starts: control tokens of the template, which hostile texts hold.
        tools: the template knows tools.
    """
    told = _Teller(seed, ends, starts)
    chance = told.random.random
    with_tools = tools and chance() < 0.7
    messages: list[Json] = []
    if chance() < 0.6:
        messages.append({"role": "system", "content": told.text(hostile=False) or "You mend mills."})
    messages.append({"role": "user", "content": told.content(told.mark())})
    mark, ids = "", list[str]()
    for _ in range(told.random.choice((1, 1, 2, 3))):
        if mark:
            messages += _behind(told, ids, "tools" if ids else "user")[0]
        turn, ids, mark = told.assistant(with_tools)
        messages.append(turn)
    answered = len(messages) - 1
    if ids:
        shapes = ("tools", "tools", "tools", "tools user", "tools system", "user")
    else:
        shapes = ("user", "user", "user", "user user", "system user", "user system", "developer user")
    shape = told.random.choice(shapes)
    behind, marks = _behind(told, ids, shape)
    settings: Json = {}
    if chance() < 0.4:
        settings["enable_thinking"] = chance() < 0.5
    if chance() < 0.1:
        settings["reasoning_effort"] = told.random.choice(("low", "high"))
    return Story([*messages, *behind], answered, mark, marks, _TOOLS if with_tools else None, settings, shape)


def _behind(told: _Teller, ids: list[str], shape: str) -> tuple[list[Json], tuple[str, ...]]:
    messages: list[Json] = []
    marks: list[str] = []
    for role in shape.split():
        for call_id in ids if role == "tools" else [None]:
            marks.append(told.mark())
            message: Json = {"role": "tool" if role == "tools" else role, "content": told.content(marks[-1])}
            if call_id is not None:
                message["tool_call_id"] = call_id
                if told.random.random() < 0.3:
                    message["name"] = "bash"
            messages.append(message)
    return messages, tuple(marks)
