"""Whatever is proved, of any conversation and of good and awkward templates, is what the template writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.gateway.continuation.proof import ParentEnd, Proof, prove
from gristmill.records import ContinuationReason, Int32Array
from tests.gateway.continuation.templates import TEMPLATES, Template, tokens

Json = dict[str, Any]
Reason = ContinuationReason

USER: Json = {"role": "user", "content": "mend it"}
SAID: Json = {"role": "assistant", "content": "It is mended.", "reasoning": "First the wheel."}
CALLED: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":"x"}'}}],
}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "done"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def proved(
    template: Template,
    messages: Sequence[Json],
    reply: int,
    *,
    ends: str | None,
    ended: bool = True,
    tools: Sequence[Any] = (),
) -> Proof | ContinuationReason:
    """Prove with a template of ours; `ends` is the last token of the parent's sequence."""

    async def render(listed: Sequence[Json], asks: bool) -> Int32Array:
        return tokens(template.text(listed, tools, asks=asks))

    last = int(tokens(ends or "anything")[-1])
    return asyncio.run(prove(render, messages, reply, ParentEnd(last, ended)))


def suffix(found: Proof | ContinuationReason) -> list[int]:
    assert isinstance(found, Proof), found
    return found.suffix_T.tolist()


@pytest.mark.parametrize("name", ["plain", "thinking", "two ends", "ids behind", "open"])
def test_what_follows_a_turn_is_the_templates_own_text(name: str) -> None:
    """Most conversations with most templates are continued: what is refused is the exception."""
    template = TEMPLATES[name]
    for reply, new in ((SAID, [USER]), (CALLED, [RESULT]), (CALLED, [RESULT, USER]), (CALLED, [USER])):
        messages = [USER, reply, *new]
        found = proved(template, messages, 1, ends=template.calls_end if reply is CALLED else template.end)
        behind = "".join(template.turn(messages, at, ()) for at in range(2, len(messages))) + template.ask
        line = "\n" if template.turn(messages, 1, ()).endswith("\n") else ""
        assert suffix(found) == tokens(line + behind).tolist()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("words", Reason.END_OF_TURN_UNKNOWN),
        ("forgetful", Reason.WITNESSES_DISAGREE),
        ("counting", Reason.WITNESSES_DISAGREE),
    ],
)
def test_templates_of_which_nothing_is_proved(name: str, reason: ContinuationReason) -> None:
    """An awkward template costs the continuation, never a prompt that it would not have written."""
    template = TEMPLATES[name]
    messages = [USER, SAID, USER, SAID, USER]
    assert proved(template, messages, 3, ends=template.end) is reason


def test_text_that_moves_to_new_messages_is_seen() -> None:
    """A system text that the template puts into the last message would be left out, or said twice."""
    system = {"role": "system", "content": "be brief"}
    template = TEMPLATES["system last"]
    assert proved(template, [system, USER, SAID, USER], 2, ends=template.end) is Reason.WITNESSES_DISAGREE
    late = proved(template, [USER, SAID, system, USER], 1, ends=template.end)
    assert suffix(late) == tokens("\n<|u|>\nbe brief\n\nmend it<|end|>\n<|a|>\n").tolist()


def test_tools_that_move_behind_the_reply() -> None:
    """They end with the token that ends a turn: which of the two ends the reply is not proved."""
    template = TEMPLATES["tools last"]
    found = proved(template, [USER, SAID, USER], 1, ends=template.end, tools=TOOLS)
    assert found is Reason.END_OF_TURN_UNKNOWN
    assert (
        suffix(proved(template, [USER, SAID, USER], 1, ends=template.end)) == tokens("<|u|>mend it</s><|a|>").tolist()
    )


# ---- any conversation ------------------------------------------------------------------------------------------------

_words = st.text(alphabet="ab7.)\n <|end|>/su{}\"'é", max_size=12)
_arguments = st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(_words, st.integers(), st.none()), max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Json], int]:
    """Any conversation that ends with new messages after an assistant's turn, and the index of that turn."""
    messages: list[Json] = [{"role": "system", "content": draw(_words)}] if draw(st.booleans()) else []
    turns = draw(st.integers(1, 3))
    reply = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": draw(_words)})
        for step in range(draw(st.integers(1, 2))):
            calls = [
                {
                    "id": f"c{turn}{step}{number}",
                    "type": "function",
                    "function": {"name": draw(st.sampled_from("fg")), "arguments": json.dumps(draw(_arguments))},
                }
                for number in range(draw(st.integers(0, 2)))
            ]
            if messages[-1]["role"] == "assistant":
                break
            reply = len(messages)
            said = draw(st.one_of(st.none(), _words)) if calls else draw(_words)
            messages.append({"role": "assistant", "content": said, "tool_calls": calls, "reasoning": draw(_words)})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(_words)} for call in calls]
    new = messages[reply + 1 :]
    if not new or draw(st.booleans()):
        messages += [
            {"role": role, "content": draw(_words)} for role in draw(st.sampled_from([["user"], ["system", "user"]]))
        ]
    return messages, reply


@given(st.sampled_from(sorted(TEMPLATES)), conversations(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_whatever_is_proved_is_what_the_template_writes(
    name: str, conversation: tuple[list[Json], int], offered: bool, ended: bool, last: int
) -> None:
    """No prompt is ever wrong: it is refused, or goes on as the template itself does behind the parent's turn."""
    template, (messages, reply) = TEMPLATES[name], conversation
    tools = TOOLS if offered else []
    own = template.calls_end if messages[reply].get("tool_calls") else template.end
    found = proved(template, messages, reply, ends=("</s>", "<|eom|>", "word", own)[last], ended=ended, tools=tools)
    if not isinstance(found, Proof):
        return
    # What the template writes for the new messages, in this conversation.
    turn = template.turn(messages, reply, tools)
    assert own is not None
    behind = turn[turn.rindex(own) + len(own) :]
    behind += "".join(template.turn(messages, at, tools) for at in range(reply + 1, len(messages))) + template.ask
    assert found.suffix_T.tolist() == tokens(behind).tolist()
    assert found.end_id == tokens(own)[0]
