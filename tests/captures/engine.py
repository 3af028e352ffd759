"""Recorded engine exchanges for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.captures import Reply, decode_reply, dialect_of

FOLDER = Path(__file__).parents[1] / "fixtures" / "engine"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_bytes())


def decode(fixture: dict[str, Any]) -> Reply:
    request = fixture["request"]
    echo = bool((request["body"] or {}).get("echo"))
    if "sse_raw" in fixture:
        return decode_reply(request["path"], fixture["status"], sse=fixture["sse_raw"], echo=echo)
    return decode_reply(request["path"], fixture["status"], json.dumps(fixture["body"]).encode(), echo=echo)


SAMPLED = sorted(
    path.stem
    for path in FOLDER.glob("*.json")
    if dialect_of(json.loads(path.read_bytes())["request"]["path"]) is not None
)
"""Names of the fixtures whose route samples."""


def chat_body(**choice: Any) -> bytes:
    """A small chat body whose one choice has the given fields; `root` and `usage` go to the top."""
    root = choice.pop("root", {})
    usage = choice.pop("usage", None)
    message = {"role": "assistant", "content": "ok"}
    body = {"id": "r", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}
    return json.dumps({"prompt_token_ids": [1, 2], "usage": usage, **body, **root}).encode()


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value} for value in values]}


def sse(*chunks: Any, done: bool = True) -> str:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(events) + ("data: [DONE]\n\n" if done else "")
