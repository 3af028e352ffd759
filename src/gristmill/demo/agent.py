"""A small coding agent, standard library only: what `gristmill demo` captures live.

It mends a mill of two files with a scripted model: asks for a title on the side, looks round, runs the check, repeats
a request whose reply broke off, hands a search to a helper with a conversation of its own, changes a file, has its
history summarised, and goes on from the summary. Its work is real, done in a folder; its model is not.

Invariant: the agent knows nothing of the gateway but an address and a key, like any harness.

Not here: the model's replies (`scripted/data/demo.json`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["MODEL", "Finished", "mend_the_mill", "prepare"]

MODEL: Final = "scripted-coder"

_STONES: Final = "GAP = 3\n"
_CHECK: Final = """from mill.stones import GAP

if GAP != 2:
    raise SystemExit(f"the flour is too coarse: the gap is {GAP}")
print("the flour is fine")
"""
_SYSTEM: Final = "You are a coding agent. Work with the tools that you are given, and report in one sentence."
_HELPER: Final = "You are a helper of a coding agent. Answer its question in one sentence."
_TASK: Final = "The mill grinds too coarse. Mend it; check.py tells whether it is mended."
_SUMMARISE: Final = "Summarise the conversation, so that another agent can go on from your words alone."
_TRIES: Final = 3
_TURNS: Final = 12

Message = dict[str, Any]


class Finished(NamedTuple):
    """What the agent hands back, and whether the mill is mended: 1.0 or 0.0."""

    result: dict[str, Any]
    reward: float


class _Reply(NamedTuple):
    response_id: str
    message: Message


class _BrokenOff(Exception):
    """The reply ended before its finish reason."""


def prepare(folder: Path) -> None:
    """Put the broken mill into a folder."""
    (folder / "mill").mkdir(parents=True)
    (folder / "mill" / "__init__.py").write_text("")
    (folder / "mill" / "stones.py").write_text(_STONES)
    (folder / "check.py").write_text(_CHECK)


def _tool(name: str, about: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"} for parameter in parameters},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


_FILE_TOOLS: Final = [
    _tool("list_files", "List all files."),
    _tool("read_file", "Return the text of a file.", "path"),
]
_TOOLS: Final = [
    *_FILE_TOOLS,
    _tool("replace", "Replace one text of a file by another.", "path", "old", "new"),
    _tool("check", "Run check.py."),
    _tool("task", "Have a helper look into something.", "prompt"),
]


class _Endpoint:
    """Chat Completions over HTTP, streamed; a reply that breaks off is asked for again."""

    def __init__(self, base_url: str, key: str) -> None:
        self._url = f"{base_url}/chat/completions"
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, messages: list[Message], **more: Any) -> _Reply:
        """Return the reply to a conversation."""
        body = json.dumps({"model": MODEL, "messages": messages, "stream": True, **more}).encode()
        for attempt in range(_TRIES):
            headers = {**self._headers, "x-retry-count": str(attempt)}
            try:
                return self._once(urllib.request.Request(self._url, body, headers))
            except (_BrokenOff, HTTPException, OSError):
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError

    def _once(self, request: urllib.request.Request) -> _Reply:
        message: Message = {"role": "assistant", "content": None}
        response_id, finished = "", False
        with urllib.request.urlopen(request, timeout=60) as stream:
            for chunk in _events(stream):
                if "error" in chunk:
                    raise _BrokenOff
                response_id = chunk["id"]
                for choice in chunk["choices"]:
                    _join(message, choice["delta"])
                    finished |= choice["finish_reason"] is not None
        if not finished:
            raise _BrokenOff
        return _Reply(response_id, message)


def _events(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def _join(message: Message, delta: Mapping[str, Any]) -> None:
    for key in ("content", "reasoning"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= piece["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[piece["index"]]
        call["id"] = piece.get("id") or call["id"]
        said: Message = piece.get("function") or {}
        for key, text in said.items():
            call["function"][key] += text or ""


class _Agent:
    """The agent's loop over one folder."""

    def __init__(self, endpoint: _Endpoint, folder: Path) -> None:
        self._endpoint = endpoint
        self._folder = folder
        self._acts: Mapping[str, Callable[..., str]] = {
            "list_files": self._list_files,
            "read_file": self._read_file,
            "replace": self._replace,
            "check": self._check,
            "task": self._task,
        }

    def converse(self, messages: list[Message], tools: list[dict[str, Any]], until: str | None = None) -> str:
        """Go on until the model asks for no tool, or the tool `until` was used; return the last response's id."""
        for _ in range(_TURNS):
            reply = self._endpoint.ask(messages, tools=tools)
            messages.append(reply.message)
            calls: list[Message] = reply.message.get("tool_calls") or []
            for call in calls:
                act = self._acts[call["function"]["name"]]
                told = act(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
            if not calls or until in {call["function"]["name"] for call in calls}:
                return reply.response_id
        raise RuntimeError(f"the model did not come to an end in {_TURNS} turns")

    def _list_files(self) -> str:
        found = sorted(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*.py"))
        return "\n".join(found)

    def _read_file(self, path: str) -> str:
        return (self._folder / path).read_text()

    def _replace(self, path: str, old: str, new: str) -> str:
        file = self._folder / path
        text = file.read_text()
        file.write_text(text.replace(old, new))
        return f"replaced {text.count(old)} times"

    def _check(self) -> str:
        done = subprocess.run(
            [sys.executable, "-B", "check.py"], cwd=self._folder, capture_output=True, text=True, check=False
        )
        return (done.stdout + done.stderr).strip()

    def _task(self, prompt: str) -> str:
        messages: list[Message] = [{"role": "system", "content": _HELPER}, {"role": "user", "content": prompt}]
        self.converse(messages, _FILE_TOOLS)
        return (messages[-1].get("content") or "").strip()


def mend_the_mill(base_url: str, key: str, folder: Path) -> Finished:
    """Mend the mill in a folder with the model behind an address.

    Args:
        base_url: up to and with `/v1`.
        key: API key.
        folder: of `prepare`.
    """
    endpoint = _Endpoint(base_url, key)
    agent = _Agent(endpoint, folder)
    title = {"role": "user", "content": f"Write a title for this session: {_TASK}"}
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "title", "schema": schema}}
    endpoint.ask([title], response_format=wanted)

    messages: list[Message] = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _TASK}]
    agent.converse(messages, _TOOLS, until="replace")
    messages.append({"role": "user", "content": _SUMMARISE})
    summary = endpoint.ask(messages)
    messages.append(summary.message)

    short: list[Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{(summary.message['content'] or '').strip()}\n\nGo on from here."},
    ]
    last = agent.converse(short, _TOOLS)
    mended = "GAP = 2" in (folder / "mill" / "stones.py").read_text()
    result = {
        "responses": [
            {"id": summary.response_id, "output": messages},
            {"id": last, "output": short},
        ]
    }
    return Finished(result, 1.0 if mended else 0.0)
