"""The checks of one attempt: every reply that was acknowledged, every call that was admitted, every parent.

Invariant: who is answered is told by the nonces in the texts, what was sampled by the engine's own notes; the record is
believed in nothing.

Not here: the run as a whole (verify).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from gristmill.records import CallRecord, Capture, Delivery, Exchange, ParentResolution
from tests.gateway.load.conversation import MODEL
from tests.gateway.load.engine import EngineSaw, SawChoice, ids_digest
from tests.gateway.load.harness import evidence_digest
from tests.gateway.load.journal import AttemptJournal, Fate, Sent
from tests.gateway.load.replies import Said, SaidReply, ToolUse, read_body
from tests.gateway.load.script import heard, nonces

__all__ = ["AttemptCheck"]

_SETTLES_s = 5.0
_DELIVERS_s = 5.0
_BAD_DELIVERIES = frozenset({Delivery.ABORTED, Delivery.PARTIAL})


def _base(call_id: str) -> str:
    """Return the id under which a choice's request went to the engine."""
    return call_id.partition("#")[0]


class AttemptCheck:
    """Checks one attempt.

    Args:
        attempt: what its harness noted.
        capture: what the ledger holds, tokens and exchanges included.
        by_call: what the engine saw of all calls.
        sampled: the calls that the engine saw with a nonce of this attempt.
        killed_at: when a gateway was killed, in unix seconds.

    Attributes:
        acknowledged: choices of acknowledged replies.
        unheard: calls that completed and whose reply no client has in full.
        ambiguous: calls whose parent is one of two that said the same.
    """

    def __init__(
        self,
        attempt: AttemptJournal,
        capture: Capture,
        by_call: Mapping[str, EngineSaw],
        sampled: set[str],
        killed_at: Sequence[float] = (),
    ) -> None:
        self._attempt = attempt
        self._capture = capture
        self._by_call = by_call
        self._sampled = sampled
        self._killed_at = killed_at
        self._records = {record.model_call_id: record for record in capture.records}
        self._nonces = {call_id: _asked(exchange) for call_id, exchange in capture.exchanges.items()}
        self._sent: dict[str, list[Sent]] = {}
        for sent in attempt.sent:
            self._sent.setdefault(sent.nonce, []).append(sent)
        self._sequences: dict[str, np.ndarray[Any, Any]] = {}
        self._found: list[str] = []
        self.acknowledged = 0
        self.unheard = self.ambiguous = 0

    def run(self) -> list[str]:
        """Return what is wrong, a sentence each."""
        heard_of: dict[str, Sent] = {}
        for sent in self._attempt.sent:
            self._check_sent(sent, heard_of)
        for record in self._capture.records:
            self._check_record(record)
            self._check_tokens(record)
            self._check_parent(record)
        self._check_lost(heard_of)
        self._check_counts()
        self.unheard = sum(
            record.response_status == "completed" and _base(record.model_call_id) not in heard_of
            for record in self._capture.records
        )
        return self._found

    def _say(self, call_id: str | None, what: str) -> None:
        self._found.append(f"{self._attempt.name} {call_id}: {what}")

    # ---- what clients have -------------------------------------------------------------------------------------------

    def _check_sent(self, sent: Sent, heard_of: dict[str, Sent]) -> None:
        """A reply that a client knows the end of is a record, and says what the client got."""
        if sent.fate is None:
            self._say(sent.call_id, f"what became of {sent.nonce} was never noted")
        if sent.fate is not Fate.ACKNOWLEDGED:
            if sent.reply.finishes >= sent.n and sent.call_id not in self._records:
                self._say(sent.call_id, f"the client of {sent.nonce} was told of its end, and there is no record")
            return
        if sent.call_id is None:
            self._say(None, f"the reply to {sent.nonce} does not say which call it is")
            return
        before = heard_of.setdefault(sent.call_id, sent)
        if before is not sent:
            self._say(sent.call_id, "two requests were answered with one call, and both have the whole reply")
        if len(sent.reply.choices) != sent.n:
            self._say(sent.call_id, f"expected {sent.n} choices, the client got {len(sent.reply.choices)}")
        for index, said in enumerate(sent.reply.choices):
            self.acknowledged += 1
            call_id = sent.call_id if index == 0 else f"{sent.call_id}#{index}"
            record = self._records.get(call_id)
            if record is None:
                self._say(call_id, f"the reply to {sent.nonce} was acknowledged, and there is no record of it")
                continue
            self._check_acknowledged(sent, record, said, index)

    def _check_acknowledged(self, sent: Sent, record: CallRecord, said: Said, index: int) -> None:
        call_id = record.model_call_id
        if not record.usable:
            self._say(call_id, f"acknowledged and not usable: {record.unusable_reason}: {record.unusable_detail}")
        if record.response_status != "completed":
            self._say(call_id, f"acknowledged with status {record.response_status}")
        for what, stored, given in (
            ("response id", record.response_id, sent.reply.response_id),
            ("dialect", record.dialect, sent.dialect),
            ("choice", record.choice_index, index),
            ("content", _content(record), said.content),
            ("nonce", self._nonces[call_id], sent.nonce),
        ):
            if stored != given:
                self._say(call_id, f"its {what} is {stored!r}, the client's is {given!r}")
        exchange = self._capture.exchanges[call_id]
        if sent.evidence is not None and sent.evidence != evidence_digest(_plain(exchange.request)):
            self._say(call_id, "the stored request is not the one that was sent")
        stored_reply = SaidReply() if exchange.reply is None else read_body(sent.dialect, _plain(exchange.reply))
        if index >= len(stored_reply.choices) or stored_reply.choices[index].content != said.content:
            self._say(call_id, "the stored reply is not the one that the client got")
        if record.delivery is not Delivery.DELIVERED and not (
            record.delivery is Delivery.UNKNOWN and self._killed_soon_after(record)
        ):
            self._say(call_id, f"the client has the whole reply, and its delivery is {record.delivery}")
        if record.requested_model != MODEL:
            self._say(call_id, f"{MODEL} was asked for, and {record.requested_model} is stored")

    def _killed_soon_after(self, record: CallRecord) -> bool:
        """Tell whether there was hardly time to write that a reply had been delivered."""
        done = record.completed_at or 0.0
        return any(done <= at <= done + _DELIVERS_s for at in self._killed_at)

    # ---- what the ledger has -----------------------------------------------------------------------------------------

    def _check_record(self, record: CallRecord) -> None:
        """A call belongs to who asked, and is complete only if the engine was."""
        call_id, key = record.model_call_id, self._attempt.key
        if (record.rollout_id, record.attempt) != key:
            self._say(call_id, f"its record names {record.rollout_id}/{record.attempt}")
        asked = self._nonces.get(call_id)
        if asked is None:
            self._say(call_id, "its request is not stored, or has no nonce")
            return
        for nonce in nonces(_text(self._capture.exchanges[call_id].request)):
            if not nonce.startswith(f"{key.rollout_id}/{key.attempt}/"):
                self._say(call_id, f"its request holds {nonce}, which another attempt asked")
        if asked not in self._sent:
            self._say(call_id, f"nobody asked {asked}")
        saw = self._by_call.get(_base(call_id))
        if saw is not None and saw.nonce != asked:
            self._say(call_id, f"it stores {asked}, the engine was asked {saw.nonce}")
        said = heard(_content(record)[0]) or heard(msgspec.json.encode(_content(record)[2]).decode())
        if said is not None and (said.nonce, said.choice) != (asked, record.choice_index):
            self._say(call_id, f"choice {record.choice_index} of {asked} has the reply {said}")
        if record.response_status == "completed":
            if saw is None or not saw.finished:
                self._say(call_id, "it is completed, and the engine never finished it")
            elif said is None:
                self._say(call_id, "it is completed, and its reply does not say what it answers")
        elif record.usable and record.response_status != "incomplete":
            self._say(call_id, f"it is usable with status {record.response_status}")
        self._check_retry(record, asked)

    def _check_retry(self, record: CallRecord, asked: str) -> None:
        """A repeated request names the last one before it, and nothing else is a retry."""
        if record.choice_index or record.request_digest is None:
            return
        earlier = self._records.get(record.retry_of or "")
        if record.retry_of is not None and (
            earlier is None or self._nonces[record.retry_of] != asked or earlier.ordinal >= record.ordinal
        ):
            self._say(record.model_call_id, f"it is marked as a retry of {record.retry_of}, which it does not repeat")
        told = self._told_before(record, asked)
        if told is not None and record.retry_of is None:
            self._say(record.model_call_id, f"it repeats {told} and does not say so")

    def _told_before(self, record: CallRecord, asked: str) -> str | None:
        """Return a call whose client was told that it failed before it asked again: that was a record by then."""
        found: str | None = None
        for sent in self._sent.get(asked, ()):
            if sent.call_id == record.model_call_id:
                return found
            other = self._records.get(sent.call_id or "")
            if sent.fate is Fate.REFUSED and other is not None and other.request_digest is not None:
                found = other.model_call_id
        return None

    def _check_tokens(self, record: CallRecord) -> None:
        """Tokens are what the engine sent: of a completed call all of it, of another one its beginning."""
        call_id = record.model_call_id
        delta = self._capture.tokens.get(call_id)
        if delta is None:
            if record.usable:
                self._say(call_id, "it is usable and has no tokens")
            return
        saw = self._by_call.get(_base(call_id))
        if saw is None:
            self._say(call_id, "it has tokens, and the engine was never asked")
            return
        context = record.prompt_len - record.prev_len
        prompt = delta.ids_T[:context]
        if record.base_call_id is not None:
            base = self._sequences.get(record.base_call_id)
            if base is None or len(base) != record.prev_len:
                self._say(call_id, f"its tokens begin with those of {record.base_call_id}, which has others")
                return
            prompt = np.concatenate((base, prompt))
        self._sequences[call_id] = np.concatenate((prompt, delta.ids_T[context:]))
        if ids_digest(prompt) != saw.prompt:
            self._say(call_id, "its prompt's ids are not those that the engine sent")
        sent = saw.choices[record.choice_index] if record.choice_index < len(saw.choices) else SawChoice()
        ids, logprobs = delta.ids_T[context:], delta.logprobs_T[context:]
        whole = record.response_status == "completed"
        if list(ids) != (sent.ids if whole else sent.ids[: len(ids)]):
            self._say(call_id, "its ids are not those that the engine sent")
        expected = np.asarray(sent.logprobs if whole else sent.logprobs[: len(logprobs)], np.float32)
        if not np.array_equal(logprobs, expected):
            self._say(call_id, "its log-probabilities are not those that the engine sent")

    def _check_parent(self, record: CallRecord) -> None:
        """Every request continues the reply that its harness went on with."""
        asked = self._nonces.get(record.model_call_id)
        sent = self._sent.get(asked or "")
        if not sent or record.context_digest is None:
            return
        expected = sent[0].parent
        resolution = ParentResolution.ROOT if expected is None else ParentResolution.RESOLVED
        if (record.parent_call_id, record.parent_resolution) == (expected, resolution):
            return
        given = f"{record.parent_call_id} ({record.parent_resolution})"
        if given == f"None ({ParentResolution.AMBIGUOUS})" and expected is not None:
            self.ambiguous += 1
            if any(self._may_be_meant(twin, record) for twin in self.twins(expected)):
                return
        self._say(record.model_call_id, f"it continues {expected}, and its parent is {given}")

    def twins(self, call_id: str) -> set[str]:
        """Return the other calls that asked and said the same: retries whose first reply did not arrive."""
        record = self._records.get(call_id)
        if record is None:
            return set()
        said = self._nonces[call_id], _content(record)
        return {
            other.model_call_id
            for other in self._capture.records
            if other is not record and (self._nonces[other.model_call_id], _content(other)) == said
        }

    def twins_of(self, path: Iterable[str]) -> set[str]:
        """Return the twins of all calls of a history."""
        return {twin for call_id in path for twin in self.twins(call_id)}

    def _may_be_meant(self, twin: str, record: CallRecord) -> bool:
        """Tell whether a gateway that saw this request could not know that nobody has the reply of the twin."""
        other = self._records[twin]
        if other.delivery not in _BAD_DELIVERIES:
            return True
        # The end of a call is a moment before its record and its delivery are stored.
        return (other.completed_at or 0.0) + _SETTLES_s > (record.admitted_at or 0.0)

    # ---- what nobody has ---------------------------------------------------------------------------------------------

    def _check_lost(self, heard_of: Mapping[str, Sent]) -> None:
        lost = {call.model_call_id: call for call in self._capture.lost}
        for call_id, call in lost.items():
            if call_id in self._records or _base(call_id) in heard_of:
                self._say(call_id, "it is lost, and somebody has its reply")
            if call.maybe_received:
                self._say(call_id, "it is lost, and said to have been received perhaps")
        known = {_base(call_id) for call_id in (*self._records, *lost)}
        for call_id in self._sampled - known:
            self._say(call_id, f"the engine sampled it for {self._by_call[call_id].nonce}, and the ledger has it not")
        for call_id in known - self._sampled:
            saw = self._by_call.get(call_id)
            if saw is not None:
                self._say(call_id, f"it is stored here, and the engine was asked {saw.nonce}")

    def _check_counts(self) -> None:
        """A request makes at most one call, and one that is answered from the record makes none."""
        made: dict[str, set[str]] = {}
        for call_id, asked in self._nonces.items():
            made.setdefault(asked or "", set()).add(_base(call_id))
        for call in self._capture.lost:
            saw = self._by_call.get(_base(call.model_call_id))
            if saw is not None:
                made.setdefault(saw.nonce, set()).add(_base(call.model_call_id))
        for asked, calls in made.items():
            sent = self._sent.get(asked, [])
            most = sum(not each.replayed for each in sent)
            if len(calls) > most:
                self._say(None, f"{asked} was sent {most} times, and there are {len(calls)} calls of it")
        for sent in self._attempt.sent:
            if sent.replayed and sent.call_id is not None and self._nonces.get(sent.call_id) != sent.nonce:
                self._say(sent.call_id, f"{sent.nonce} was answered from it, and it was asked something else")


def _asked(exchange: Exchange) -> str | None:
    """Return what a stored request asks: the last nonce in it."""
    found = nonces(_text(exchange.request))
    return found[-1] if found else None


def _text(request: Any) -> str:
    """Return the messages of a request, or its prompt, as one text."""
    if not isinstance(request, Mapping):
        return ""
    body: Mapping[str, Any] = request
    return orjson.dumps(_plain([body.get("prompt"), body.get("messages"), body.get("input")])).decode()


def _plain(value: Any) -> Any:
    """Return JSON as plain values; requests and replies of a run have no numbers but integers."""
    return msgspec.to_builtins(value)


def _content(record: CallRecord) -> tuple[str, str, tuple[ToolUse, ...]]:
    """Return what a record says that was served."""
    text, reasoning, tools = "", "", []
    for item in record.output_items:
        for atom in item.atoms or ():
            match atom.kind:
                case "text":
                    text += atom.text
                case "reasoning":
                    reasoning += atom.text
                case "tool_call":
                    tools.append(ToolUse.read(atom.call_id, atom.name, atom.text))
                case _:
                    pass
    return text, reasoning, tuple(tools)
