"""opencode: Chat Completions, or Responses or Messages by its provider; a title call; sub-agents with `task`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran, lines_of

__all__ = ["Opencode"]

_PACKAGES = {
    "chat": "@ai-sdk/openai-compatible",
    "responses": "@ai-sdk/openai",
    "messages": "@ai-sdk/anthropic",
}


class Opencode:
    shell = "bash"
    makes_title = True
    delegates = "task"

    def __init__(self, dialect: str = "chat", path: str = "") -> None:
        self.name = "opencode" if dialect == "chat" else f"opencode ({dialect})"
        self._dialect = dialect
        self.plain_use = dialect == "chat"
        self._package = _PACKAGES[dialect]
        # Its history then holds summaries of reasoning only, and there are none.
        self.options = ("--set", "reasoning=optional") if dialect == "responses" else ()
        self._path = path

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        model = {"name": endpoint.model, "limit": {"context": 32768, "output": 4096}}
        config = {
            "model": f"e2e/{endpoint.model}",
            "small_model": f"e2e/{endpoint.model}",
            "autoupdate": False,
            "share": "disabled",
            "permission": {"*": "allow"},
            "provider": {
                "e2e": {
                    "npm": self._package,
                    "name": "e2e",
                    "options": {"baseURL": endpoint.v1, "apiKey": endpoint.key},
                    "models": {endpoint.model: model},
                }
            },
        }
        words = ["opencode", "run", "--format", "json", *(["--continue"] if again else []), task]
        return Launch(words, {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})

    def plain(self, folder: Folder, task: str) -> Launch:
        return Launch(["opencode", "run", task], {"OPENCODE_PERMISSION": '{"*": "allow"}'})

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Export the session and write its parts as chat messages."""
        session = next(line["sessionID"] for line in lines_of(ran.out) if "sessionID" in line)
        env = {"HOME": str(folder.home), "PATH": self._path}
        words = ["opencode", "export", session]
        done = subprocess.run(words, cwd=folder.work, env=env, capture_output=True, text=True, check=True, timeout=60)
        messages: list[Json] = []
        for message in json.loads(done.stdout)["messages"]:
            if message["info"]["role"] == "user":
                texts = [part["text"] for part in message["parts"] if part["type"] == "text"]
                messages.append({"role": "user", "content": "\n".join(texts)})
            else:
                messages += _assistant(message["parts"])
        return {"messages": messages}


def _assistant(parts: list[Any]) -> list[Json]:
    said: Json = {"role": "assistant", "content": None}
    results: list[Json] = []
    for part in parts:
        if part["type"] == "text":
            said["content"] = (said["content"] or "") + part["text"]
        elif part["type"] == "reasoning":
            said["reasoning_content"] = said.get("reasoning_content", "") + part["text"]
        elif part["type"] == "tool":
            function = {"name": part["tool"], "arguments": json.dumps(part["state"]["input"])}
            call = {"id": part["callID"], "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
            output = part["state"].get("output", part["state"].get("error", ""))
            results.append({"role": "tool", "tool_call_id": part["callID"], "content": output})
    return [said, *results] if len(said) > 2 or said["content"] else []
