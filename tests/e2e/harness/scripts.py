"""What the scripted engine says to a harness: the same small job in every scenario, told with the harness's tools.

Invariant: a script answers by what a request contains, never by when it comes, and every reply can be told by its rule:
`title`, `main`, `sub`, `compact`, `after`.
"""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.harness.launch import MODEL, Harness
from tests.e2e.harness.mini_swe_agent import LAST_COMMAND

__all__ = [
    "FINAL",
    "MODEL",
    "POLISH",
    "SUMMARY",
    "TASK",
    "compacting",
    "delegating",
    "long_output",
    "steady",
    "troubled",
]

Json = dict[str, Any]

TASK = "Mend the mill in this folder, then say that it turns."
POLISH = "Now polish the millstone."
SUMMARY = "SUMMARY: the wheel has 24 teeth again and the mill turns."
FINAL = "The mill turns: the wheel has 24 teeth again."
SUBTASK = "SUBTASK: count the millstones"
_ARGUMENT = {"exec_command": "cmd"}


def _script(rules: list[Json], **settings: Any) -> Json:
    title = {"reply": {"content": "Mend the mill"}}
    titles = [
        {"name": "title", "when": {"structured": True}, "reply": {"json": {"title": "Mend the mill"}}},
        {"name": "title", "when": {"tools": False}, **title},
    ]
    return {
        "models": [MODEL],
        "thinking": True,
        "max_model_len": 400_000,
        "split": 0.1,
        "behaviour": {"chunks": "uneven"},
        **settings,
        "rules": [*rules[:-1], *titles, rules[-1]],
    }


def _shell(harness: Harness, command: str, *, odd: bool = False) -> Json:
    """A call of the shell tool; `odd`: spelt as no client would spell it."""
    arguments = {_ARGUMENT.get(harness.shell, "command"): command}
    if harness.name.startswith(("claude-code", "opencode")):
        arguments = {"description": "Mühle", **arguments}
    text = json.dumps(arguments, separators=(" ,  ", ":  ")) if odd else json.dumps(arguments)
    return {"name": harness.shell, "arguments": text}


def _last(harness: Harness) -> Json:
    if harness.name == "mini-swe-agent":
        return {"reasoning": "It turns.", "content": FINAL, "tool_calls": [_shell(harness, LAST_COMMAND)]}
    return {"reasoning": "It turns.", "content": FINAL}


def steady(harness: Harness) -> Json:
    """Four turns: a call of the shell, one spelt oddly, two at once, the end."""
    turns = [
        {"reasoning": "Look first.", "content": "I look.", "tool_calls": [_shell(harness, "cat mill.py")]},
        {"reasoning": "Réparer.", "content": "Ça va. ", "tool_calls": [_shell(harness, 'echo "step 1 é"', odd=True)]},
        {
            "content": "Two at once.\n",
            "tool_calls": [_shell(harness, "echo step-2a"), _shell(harness, "echo step-2b")],
        },
        _last(harness),
    ]
    return _script([{"name": "main", "turns": turns}])


def blank(harness: Harness) -> Json:
    """Three turns, two without text: what the engine parses is then white space alone between thinking and call."""
    turns = [
        {"reasoning": "Look first.", "tool_calls": [_shell(harness, "cat mill.py")]},
        {"reasoning": "Mend.", "tool_calls": [_shell(harness, "echo mended")]},
        _last(harness),
    ]
    return _script([{"name": "main", "turns": turns}])


def troubled(harness: Harness, *, cut: bool) -> Json:
    """Three turns; the first is answered 500 at first, the second breaks off in the middle at first (`cut`).

    Turns are told apart by the last result of a tool, for some harnesses keep traces of a failed try in their history.
    """
    broken = {"reasoning": "This goes on and on until it is cut off. " * 8, "fault": {"kind": "eof", "after_chunks": 4}}
    first = {"reasoning": "Look.", "content": "I look.", "tool_calls": [_shell(harness, "ls")]}
    second = {"reasoning": "Go on.", "content": "I mend.", "tool_calls": [_shell(harness, "echo mended")]}
    return _script(
        [
            {"name": "main", "when": {"tool": "mended"}, "reply": _last(harness)},
            {"name": "main", "when": {"tool": "mill.py"}, "reply": [broken, second] if cut else second},
            {"name": "main", "reply": [{"fault": {"kind": "status", "status": 500}}, first]},
        ]
    )


def delegating(harness: Harness) -> Json:
    """The main agent starts a sub-agent, which uses the shell once and reports; then the main agent ends."""
    arguments: Json = {"prompt|message": SUBTASK, "description?": "Count stones"}
    if harness.name.startswith("claude-code"):
        arguments["subagent_type"] = "general-purpose"
    elif harness.name.startswith("opencode"):
        arguments["subagent_type"] = "general"
    names = [harness.delegates, f"multi_agent_v1__{harness.delegates}", f"multi_agent_v1.{harness.delegates}"]
    turns = [{"content": "Somebody else counts.", "tool_calls": [{"name": names, "arguments": arguments}]}]
    if harness.name == "codex":
        turns.append({"content": "I wait.", "tool_calls": [_shell(harness, "sleep 3")]})  # it runs beside
    sub = [
        {"reasoning": "Count.", "content": "I count.", "tool_calls": [_shell(harness, "echo 3")]},
        {"content": "There are 3 millstones."},
    ]
    return _script(
        [
            {"name": "sub", "when": {"user": "SUBTASK"}, "turns": sub},
            {"name": "main", "turns": [*turns, _last(harness)]},
        ]
    )


def delegating_twice(harness: Harness) -> Json:
    """Two sub-agents started in one turn, which work at the same time."""
    calls = [
        {
            "name": harness.delegates,
            "arguments": {
                "description": what,
                "prompt": f"SUBTASK: count the {what}",
                "subagent_type": "general-purpose",
            },
        }
        for what in ("millstones", "wheels")
    ]
    turns = [{"content": "Others count.", "tool_calls": calls}, _last(harness)]
    rules = []
    for what in ("millstones", "wheels"):
        sub = [
            {"content": f"I count {what}.", "tool_calls": [_shell(harness, f"sleep 0.3; echo 3 {what}")]},
            {"content": f"There are 3 {what}."},
        ]
        rules.append({"name": what, "when": {"user": f"SUBTASK: count the {what}"}, "turns": sub})
    return _script([*rules, {"name": "main", "turns": turns}])


def slow(harness: Harness) -> Json:
    """Six turns, each of which takes the engine some seconds, most of them thinking.

    What breaks off in the middle of thinking leaves nothing in a history; later, harnesses keep what was complete.
    """
    turns = [
        {"reasoning": f"{turn} turns, " * 40, "tool_calls": [_shell(harness, f"echo step-{turn}")], "content": "On."}
        for turn in range(5)
    ]
    return _script([{"name": "main", "turns": [*turns, _last(harness)]}], behaviour={"chunks": 4, "gap_s": 0.06})


def for_any() -> Json:
    """Three turns for any harness; each asks for a model of its own name."""
    call = {
        "name": "@shell",
        "arguments": {"command|cmd": "echo step-{{turn}} for {{model}}", "description?": "A step"},
    }
    turns = [{"reasoning": "I am {{model}}.", "content": "Step {{turn}}.", "tool_calls": [call]} for _ in range(2)]
    last = {"reasoning": "It turns.", "content": FINAL}
    end = {**last, "tool_calls": [{"name": "@shell", "arguments": {"command|cmd": LAST_COMMAND}}]}
    script = _script(
        [
            {"name": "main", "when": {"user": "for mini-swe-agent", "turn": 2}, "reply": end},
            {"name": "main", "turns": [*turns, last]},
        ],
        tool_names={"shell": ["Bash", "bash", "exec_command"]},
    )
    script["behaviour"] = {"chunks": "uneven", "gap_s": 0.02}
    return script


def long_output(harness: Harness) -> Json:
    """A call of the shell whose output is some thousands of tokens."""
    return _shell(harness, "for i in $(seq 1500); do echo grain $i; done")


def compacting(harness: Harness) -> Json:
    """A first task with much output, a summary of it, and what comes after the summary."""
    wanted = {"matches": "(?i)summar"}
    turns = [
        {"content": "I look.", "tool_calls": [long_output(harness)]},
        {"content": "I mend.", "tool_calls": [_shell(harness, "echo mended")]},
        {"reasoning": "It turns.", "content": FINAL},
    ]
    after = [
        {"content": "I polish.", "tool_calls": [_shell(harness, "echo polished")]},
        {"content": "It shines."},
    ]
    summary = {"content": SUMMARY}
    if harness.name == "codex":
        rules = [
            {"name": "compact", "when": {"tools": False, "last": wanted}, "reply": summary},
            {"name": "after", "when": {"user": "SUMMARY:"}, "turns": after},
        ]
    else:
        rules = [
            {"name": "after", "when": {"user": "polish", "step": 0}, "reply": after[0]},
            {"name": "after", "when": {"user": "polish", "step": 1}, "reply": after[1]},
            {"name": "compact", "when": {"last": wanted, "user": wanted}, "reply": summary},
        ]
    return _script([*rules, {"name": "main", "turns": turns}])
