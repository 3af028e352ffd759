"""A harness for tests: two turns over the OpenAI variables, then its history in a file. `agent.py OUT [EXIT_CODE]`."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "scripted", "messages": messages, "tools": [TOOL]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}


def main() -> int:
    out = Path(sys.argv[1])
    (out / "environment.json").write_text(json.dumps(dict(os.environ)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    messages.append(ask(messages))
    call = messages[-1]["tool_calls"][0]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a b"})
    messages.append(ask(messages))
    (out / "result.json").write_text(json.dumps({"messages": messages}))
    sys.stdout.write("agent: done\n")
    return int(sys.argv[2]) if len(sys.argv) > 2 else 0


if __name__ == "__main__":
    sys.exit(main())
