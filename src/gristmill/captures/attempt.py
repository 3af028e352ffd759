"""One attempt while its lines are read: calls in commit order, then records and token deltas.

Invariant: commit order is the order of the lines; an `ordinal` may leave gaps and never goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from gristmill.captures.call import MadeCall, calls_from_reply, choice_call_id, with_tokens
from gristmill.captures.call_line import CallLine
from gristmill.captures.exchange_line import ExchangeLine
from gristmill.captures.reply import Unexpected
from gristmill.errors import SelectionError
from gristmill.lineage import LineageIndex, RequestDigests
from gristmill.records import CallRecord, Capture, Delivery, Exchange, LostCall, Result, TokenDelta
from gristmill.tokens import TokenBook

__all__ = ["AttemptReader"]


class AttemptReader:
    """Collects the lines of one attempt."""

    def __init__(self, rollout_id: str, attempt: int) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.lost: list[LostCall] = []
        self.deliveries: list[tuple[str, str, Delivery]] = []
        self.result: Result | None = None
        self._entries: list[CallLine | ExchangeLine] = []
        self._next_ordinal = 0

    def _ordinal(self, stated: int | None, calls: int) -> int:
        ordinal = self._next_ordinal if stated is None else stated
        if ordinal < self._next_ordinal:
            raise Unexpected(f"an ordinal from {self._next_ordinal} on", str(ordinal), "$.ordinal")
        self._next_ordinal = ordinal + calls
        return ordinal

    def add_call(self, call: CallLine) -> None:
        """Add a `call` line.

        Raises:
            Unexpected: its ordinal goes back.
        """
        ordinal = self._ordinal(call.ordinal, 1)
        record = msgspec.structs.replace(call.record, ordinal=ordinal)
        self._entries.append(msgspec.structs.replace(call, record=record))

    def add_exchange(self, line: ExchangeLine) -> None:
        """Add an `exchange` line; `Unexpected` as in `add_call`."""
        ordinal = self._ordinal(line.ordinal, len(line.reply.choices))
        context = msgspec.structs.replace(line.context, ordinal=ordinal)
        self._entries.append(msgspec.structs.replace(line, context=context))

    def _ids(self) -> Iterator[str]:
        for entry in self._entries:
            if isinstance(entry, CallLine):
                yield entry.record.model_call_id
            else:
                for choice in entry.reply.choices:
                    yield choice_call_id(entry.context.model_call_id, choice.index)

    def repeated_ids(self) -> list[str]:
        """Return call ids that more than one call has; selection refuses them, reading does not."""
        return [call_id for call_id, times in Counter(self._ids()).items() if times > 1]

    def unknown_deliveries(self) -> list[tuple[str, str]]:
        """Return place and call id of the deliveries that name no call of this attempt."""
        known = set(self._ids()) | {lost.model_call_id for lost in self.lost}
        known.update(entry.context.model_call_id for entry in self._entries if isinstance(entry, ExchangeLine))
        return [(where, call_id) for where, call_id, _ in self.deliveries if call_id not in known]

    def capture(self) -> Capture:
        """Make the records and token deltas."""
        book = TokenBook()
        states = {call_id: state for _, call_id, state in self.deliveries}
        siblings = _sibling_tokens([entry for entry in self._entries if isinstance(entry, CallLine)])
        made: list[MadeCall] = []
        exchanges: dict[str, Exchange] = {}
        parents = LineageIndex()
        for stated in self._entries:
            entry = _with_parent(stated, parents)
            if isinstance(entry, CallLine):
                fresh = [_made(entry, siblings, book)]
                base_id = entry.record.model_call_id
            else:
                fresh = calls_from_reply(entry.reply, entry.context, book)
                base_id = entry.context.model_call_id
            for call in fresh:
                call_id = call.record.model_call_id
                state = states.get(call_id, states.get(base_id))
                record = call.record if state is None else msgspec.structs.replace(call.record, delivery=state)
                parents.add(call_id, _digests(record), record.delivery)
                made.append(MadeCall(record, call.tokens))
                if entry.exchange is not None:
                    exchanges[call_id] = msgspec.structs.replace(entry.exchange, model_call_id=call_id)
        tokens: Mapping[str, TokenDelta] = {
            call.record.model_call_id: call.tokens for call in made if call.tokens is not None
        }
        records: tuple[CallRecord, ...] = tuple(call.record for call in made)
        return Capture(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            records=records,
            tokens=tokens,
            lost=tuple(self.lost),
            exchanges=exchanges,
        )


def _digests(record: CallRecord) -> RequestDigests:
    return RequestDigests(
        record.context_digest,
        record.continuation_digest,
        record.continuation_digest_bare,
        record.system_digest,
        record.tools_digest,
    )


def _with_parent(entry: CallLine | ExchangeLine, parents: LineageIndex) -> CallLine | ExchangeLine:
    """Name the parent of a call whose line does not speak of it, where its request is known."""
    request = entry.exchange.request if entry.exchange is not None else None
    if entry.parent_stated or not isinstance(request, Mapping):
        return entry
    try:
        link = parents.parent_of(request)
    except SelectionError:
        # A request that cannot be read has no lineage keys either; the call stays without a parent.
        return entry
    if isinstance(entry, CallLine):
        record = msgspec.structs.replace(
            entry.record, parent_call_id=link.parent_call_id, parent_resolution=link.resolution
        )
        return msgspec.structs.replace(entry, record=record)
    context = msgspec.structs.replace(
        entry.context, parent_call_id=link.parent_call_id, parent_resolution=link.resolution
    )
    return msgspec.structs.replace(entry, context=context)


def _sibling_tokens(calls: list[CallLine]) -> dict[str, int]:
    """Count the sampled tokens of each reply whose choices stand on lines of their own.

    The usage on such lines is the reply's, so it is compared with the sum over its choices.
    """
    by_reply: dict[str, list[CallLine]] = {}
    for call in calls:
        by_reply.setdefault(call.record.response_id, []).append(call)
    totals: dict[str, int] = {}
    for response_id, members in by_reply.items():
        indexes = {call.record.choice_index for call in members}
        if len(members) > 1 and len(indexes) == len(members):
            totals[response_id] = sum(len(call.tokens.token_ids or ()) for call in members)
    return totals


def _made(call: CallLine, siblings: Mapping[str, int], book: TokenBook) -> MadeCall:
    reported = call.completion_tokens
    total = siblings.get(call.record.response_id)
    if reported is not None and total is not None:
        reported -= total - len(call.tokens.token_ids or ())
    return with_tokens(call.record, call.tokens, reported, book, call.extras)
