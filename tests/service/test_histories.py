"""Session files as the harnesses write them, with words of our own."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.captures.exact import dumps
from gristmill.service.histories.claude_code import read_claude_code
from gristmill.service.histories.codex import read_codex
from gristmill.service.histories.history import ReturnedHistory, Unreadable
from gristmill.service.histories.mini_swe_agent import read_mini_swe_agent
from gristmill.service.histories.opencode import read_opencode
from gristmill.service.histories.pi import read_pi

Json = dict[str, Any]

SESSION = "11111111-2222-3333-4444-555555555555"
EARLY, LATE = "2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z"
SINCE_s = 1767268800.0
"""2026-01-01T12:00:00Z"""


def write_lines(path: Path, lines: Sequence[Json]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plain(history: ReturnedHistory) -> Any:
    """The result with its numbers as Python has them."""
    assert history.missing is None, history.missing
    return json.loads(dumps(history.value))


# Claude Code


def event(uuid: str, parent: str | None, kind: str = "user", **more: Any) -> Json:
    return {"uuid": uuid, "parentUuid": parent, "type": kind, "timestamp": LATE, "isSidechain": False, **more}


def reply(uuid: str, parent: str | None, message_id: str, block: Json, **more: Any) -> Json:
    message = {"id": message_id, "role": "assistant", "model": "m", "stop_reason": "end_turn", "content": [block]}
    return event(uuid, parent, "assistant", **{"message": message, **more})


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def claude(folder: Path, lines: Sequence[Json], session: str = SESSION) -> Path:
    return write_lines(folder / "projects" / "-work" / f"{session}.jsonl", lines)


def test_claude_code_replies_by_their_ids(tmp_path: Path) -> None:
    """One reply stands on several lines; taken one by one they match no call."""
    use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
    path = claude(
        tmp_path,
        [
            {"type": "queue-operation", "sessionId": SESSION},
            event("a", None, message={"role": "user", "content": "Do it."}),
            reply("b", "a", "msg_1", {"type": "thinking", "thinking": "Hm.", "signature": "s"}),
            reply("c", "b", "msg_1", text("Looking.")),
            reply("d", "c", "msg_1", use),
            event("e", "d", message={"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}),
            reply("f", "e", "msg_2", text("Done.")),
            {"type": "last-prompt", "leafUuid": "f"},
        ],
    )
    history = read_claude_code(tmp_path, {SESSION}, SINCE_s)
    assert history.sources == (str(path),)
    result = plain(history)
    assert [envelope["id"] for envelope in result["responses"]] == ["msg_1", "msg_2"]
    [message] = result["responses"][0]["output"]
    assert message["role"] == "assistant"
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert result["response"] == {"id": "msg_2"}
    assert {envelope["metadata"]["session_id"] for envelope in result["responses"]} == {SESSION}


def test_claude_code_what_was_rewound_is_not_returned(tmp_path: Path) -> None:
    """A branch that the user threw away did not earn the reward."""
    claude(
        tmp_path,
        [
            event("a", None),
            reply("b", "a", "msg_1", text("Wrong.")),
            event("x", "b"),
            reply("y", "x", "msg_2", text("Very wrong.")),
            event("c", "b"),
            reply("d", "c", "msg_3", text("Right.")),
        ],
    )
    result = plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))
    assert [envelope["id"] for envelope in result["responses"]] == ["msg_1", "msg_3"]


def test_claude_code_parallel_tools_that_answer_out_of_order(tmp_path: Path) -> None:
    """The last event then hangs on the first of two tool calls; the reply is still whole."""
    uses = [{"type": "tool_use", "id": f"t{n}", "name": "Bash", "input": {}} for n in (1, 2)]
    claude(
        tmp_path,
        [
            event("a", None),
            reply("b", "a", "msg_1", uses[0]),
            reply("c", "b", "msg_1", uses[1]),
            event("e", "c"),
            event("d", "b"),
        ],
    )
    result = plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))
    assert [block["id"] for block in result["response"]["output"][0]["content"]] == ["t1", "t2"]
    assert result["response"]["id"] == "msg_1"


def test_claude_code_compaction_subagents_and_the_harness_itself(tmp_path: Path) -> None:
    """Replies before a compaction were returned; a sub-agent's, and what the harness wrote itself, were not."""
    claude(
        tmp_path,
        [
            event("a", None),
            reply("b", "a", "msg_1", text("One.")),
            event("s", "a", "assistant", isSidechain=True, message={"id": "msg_sub", "content": [text("Sub.")]}),
            event("c", None, "system", subtype="compact_boundary", logicalParentUuid="b"),
            event("d", "c", isCompactSummary=True, message={"role": "user", "content": "Summary."}),
            event("e", "d", "assistant", message={"id": "own", "model": "<synthetic>", "content": [text("No.")]}),
            reply("f", "e", "msg_err", text("API Error"), isApiErrorMessage=True),
            reply("g", "f", "msg_2", text("Two.")),
        ],
    )
    result = plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))
    assert [envelope["id"] for envelope in result["responses"]] == ["msg_1", "msg_2"]


def test_claude_code_what_broke_off_is_no_reply(tmp_path: Path) -> None:
    """Blocks that a cut stream had completed stay in the file; the reply that came instead counts."""
    cut = {"id": "msg_cut", "model": "m", "stop_reason": None, "content": [text("Half")]}
    lines = [event("a", None), reply("b", "a", "msg_cut", text("Half"), message=cut)]
    claude(tmp_path, [*lines, reply("c", "b", "msg_2", text("Whole."))])
    assert plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))["response"]["id"] == "msg_2"
    claude(tmp_path, lines)
    older = plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))
    assert older["response"]["id"] == "msg_cut", "a version that never says how a reply ended"


def test_claude_code_earlier_runs_of_a_session_are_left_out(tmp_path: Path) -> None:
    """A resumed session holds replies that this rollout never captured."""
    claude(
        tmp_path,
        [
            reply("a", None, "msg_old", text("Before."), timestamp=EARLY),
            reply("b", "a", "msg_new", text("Now.")),
        ],
    )
    assert plain(read_claude_code(tmp_path, {SESSION}, SINCE_s))["response"]["id"] == "msg_new"
    assert read_claude_code(tmp_path, {SESSION}, SINCE_s * 2).missing is not None


def test_claude_code_sessions(tmp_path: Path) -> None:
    """Two sessions in one rollout are two answers, and a reader has to see that."""
    other = SESSION.replace("1", "9")
    claude(tmp_path, [reply("a", None, "msg_1", text("One."))])
    claude(tmp_path, [reply("a", None, "msg_2", text("Two."))], other)
    result = plain(read_claude_code(tmp_path, {other, SESSION}, SINCE_s))
    assert len({envelope["metadata"]["session_id"] for envelope in result["responses"]}) == 2
    assert "response" not in result
    assert "no captured call" in str(read_claude_code(tmp_path, set(), SINCE_s).missing)
    assert "no session file" in str(read_claude_code(tmp_path, {"0" * 36}, SINCE_s).missing)
    for strange in ("../../etc/passwd", "*", "a/b" * 4):
        with pytest.raises(Unreadable):
            read_claude_code(tmp_path, {strange}, SINCE_s)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"uuid": "a", "uuid": "b"}',
        '{"uuid": 1}',
        '{"uuid": "a", "type": "assistant", "timestamp": "2026-01-02T00:00:00Z"}',
        '{"uuid": "a", "type": "assistant", "timestamp": "soon", "message": {"id": "m", "content": []}}',
        '{"uuid": "a", "type": "assistant", "timestamp": "2026-01-02T00:00:00Z", "message": {"content": []}}',
        '{"uuid": "a", "type": "assistant", "timestamp": "2026-01-02T00:00:00Z", "message": {"id": "m"}}',
    ],
)
def test_a_file_of_another_form_is_not_half_read(tmp_path: Path, line: str) -> None:
    """Half a history proves the wrong calls."""
    path = claude(tmp_path, [reply("z", None, "msg_1", text("One."))])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(Unreadable) as caught:
        read_claude_code(tmp_path, {SESSION}, SINCE_s)
    assert f"{path.name}:2" in str(caught.value)


# Codex


def line(kind: str, **payload: Any) -> Json:
    return {"timestamp": LATE, "type": kind, "payload": payload}


def codex(home: Path, lines: Sequence[Json], name: str = "rollout-1") -> Path:
    return write_lines(home / "sessions" / "2026" / "01" / "02" / f"{name}.jsonl", lines)


META = line("session_meta", id="s1", session_id="s1")
ITEMS: list[Json] = [
    {"type": "message", "role": "user", "id": "u1", "content": [{"type": "input_text", "text": "Do it."}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a b"},
    {"type": "message", "role": "assistant", "id": "msg_2", "content": [{"type": "output_text", "text": "Done."}]},
]


def item(position: int, after: int) -> Json:
    private = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
    return {**line("response_item", **ITEMS[position], **private), "metadata": {"sampled_through_sequence": after}}


def used(response_id: str) -> Json:
    return line("token_usage_record", response_id=response_id)


def test_codex_replies_as_they_were_served(tmp_path: Path) -> None:
    """Ids of items and of responses prove which call a reply is of."""
    lines = [
        META,
        line("event_msg", type="task_started"),
        line("turn_context", model="m"),
        line("response_item", type="ghost_snapshot", ghost_commit={"id": "x"}),
        item(0, 0),
        item(1, 1),
        item(2, 1),
        used("resp_1"),
        item(3, 1),
        item(4, 4),
        used("resp_2"),
    ]
    path = codex(tmp_path, lines)
    history = read_codex(tmp_path)
    assert history.sources == (str(path),)
    metadata = {"session_id": "s1"}
    assert plain(history) == {
        "responses": [
            {"id": "resp_1", "output": ITEMS[1:3], "metadata": metadata},
            {"id": "resp_2", "output": ITEMS[4:], "metadata": metadata},
        ],
        "response": {"id": "resp_2"},
    }


def test_codex_what_broke_off_is_no_reply(tmp_path: Path) -> None:
    """Codex keeps the items of a stream that was cut; no call that finished served them."""
    codex(tmp_path, [META, item(0, 0), item(1, 1), item(2, 2), used("resp_2"), item(3, 2), item(4, 4)])
    assert plain(read_codex(tmp_path))["response"] == {
        "id": "resp_2",
        "output": ITEMS[2:3],
        "metadata": {"session_id": "s1"},
    }


def test_codex_of_a_version_that_counts_nothing(tmp_path: Path) -> None:
    """Without its marks the conversation is one envelope, and no reply is named."""
    codex(tmp_path, [META, *(line("response_item", **each) for each in ITEMS)])
    assert plain(read_codex(tmp_path)) == {"response": {"output": ITEMS, "metadata": {"session_id": "s1"}}}


def test_codex_subagents_and_rollbacks(tmp_path: Path) -> None:
    """A sub-agent has a file of its own; a conversation that was rolled back is not what the file seems to say."""
    codex(tmp_path, [META, item(4, 0), used("resp_1")])
    codex(tmp_path, [line("session_meta", id="t2", session_id="s1"), line("response_item", **ITEMS[2])], "rollout-2")
    assert plain(read_codex(tmp_path))["response"]["output"] == [ITEMS[4]]
    codex(tmp_path, [META, line("event_msg", type="thread_rolled_back", num_turns=1)])
    with pytest.raises(Unreadable):
        read_codex(tmp_path)
    assert read_codex(tmp_path / "elsewhere").missing is not None


# pi


def entry(entry_id: str, parent: str | None, role: str, content: list[Json], **more: Any) -> Json:
    message = {"role": role, "content": content, **more}
    return {"type": "message", "id": entry_id, "parentId": parent, "timestamp": LATE, "message": message}


PI_SESSION: Json = {"type": "session", "version": 3, "id": SESSION, "timestamp": LATE, "cwd": "/work"}


def test_pi_replies_as_chat_messages(tmp_path: Path) -> None:
    """pi keeps parts of its own; what was served are Chat messages."""
    parts: list[Json] = [
        {"type": "thinking", "thinking": "Hm.", "thinkingSignature": "reasoning"},
        text("Looking."),
        {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "ls"}},
    ]
    write_lines(
        tmp_path / "--work--" / "1.jsonl",
        [
            PI_SESSION,
            {"type": "model_change", "id": "m", "parentId": None},
            entry("a", "m", "user", [text("Do it.")]),
            entry("b", "a", "assistant", parts, responseId="r1", stopReason="toolUse"),
            entry("c", "b", "toolResult", [text("a b")], toolCallId="c1"),
            entry("d", "c", "assistant", [text("Cut")], stopReason="error"),
            entry("x", "c", "assistant", [text("Elsewhere.")], responseId="rx", stopReason="stop"),
            entry("e", "c", "assistant", [text("Done.")], responseId="r2", stopReason="stop"),
        ],
    )
    result = plain(read_pi(tmp_path))
    assert [envelope["id"] for envelope in result["responses"]] == ["r1", "r2"]
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    assert result["responses"][0]["output"] == [
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    ]
    assert read_pi(tmp_path / "elsewhere").missing is not None


@pytest.mark.parametrize(
    "lines",
    [
        [entry("a", None, "assistant", [])],
        [PI_SESSION, entry("a", None, "assistant", [{"type": "image"}])],
        [PI_SESSION, {"type": "message", "id": "a", "message": {"role": "assistant", "content": "x"}}],
    ],
)
def test_pi_other_forms(tmp_path: Path, lines: list[Json]) -> None:
    """A part that is passed over is a part of the reply that is missing."""
    write_lines(tmp_path / "1.jsonl", lines)
    with pytest.raises(Unreadable):
        read_pi(tmp_path)


# mini-swe-agent


def test_mini_swe_agent_messages_by_their_responses(tmp_path: Path) -> None:
    """The trajectory holds the whole response beside each message; its id proves the call."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
    said = {"role": "assistant", "content": "Looking.", "tool_calls": calls, "reasoning_content": "Hm."}
    messages = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "Do it."},
        {**said, "function_call": None, "provider_specific_fields": {"x": 1}, "extra": {"response": {"id": "r1"}}},
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
        {"role": "user", "content": "No call.", "extra": {"response": {"id": "r2"}}},
        {"role": "assistant", "content": "Bye.", "extra": {"response": "repr"}},
        {"role": "exit", "content": "Submitted"},
    ]
    path = tmp_path / "t.traj.json"
    path.write_text(json.dumps({"info": {}, "messages": messages}))
    result = plain(read_mini_swe_agent([tmp_path / "no", path]))
    assert [envelope.get("id") for envelope in result["responses"]] == ["r1", None]
    assert result["responses"][0]["output"] == [said]
    assert read_mini_swe_agent([tmp_path / "no"]).missing is not None
    path.write_text('{"messages": [1]}')
    with pytest.raises(Unreadable):
        read_mini_swe_agent([path])


# opencode


def opencode(path: Path, sessions: Sequence[tuple[str, str | None, str | None]], messages: Sequence[Json]) -> Path:
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE session (id text, parent_id text, revert text);"
            "CREATE TABLE message (id text, session_id text, data text);"
            "CREATE TABLE part (id text, message_id text, data text);"
        )
        connection.executemany("INSERT INTO session VALUES (?, ?, ?)", sessions)
        for number, message in enumerate(messages):
            message_id, parts = f"msg_{number:03}", message.pop("parts")
            session = message.pop("session", "ses_1")
            connection.execute("INSERT INTO message VALUES (?, ?, ?)", (message_id, session, json.dumps(message)))
            for place, part in enumerate(parts):
                row = (f"prt_{number:03}_{place}", message_id, json.dumps(part))
                connection.execute("INSERT INTO part VALUES (?, ?, ?)", row)
    connection.close()
    return path


START, END = {"type": "step-start"}, {"type": "step-finish"}


def stored(role: str, *parts: Json, created_ms: int = 1767312000000, **more: Any) -> Json:
    return {"role": role, "time": {"created": created_ms}, "parts": list(parts), **more}


def test_opencode_messages_in_their_order(tmp_path: Path) -> None:
    """A message that ended in an error was never a reply, and a resumed session holds other runs' replies."""
    tool = {"type": "tool", "tool": "bash", "callID": "c1", "state": {"input": {"command": "ls"}, "output": "a b"}}
    path = opencode(
        tmp_path / "opencode.db",
        [("ses_1", None, None), ("ses_sub", "ses_1", None)],
        [
            stored("assistant", START, text("Before."), END, created_ms=1767225600000),
            stored("user", text("Do"), text("it.")),
            stored("assistant", START, text("Half a"), START, {"type": "reasoning", "text": "Hm."}, tool, END),
            stored("assistant", START, text("Half a"), error={"name": "APIError"}),
            stored("assistant", START, text("Done."), END),
            stored("assistant", START, text("Sub."), END, session="ses_sub"),
        ],
    )
    result = plain(read_opencode(path, {"ses_1", "ses_sub"}, SINCE_s))
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    call = {"id": "c1", "type": "function", "function": function}
    assert result["response"]["output"] == [
        {"role": "user", "content": "Do\nit."},
        {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
        {"role": "assistant", "content": "Done."},
    ]


def test_opencode_what_cannot_be_read(tmp_path: Path) -> None:
    """A reverted session still holds what was taken back."""
    path = opencode(tmp_path / "opencode.db", [("ses_1", None, '{"messageID": "msg_000"}')], [])
    with pytest.raises(Unreadable):
        read_opencode(path, {"ses_1"}, SINCE_s)
    with pytest.raises(Unreadable):
        read_opencode(path, {"a b"}, SINCE_s)
    (tmp_path / "other.db").write_text("no database at all, only text that is long enough")
    with pytest.raises(Unreadable):
        read_opencode(tmp_path / "other.db", {"ses_1"}, SINCE_s)
    assert read_opencode(tmp_path / "none.db", {"ses_1"}, SINCE_s).missing is not None
    assert read_opencode(path, set(), SINCE_s).missing is not None
    assert read_opencode(path, {"ses_unknown"}, SINCE_s).missing is not None
