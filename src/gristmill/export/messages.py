"""The selected conversations as chat messages, for supervised fine-tuning: `messages.jsonl`, a conversation a line.

Invariant: a message has `train` 1 only if a selected call sampled it, exactly as it stands there, after exactly the
messages and under the tools that stand before it; every such message has it once over the rollout. Two calls share
a conversation only where the later request begins with the earlier exchange, message by message; else a conversation
is begun again. No tokens are read: calls that are of no use for rows are as good as any.

Not here: exchanges as chat messages (exchange_turns), and chat templates (nobody).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from gristmill.captures.exact import dumps
from gristmill.errors import Code, ReconstructionError
from gristmill.export.exchange_turns import ChatExchange, chat_exchange
from gristmill.export.folder import MESSAGES_NAME, Folder
from gristmill.export.writer import Outcome, RecordDigest, refused
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import RowMode
from gristmill.records import CallRecord, Capture, Result
from gristmill.selection import Rejected, Selection
from gristmill.selection.completion import stopped_by_length

__all__ = ["CONVERSATION_SCHEMA", "Conversation", "MessageRecords", "conversations"]

CONVERSATION_SCHEMA: Final = 1
"""Version of the line; readers refuse newer ones."""

_ID_LEN: Final = 32


class Conversation(NamedTuple):
    """One record: its id, and its line with the line end."""

    record_id: str
    line: bytes


class _Call(msgspec.Struct, eq=False):
    """A selected call: its place in the selection, its exchange, and the digests of the conversation.

    `before` holds a digest after each message of the request, `after` the one after the reply.
    """

    position: int
    record: CallRecord
    exchange: ChatExchange
    before: list[bytes]
    after: bytes
    parent: _Call | None = None


def conversations(
    capture: Capture,
    result: Result,
    selection: Selection,
    losses: Counter[str],
    *,
    mode: RowMode = RowMode.MERGED,
) -> tuple[Conversation, ...] | Rejected:
    """Make the conversations of one attempt, all of them or none.

    Args:
        capture: the attempt, with its exchanges.
        result: reward and group.
        selection: which calls to train.
        losses: counts up what was lost.
        mode: one conversation per path of calls that continue each other exactly, or under `per_call` one per call.
    """
    lost = Counter[str](
        credits=len(result.credits), advantages=result.advantage is not None, failures=result.failure is not None
    )
    try:
        calls = _calls(capture, selection, lost)
        paths = [[call] for call in calls] if mode is RowMode.PER_CALL else _paths(calls)
        made = tuple(_lines(selection, result, paths, lost))
    except ReconstructionError as refusal:
        return refused(selection, refusal)
    losses += lost
    return made


def _calls(capture: Capture, selection: Selection, lost: Counter[str]) -> list[_Call]:
    """Read the selected calls that said something, and find which of them each continues."""
    records = {record.model_call_id: record for record in capture.records}
    calls: list[_Call] = []
    for position, call_id in enumerate(selection.calls):
        record = records[call_id]
        exchange = chat_exchange(record, capture.exchanges.get(call_id))
        if exchange.reply.empty:
            lost["empty_replies"] += 1
            continue
        before = list(_digests(record, exchange))
        calls.append(_Call(position, record, exchange, before, _digest(before[-1], exchange.reply.text)))
    if not calls:
        raise ReconstructionError(Code.NOTHING_TO_TRAIN, "expected a selected call that said something, got none")
    by_end: dict[bytes, list[_Call]] = {}
    for call in calls:
        by_end.setdefault(call.after, []).append(call)
    for call in calls:
        found = next((by_end[digest] for digest in reversed(call.before) if digest in by_end), list[_Call]())
        recorded = [one for one in found if one.record.model_call_id == call.record.parent_call_id]
        call.parent = min(recorded or found, key=lambda one: one.record.model_call_id, default=None)
    return calls


def _digest(before: bytes, text: bytes) -> bytes:
    return sha256(before + text).digest()


def _digests(record: CallRecord, exchange: ChatExchange) -> Iterator[bytes]:
    """Give the digests of model and tools, and after each message of the request."""
    digest = sha256(dumps(["gristmill-conversation-1", record.model, record.adapter, exchange.tools])).digest()
    yield digest
    for turn in exchange.request:
        digest = _digest(digest, turn.text)
        yield digest


def _paths(calls: Sequence[_Call]) -> list[list[_Call]]:
    """Return the root-to-leaf paths, by selection position of the first call, then of the leaf."""
    continued = {id(call.parent) for call in calls}
    paths: list[list[_Call]] = []
    for leaf in calls:
        if id(leaf) in continued:
            continue
        path: list[_Call] = []
        call: _Call | None = leaf
        while call is not None:
            path.append(call)
            call = call.parent
        paths.append(path[::-1])
    paths.sort(key=lambda path: (path[0].position, path[-1].position))
    return paths


def _lines(
    selection: Selection, result: Result, paths: Sequence[Sequence[_Call]], lost: Counter[str]
) -> Iterator[Conversation]:
    trained = set[str]()
    for index, path in enumerate(paths):
        # A call's reply stands after its request, in its own conversation and in those that continue it.
        owned = {len(call.exchange.request): call.record for call in path if call.record.model_call_id not in trained}
        trained.update(record.model_call_id for record in owned.values())
        leaf = path[-1]
        turns = (*leaf.exchange.request, leaf.exchange.reply)
        messages = [
            {**turn.message, "train": int(at in owned)} if turn.message["role"] == "assistant" else turn.message
            for at, turn in enumerate(turns)
        ]
        body: dict[str, Any] = {
            "model": leaf.record.model,
            "calls": [record.model_call_id for _, record in sorted(owned.items())],
            "messages": messages,
            "tools": leaf.exchange.tools,
        }
        for turn in turns:
            lost.update(turn.losses)
        lost.update(leaf.exchange.losses)
        lost["tokens"] += len(owned)
        lost["request_settings"] += len(owned)
        lost["tokens_unusable"] += sum(not record.usable for record in owned.values())
        yield _line(body, selection, result, (index, len(paths)), any(map(stopped_by_length, owned.values())))


def _line(
    body: Mapping[str, Any], selection: Selection, result: Result, place: tuple[int, int], truncated: bool
) -> Conversation:
    key = ("gristmill-conversation-1", selection.rollout_id, selection.attempt, body)
    record_id = sha256(dumps(key)).hexdigest()[:_ID_LEN]
    line = dumps(
        {
            "schema": CONVERSATION_SCHEMA,
            "record_id": record_id,
            "rollout_id": selection.rollout_id,
            "attempt": selection.attempt,
            "group_id": result.group_id,
            "record_index": place[0],
            "record_count": place[1],
            **body,
            "reward": result.reward,
            "advantage": None,
            "truncated": truncated,
        }
    )
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode() if b"\\ud" in line else None
    except UnicodeEncodeError as error:
        message = "expected text that UTF-8 can hold, got a lone surrogate"
        raise ReconstructionError(Code.OUTPUT_MALFORMED, message, where=f"record={place[0]}") from error
    return Conversation(record_id, line + b"\n")


class MessageRecords:
    """Writes conversations as JSON lines; `mode` as in `conversations`."""

    def __init__(self, folder: Folder, mode: RowMode) -> None:
        self.ids = RecordDigest()
        self.losses = Counter[str]()
        self._part = folder.part(MESSAGES_NAME)
        self._mode = mode

    def add(self, capture: Capture, result: Result, outcome: RebuiltRollout | Selection) -> Outcome:
        """Write the conversations of an attempt, or say why they cannot be made."""
        selection = outcome.selection if isinstance(outcome, RebuiltRollout) else outcome
        made = conversations(capture, result, selection, self.losses, mode=self._mode)
        if isinstance(made, Rejected):
            return made
        for record in made:
            self._part.write_record(record.line)
            self.ids.add(record.record_id)
        return selection

    def close(self) -> None:
        """Nothing is held back."""
