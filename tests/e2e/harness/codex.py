"""Codex: the Responses dialect, streamed; sub-agents with `spawn_agent`; compaction above a limit of tokens."""

from __future__ import annotations

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran, lines_of

__all__ = ["Codex"]


class Codex:
    name = "codex"
    shell = "exec_command"
    makes_title = False
    options: tuple[str, ...] = ()
    plain_use = True
    delegates = "spawn_agent"

    def __init__(self, compact_above: int | None = None) -> None:
        self._compact_above = compact_above

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        provider = f'{{name="e2e",base_url="{endpoint.v1}",env_key="E2E_KEY",wire_api="responses"}}'
        settings = ["-c", "model_provider=e2e", "-c", f"model_providers.e2e={provider}", "-m", endpoint.model]
        if self._compact_above is not None:
            settings += ["-c", f"model_auto_compact_token_limit={self._compact_above}"]
        words = ["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--json", *settings]
        return Launch([*words, *(["resume", "--last"] if again else []), task], {"E2E_KEY": endpoint.key})

    def plain(self, folder: Folder, task: str) -> Launch:
        limit = [] if self._compact_above is None else ["-c", f"model_auto_compact_token_limit={self._compact_above}"]
        return Launch(["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", *limit, task])

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Read the items of the main thread from the session's file; a compaction begins a new envelope."""
        thread = next(line["thread_id"] for line in lines_of(ran.out) if line["type"] == "thread.started")
        file = next((folder.home / ".codex" / "sessions").rglob(f"rollout-*{thread}.jsonl"))
        envelopes: list[Json] = [{"output": []}]
        for line in lines_of(file.read_text()):
            if line["type"] == "compacted":
                envelopes.append({"output": []})
            elif line["type"] == "response_item":
                item = {k: v for k, v in line["payload"].items() if not k.startswith("internal_")}
                envelopes[-1]["output"].append(item)
        return {"responses": envelopes}
