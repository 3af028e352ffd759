"""Recorded runs of real harnesses, as captures.

In the recordings a harness's own texts are replaced by `<text DIGEST len=N>`, in requests only. Where such a text was
said by the model it is put back, so that a request continues the call that it continued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.atoms import read_item
from gristmill.captures import decode_reply
from gristmill.captures.lines import Document, read_documents
from gristmill.records import Capture

__all__ = ["FOLDER", "NAMES", "Recorded", "capture_of", "recorded"]

FOLDER = Path(__file__).parents[1] / "fixtures" / "harness"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
_HIDDEN = re.compile(r"<text ([0-9a-f]{12}) len=\d+>")


class Recorded(NamedTuple):
    """One model call: headers with names in lower case, the request body, and the reply as it was sent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int | str
    reply: str

    @property
    def streamed(self) -> bool:
        return self.reply.startswith(("event:", "data:"))


def recorded(name: str) -> list[Recorded]:
    """Read the model calls of one run."""
    lines = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    calls = [
        Recorded(
            line["path"],
            {key.lower(): value for key, value in line["headers"]},
            line["body"],
            line["status"],
            line["response_raw"] or "",
        )
        for line in lines
        if line["method"] == "POST" and line["body"] is not None
    ]
    known = {sha256(text.encode()).hexdigest()[:12]: text for call in calls for text in _said(call)}
    return [call._replace(body=_shown(call.body, known)) for call in calls]


def _said(call: Recorded) -> Iterator[str]:
    """Yield what the model said, piece by piece."""
    if not call.reply:
        return
    status = call.status if isinstance(call.status, int) else 200
    given: Any = {"sse": call.reply} if call.streamed else {"body": call.reply.encode()}
    for choice in decode_reply(call.path, status, **given).choices:
        for item in choice.items:
            for atom in read_item(item).atoms:
                yield atom.text
                if atom.kind == "tool_call" and atom.form == "json":
                    yield from _strings(json.loads(atom.text))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _strings(member)


def _shown(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _shown(member, known) for key, member in value.items()}
    if isinstance(value, list):
        return [_shown(member, known) for member in value]
    if not isinstance(value, str) or not _HIDDEN.search(value):
        return value
    if value.startswith("{"):
        return json.dumps(_shown(json.loads(value), known))
    return _HIDDEN.sub(lambda match: known.get(match[1], match[0]), value)


def capture_of(calls: list[Recorded], *, headers: bool = True) -> Capture:
    """Read recorded calls as a capture; a connection that was cut is a reply that was cut.

    Args:
        calls: of one run; call `cN` is the one at N.
        headers: False leaves them out.
    """
    documents: list[Document] = []
    for number, call in enumerate(calls):
        line: dict[str, Any] = {
            "kind": "exchange",
            "model_call_id": f"c{number}",
            "request": {"path": call.path, "headers": call.headers if headers else {}, "body": call.body},
            "status": call.status if isinstance(call.status, int) else 200,
        }
        if call.streamed or not isinstance(call.status, int):
            line["sse_raw"] = call.reply
        else:
            line["body"] = json.loads(call.reply)
        documents.append(Document(f"line {number}", json.dumps(line).encode(), ""))
    [rollout] = read_documents(documents).rollouts.values()
    return rollout.capture
