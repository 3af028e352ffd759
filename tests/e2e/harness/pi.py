"""pi: Chat Completions, Responses or Messages by the `api` of its models file; neither titles nor sub-agents."""

from __future__ import annotations

import json

from tests.e2e.harness.launch import Endpoint, Folder, Json, Launch, Ran, lines_of

__all__ = ["Pi"]

_APIS = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}


class Pi:
    shell = "bash"
    makes_title = False
    options: tuple[str, ...] = ()
    delegates = None

    def __init__(self, dialect: str = "chat") -> None:
        self.name = "pi" if dialect == "chat" else f"pi ({dialect})"
        self._dialect = dialect
        self.plain_use = dialect == "chat"

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        model = {"id": endpoint.model, "reasoning": True, "contextWindow": 32768, "maxTokens": 4096}
        provider = {
            "baseUrl": endpoint.base if self._dialect == "messages" else endpoint.v1,
            "api": _APIS[self._dialect],
            "apiKey": "E2E_KEY",
            "models": [model],
        }
        settings = folder.root / "pi"
        settings.mkdir(exist_ok=True)
        (settings / "models.json").write_text(json.dumps({"providers": {"e2e": provider}}))
        words = ["pi", "--provider", "e2e", "--model", endpoint.model, "--mode", "json"]
        words += [*(["--continue"] if again else []), "-p", task]
        return Launch(words, {"E2E_KEY": endpoint.key, "PI_CODING_AGENT_DIR": str(settings)})

    def plain(self, folder: Folder, task: str) -> Launch:
        return Launch(["pi", "-p", task])

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Write the messages that its events end with as chat messages."""
        messages: list[Json] = []
        for message in [line["message"] for line in lines_of(ran.out) if line.get("type") == "message_end"]:
            if message["role"] == "toolResult":
                text = "".join(part.get("text", "") for part in message["content"])
                messages.append({"role": "tool", "tool_call_id": message["toolCallId"], "content": text})
                continue
            if message["role"] == "user":
                messages.append({"role": "user", "content": "".join(part["text"] for part in message["content"])})
                continue
            if message.get("stopReason") in {"error", "aborted"}:
                continue  # a try that failed; it is not sent again
            said: Json = {"role": "assistant", "content": None}
            for part in message["content"]:
                if part["type"] == "text":
                    said["content"] = (said["content"] or "") + part["text"]
                elif part["type"] == "thinking":
                    said["reasoning"] = said.get("reasoning", "") + part["thinking"]
                elif part["type"] == "toolCall":
                    function = {"name": part["name"], "arguments": json.dumps(part["arguments"])}
                    call = {"id": part["id"].split("|")[0], "type": "function", "function": function}
                    said.setdefault("tool_calls", []).append(call)
            messages.append(said)
        return {"messages": messages}
