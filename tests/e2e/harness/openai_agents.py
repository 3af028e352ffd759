"""The OpenAI Agents SDK: Chat Completions or Responses, streamed or not, by a program of ours (agent_program)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.harness.launch import MODEL, Endpoint, Folder, Json, Launch, Ran

__all__ = ["OpenaiAgents"]


_PROGRAM = Path(__file__).with_name("agent_program.py")


class OpenaiAgents:
    shell = "bash"
    makes_title = False
    options: tuple[str, ...] = ()
    delegates = None

    def __init__(self, dialect: str = "chat", *, stream: bool = False) -> None:
        self.name = f"openai-agents ({dialect}, {'streamed' if stream else 'not streamed'})"
        self.plain_use = stream
        self._how = (dialect, "stream" if stream else "body")

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        return Launch(
            ["python", str(_PROGRAM), *self._how, endpoint.model, task, str(folder.root / "history.json")],
            {
                "OPENAI_BASE_URL": endpoint.v1,
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
            },
        )

    def plain(self, folder: Folder, task: str) -> Launch:
        """The program hands its history over in a file that `run` is told of."""
        dialect, how = self._how
        words = ["python", str(_PROGRAM), dialect, how, MODEL, task, "history.json"]
        return Launch(words, {"OPENAI_AGENTS_DISABLE_TRACING": "1"}, run_options=("--result-file", "history.json"))

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Take the items that the SDK would send next."""
        return json.loads((folder.root / "history.json").read_text())
