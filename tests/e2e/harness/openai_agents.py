"""The OpenAI Agents SDK: Chat Completions or Responses, streamed or not, by a program of ours (agent_program)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran

__all__ = ["OpenaiAgents"]


class OpenaiAgents:
    shell = "bash"
    makes_title = False
    options: tuple[str, ...] = ()
    delegates = None

    def __init__(self, dialect: str = "chat", *, stream: bool = False) -> None:
        self.name = f"openai-agents ({dialect}, {'streamed' if stream else 'not streamed'})"
        self._how = (dialect, "stream" if stream else "body")

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        program = Path(__file__).with_name("agent_program.py")
        return Launch(
            ["python", str(program), *self._how, endpoint.model, task, str(folder.root / "history.json")],
            {
                "OPENAI_BASE_URL": endpoint.v1,
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
            },
        )

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Take the items that the SDK would send next."""
        return {"response": {"output": json.loads((folder.root / "history.json").read_text())}}
