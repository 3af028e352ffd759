"""What went over the wire: cut into pieces when it is written, decoded when it is looked at.

Invariant: request and reply read back equal as JSON, numbers and repeated keys included, and as the same text.
A capture's exchanges take the memory of their distinct pieces, however often a history was sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gristmill.canonical import loads
from gristmill.errors import Code, LedgerError
from gristmill.ledger.bodies import Piece, cut, expander, piece_digest, written
from gristmill.ledger.calls import exchange_checksum
from gristmill.ledger.schema import PARTS, BodyRow, ExchangeRow
from gristmill.records import Exchange

__all__ = ["CutExchange", "ExchangeTexts", "StoredExchanges", "cut_exchange", "exchange_texts", "stored_texts"]


class CutExchange(NamedTuple):
    """An exchange in pieces."""

    request: Piece
    reply: Piece
    headers: Piece
    status: int | None


class ExchangeTexts(NamedTuple):
    """An exchange as JSON texts."""

    request: bytes
    reply: bytes
    headers: bytes
    status: int | None


def cut_exchange(exchange: Exchange) -> CutExchange:
    """Cut an exchange into pieces.

    Raises:
        LedgerError: `option_invalid`, it holds what JSON cannot say.
    """
    where = f"call={exchange.model_call_id}"
    status = exchange.status
    if status is not None and not -(2**63) <= status < 2**63:
        raise LedgerError(f"expected an HTTP status, got {status}", code=Code.OPTION_INVALID, where=where)
    return CutExchange(
        cut(exchange.request, f"{where} request"),
        cut(exchange.reply, f"{where} reply"),
        cut(dict(exchange.headers), f"{where} headers"),
        status,
    )


def exchange_texts(exchange: Exchange) -> ExchangeTexts:
    """Write an exchange whole; `LedgerError` as `cut_exchange`."""
    where = f"call={exchange.model_call_id}"
    return ExchangeTexts(
        written(exchange.request, where),
        written(exchange.reply, where),
        written(dict(exchange.headers), where),
        exchange.status,
    )


def _damaged(where: str) -> LedgerError:
    return LedgerError(f"expected {where} as it was written, got other bytes", code=Code.LEDGER_DAMAGED, where=where)


def stored_texts(bodies: Iterable[BodyRow]) -> dict[int, bytes]:
    """Check the stored pieces of an attempt, in the order of their numbers, and return their texts.

    Raises:
        LedgerError: `ledger_damaged`, a piece is not what its digest says.
    """
    texts: dict[int, bytes] = {}
    digests: dict[int, bytes] = {}
    for row in bodies:
        number = row.body_no % PARTS
        parts = row.text.split(b"\x01")
        try:
            # Texts and references alternate.
            named = [b"\x01" + digests[int(part)] if place % 2 else part for place, part in enumerate(parts)]
        except (KeyError, ValueError) as error:
            raise _damaged(f"body {number}") from error
        if piece_digest(named) != row.digest:
            raise _damaged(f"body {number}")
        texts[number], digests[number] = row.text, row.digest
    return texts


class StoredExchanges(Mapping[str, Exchange]):
    """The exchanges of an attempt by call id, each decoded anew when it is asked for.

    Args:
        rows: by call id, in commit order.
        texts: the attempt's stored pieces.

    Raises:
        LedgerError: `ledger_damaged`, here and wherever an exchange is asked for.
    """

    def __init__(self, rows: Mapping[str, ExchangeRow], texts: Mapping[int, bytes]) -> None:
        for call_id, row in rows.items():
            if exchange_checksum(row.request, row.reply, row.headers, row.status) != row.checksum:
                raise _damaged(f"exchange of call={call_id}")
        self._rows: Final = rows
        self._texts: Final = texts

    def stored(self) -> tuple[Mapping[str, ExchangeRow], Mapping[int, bytes]]:
        """Give the rows by call id, and the attempt's pieces by number, as they are stored."""
        return self._rows, self._texts

    def texts(self) -> Iterator[tuple[str, ExchangeTexts]]:
        """Yield each exchange as JSON texts, in the order of the call ids."""
        expand = expander(self._texts)
        for call_id in sorted(self._rows):
            yield call_id, self._expanded(call_id, expand)

    def _expanded(self, call_id: str, expand: Callable[[bytes], bytes]) -> ExchangeTexts:
        row = self._rows[call_id]
        try:
            return ExchangeTexts(expand(row.request), expand(row.reply), expand(row.headers), row.status)
        except KeyError as error:
            # Rows that a damaged page took with it.
            raise _damaged(f"exchange of call={call_id}") from error

    def __getitem__(self, call_id: str) -> Exchange:
        request, reply, headers, status = self._expanded(call_id, expander(self._texts))
        where = f"call={call_id}"
        return Exchange(
            model_call_id=call_id,
            request=loads(request, where),
            reply=loads(reply, where),
            headers=loads(headers, where),
            status=status,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
