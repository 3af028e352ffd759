"""Claude Code: the Messages dialect, streamed; a title call; sub-agents with the `Agent` tool; `/compact`."""

from __future__ import annotations

from typing import Any

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran, lines_of

__all__ = ["ClaudeCode"]


class ClaudeCode:
    name = "claude-code"
    shell = "Bash"
    makes_title = True
    options: tuple[str, ...] = ()
    plain_use = True
    delegates = "Agent"

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        words = ["claude", *(["-c"] if again else []), "-p", task, "--output-format", "stream-json", "--verbose"]
        return Launch(
            [*words, "--dangerously-skip-permissions"],
            {
                "ANTHROPIC_BASE_URL": endpoint.base,
                "ANTHROPIC_API_KEY": endpoint.key,
                "ANTHROPIC_MODEL": endpoint.model,
                "IS_SANDBOX": "1",  # else it refuses to work as root without asking
            },
        )

    def plain(self, folder: Folder, task: str) -> Launch:
        return Launch(["claude", "-p", task, "--dangerously-skip-permissions"], {"IS_SANDBOX": "1"})

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Read the main conversation: one line a content block, all blocks of a message under one id."""
        messages: dict[str, Any] = {}
        for number, line in enumerate(lines_of(ran.out)):
            if line.get("type") not in {"assistant", "user"} or line.get("parent_tool_use_id"):
                continue
            message = line["message"]
            known = messages.setdefault(message.get("id") or str(number), {"role": message["role"], "content": []})
            content = message["content"]
            known["content"] += [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {"messages": list(messages.values())}
