"""mini-swe-agent: Chat Completions, not streamed; ends when a command prints its password."""

from __future__ import annotations

import json

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran

__all__ = ["MiniSweAgent"]

LAST_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class MiniSweAgent:
    name = "mini-swe-agent"
    shell = "bash"
    makes_title = False
    options: tuple[str, ...] = ()
    plain_use = True
    delegates = None

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        words = ["mini", "-m", f"openai/{endpoint.model}", "-t", task, "-y", "--exit-immediately"]
        return Launch(
            [*words, "-o", str(folder.root / "trajectory.json")],
            {
                "OPENAI_BASE_URL": endpoint.v1,
                "OPENAI_API_KEY": endpoint.key,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        )

    def plain(self, folder: Folder, task: str) -> Launch:
        return Launch(["mini", "-t", task, "-y", "--exit-immediately"])

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Take the messages of its trajectory; its own notes beside them are left out."""
        trajectory = json.loads((folder.root / "trajectory.json").read_text())
        kept = [message for message in trajectory["messages"] if message["role"] != "exit"]
        dropped = {"extra", "function_call", "provider_specific_fields"}
        return {"messages": [{k: v for k, v in message.items() if k not in dropped} for message in kept]}
