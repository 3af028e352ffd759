"""The writes of a ledger: each kind is prepared by its caller and applied by the writer.

Invariant: a write checks everything before it changes anything, so that one that is refused leaves no trace and the
transaction it shares with others goes on.

The writes of setups, endings and imports stand in modules of their own; whoever submits writes imports them from here.

Not here: transactions and threads (writer), whole attempts (imports).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import AttemptBook, Library, check_names, closed_error, name_of
from gristmill.ledger.calls import (
    TokenBlobs,
    checksum,
    encode_record,
    exchange_checksum,
    label_checksum,
    pack_delta,
)
from gristmill.ledger.endings import (
    FROZEN_STATES,
    Finish,
    Freeze,
    KeepSnapshot,
    PreparedResult,
    Retire,
    prepare_result,
)
from gristmill.ledger.exchanges import CutExchange, cut_exchange
from gristmill.ledger.protocol import AttemptKey, AttemptState, StoredCall
from gristmill.ledger.schema import (
    CALLS,
    DELIVERIES,
    EXCHANGES,
    INTENTS,
    LABELS,
    PARTS,
    TOKENS,
    CallRow,
    DeliveryRow,
    ExchangeRow,
    IntentRow,
    LabelRow,
    TokenRow,
    part_no,
)
from gristmill.ledger.setups import Begin, Revoke
from gristmill.records import CallRecord, Delivery, Purpose

__all__ = [
    "Admit",
    "AdmitAll",
    "Begin",
    "Claim",
    "Commit",
    "Deliver",
    "Finish",
    "Freeze",
    "KeepSnapshot",
    "Label",
    "Lose",
    "PreparedCall",
    "PreparedResult",
    "Retire",
    "Revoke",
    "Write",
    "add_call",
    "check_base",
    "prepare_call",
    "prepare_result",
    "reused",
    "unknown_call",
]

ValueT_co = TypeVar("ValueT_co", covariant=True)


class Write(Protocol[ValueT_co]):
    """Something the writer does in a transaction."""

    def apply(self, library: Library) -> ValueT_co:
        """Do it; a `LedgerError` means that nothing was done."""
        ...


class PreparedCall(NamedTuple):
    """An outcome, encoded."""

    record: CallRecord
    encoded: bytes
    checksum: int
    tokens: TokenBlobs | None
    exchange: CutExchange | None


def prepare_call(key: AttemptKey, call: StoredCall) -> PreparedCall:
    """Check and encode an outcome; everything that needs no database.

    Raises:
        LedgerError: `token_count_mismatch`, `option_invalid`.
    """
    record = call.record
    encoded = encode_record(key, record)
    return PreparedCall(
        record,
        encoded,
        checksum(encoded),
        None if call.tokens is None else pack_delta(record, call.tokens),
        None if call.exchange is None else cut_exchange(call.exchange),
    )


def reused(call_id: str, message: str) -> LedgerError:
    """Make the error for a call id that has been used already."""
    return LedgerError(message, code=Code.CALL_IDENTITY_REUSED, where=f"call={call_id}")


def _next(position: int, key: AttemptKey) -> int:
    if position >= PARTS:
        raise LedgerError(
            f"expected at most {PARTS} rows of one kind in {name_of(key)}",
            code=Code.OPTION_INVALID,
            where=key.rollout_id,
        )
    return position


class Claim(NamedTuple):
    """The attempt is about to take calls here; where several processes write, it is this one's from then on."""

    key: AttemptKey

    def apply(self, library: Library) -> None:
        """Make it this writer's."""
        library.known(self.key)


class Admit(NamedTuple):
    """A call is about to be made."""

    key: AttemptKey
    call_id: str
    parent_call_id: str | None

    def apply(self, library: Library) -> None:
        """Add the intent."""
        book = library.look(self.key)
        if book.state != AttemptState.OPEN:
            raise closed_error(self.key, book.state, "takes calls")
        if self.call_id in book.intents or self.call_id in book.outcomes:
            raise reused(self.call_id, f"expected a new call id, got {self.call_id} again")
        position = _next(book.next_intent, self.key)
        book = library.begin(self.key)
        intent_no = part_no(book.attempt_no, position)
        row = IntentRow(intent_no, self.call_id, self.parent_call_id, library.instance, library.now_s(), None, 0)
        library.insert(INTENTS, row)
        book.intents[self.call_id] = (intent_no, True)
        book.next_intent += 1
        book.lost += 1
        library.change(book)


class AdmitAll(NamedTuple):
    """The calls of one request's choices are about to be made: all of them or none."""

    calls: Sequence[Admit]

    def apply(self, library: Library) -> None:
        """Add the intents."""
        names = [call.call_id for call in self.calls]
        for call in self.calls:
            book = library.look(call.key)
            if call.call_id in book.intents or call.call_id in book.outcomes or names.count(call.call_id) > 1:
                raise reused(call.call_id, f"expected new call ids, got {call.call_id} again")
        for call in self.calls:
            call.apply(library)


class Commit(NamedTuple):
    """The outcomes of one reply's choices."""

    key: AttemptKey
    calls: Sequence[PreparedCall]

    def apply(self, library: Library) -> tuple[int, ...]:
        """Add the outcomes and return their ordinals."""
        book = library.look(self.key)
        if book.state in FROZEN_STATES:
            raise closed_error(self.key, book.state, "takes outcomes")
        fresh: dict[str, int | None] = {}
        for call in self.calls:
            call_id = call.record.model_call_id
            if call_id in book.outcomes or call_id in fresh:
                raise reused(call_id, f"expected a call without outcome, {call_id} has one")
            if not book.intents.get(call_id, (0, True))[1]:
                raise reused(call_id, f"expected a call in flight, {call_id} was lost")
            if call.tokens is not None:
                check_base(call.record, book.outcomes, fresh)
            fresh[call_id] = None if call.tokens is None else call.record.cum_len
        _next(book.next_call + len(self.calls), self.key)
        book = library.begin(self.key)
        return tuple(self._add(library, book, call) for call in self.calls)

    def _add(self, library: Library, book: AttemptBook, call: PreparedCall) -> int:
        late = book.state == AttemptState.FINISHED
        ordinal = book.next_ordinal
        call_id = call.record.model_call_id
        add_call(library, book, call, ordinal, late=late)
        intent = book.intents.pop(call_id, None)
        if intent is not None:
            library.connection.execute("DELETE FROM intents WHERE intent_no = ?", intent[:1])
            book.lost -= 1
        if late:
            book.lost += 1
        return ordinal


def check_base(record: CallRecord, *known: Mapping[str, int | None]) -> None:
    """Refuse tokens whose base is not there, or has another length than the record says.

    Args:
        record: of a call with tokens.
        known: lengths of whole sequences by call id, None where no tokens are stored.

    Raises:
        LedgerError: `token_count_mismatch`.
    """
    base = record.base_call_id
    if base is None:
        return
    cum_len = next((lengths[base] for lengths in known if base in lengths), None)
    if cum_len != record.prev_len:
        got = "no tokens of it" if cum_len is None else f"{cum_len} tokens"
        raise LedgerError(
            f"call {record.model_call_id}: expected its base {base} to have {record.prev_len} tokens, got {got}",
            code=Code.TOKEN_COUNT_MISMATCH,
            where=f"call={record.model_call_id}",
        )


def unknown_call(key: AttemptKey, call_id: str) -> LedgerError:
    """Make the error for a call that the attempt does not have."""
    return LedgerError(
        f"expected a call of {name_of(key)}, got {call_id}", code=Code.CALL_UNKNOWN, where=f"call={call_id}"
    )


def add_call(library: Library, book: AttemptBook, call: PreparedCall, ordinal: int, *, late: bool) -> None:
    """Insert the rows of a checked outcome and count it."""
    record, tokens, exchange = call.record, call.tokens, call.exchange
    call_no = part_no(book.attempt_no, book.next_call)
    cum_len = None if tokens is None else record.cum_len
    call_id = record.model_call_id
    row = CallRow(call_no, call_id, ordinal, late, library.instance, cum_len, call.encoded, call.checksum)
    library.add(CALLS, row)
    library.unsaved_bytes += len(call.encoded)
    if tokens is not None:
        library.add(TOKENS, TokenRow(call_no, *tokens))
        library.unsaved_bytes += len(tokens.ids) + len(tokens.logprobs)
    if exchange is not None:
        request, reply, headers = (library.store(book, piece) for piece in exchange[:3])
        crc = exchange_checksum(request, reply, headers, exchange.status)
        library.add(EXCHANGES, ExchangeRow(call_no, request, reply, headers, exchange.status, crc))
    book.next_call += 1
    book.next_ordinal = ordinal + 1
    book.outcomes[call_id] = cum_len
    if not late:
        book.count(record)
    library.change(book)


class Lose(NamedTuple):
    """An admitted call will have no outcome."""

    key: AttemptKey
    call_id: str
    reason: str

    def apply(self, library: Library) -> None:
        """Give the intent its reason."""
        book = library.known(self.key)
        if book.state in FROZEN_STATES:
            raise closed_error(self.key, book.state, "takes outcomes")
        if self.call_id in book.outcomes:
            raise reused(self.call_id, f"expected a call without outcome, {self.call_id} has one")
        if self.call_id not in book.intents:
            raise unknown_call(self.key, self.call_id)
        intent_no, is_open = book.intents[self.call_id]
        if not is_open:
            raise reused(self.call_id, f"expected a call in flight, {self.call_id} was lost before")
        library.connection.execute("UPDATE intents SET reason = ? WHERE intent_no = ?", (self.reason, intent_no))
        book.intents[self.call_id] = (intent_no, False)
        library.change(book)


class Deliver(NamedTuple):
    """Whether the client got a reply."""

    key: AttemptKey
    call_id: str
    delivery: Delivery

    def apply(self, library: Library) -> None:
        """Append the event."""
        book = library.known(self.key)
        if self.call_id not in book.outcomes and self.call_id not in book.intents:
            raise unknown_call(self.key, self.call_id)
        delivery_no = part_no(book.attempt_no, _next(book.next_delivery, self.key))
        library.add(DELIVERIES, DeliveryRow(delivery_no, self.call_id, self.delivery, library.now_s()))
        book.next_delivery += 1
        library.change(book)


class Label(NamedTuple):
    """What calls were for, by call id."""

    key: AttemptKey
    labels: Mapping[str, Purpose]

    def apply(self, library: Library) -> None:
        """Append the events."""
        book = library.known(self.key)
        if book.state in FROZEN_STATES:
            raise closed_error(self.key, book.state, "takes labels")
        for call_id, purpose in self.labels.items():
            if call_id not in book.outcomes and call_id not in book.intents:
                raise unknown_call(self.key, call_id)
            check_names(self.key, purpose.evidence)
        if not self.labels:
            return
        _next(book.next_label + len(self.labels) - 1, self.key)
        now_s = library.now_s()
        for call_id, purpose in self.labels.items():
            label_no = part_no(book.attempt_no, book.next_label)
            crc = label_checksum(call_id, purpose)
            library.add(LABELS, LabelRow(label_no, call_id, purpose.label, purpose.evidence, now_s, crc))
            book.next_label += 1
        library.change(book)
