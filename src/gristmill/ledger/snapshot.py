"""The digest of a whole attempt: what a snapshot id is.

Invariant: two attempts have the same snapshot id exactly if their records (labels included), tokens, lost calls,
exchanges, late outcomes, results and setups are equal, whichever ledger holds them. Keys are no part of it.

Not here: when an attempt may be deleted (protocol).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Final, Protocol

import msgspec
import numpy as np

from gristmill.canonical import JsonValue
from gristmill.captures.credit import credit_json
from gristmill.captures.exact import plain_numbers
from gristmill.captures.reply import Unexpected
from gristmill.ledger.bodies import written
from gristmill.ledger.exchanges import ExchangeTexts, StoredExchanges, exchange_texts
from gristmill.ledger.protocol import AttemptSetup, StoredCall
from gristmill.records import Capture, Exchange, LostCall, Result, TokenDelta

__all__ = ["snapshot_id"]

_NO_OUTCOME: Final = LostCall(model_call_id="").reason


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def snapshot_id(
    capture: Capture, result: Result | None, late: Iterable[StoredCall] = (), setup: AttemptSetup | None = None
) -> str:
    """Digest an attempt: 64 hexadecimal digits.

    Args:
        capture: the attempt, its tokens and exchanges included.
        result: what the harness handed back.
        late: outcomes that came after it had finished.
        setup: what it was opened with; its key and time do not count.

    Raises:
        LedgerError: `option_invalid`, a result or exchange is no JSON.
    """
    digest = sha256(b"gristmill-snapshot-2\n")
    lost = tuple(map(_with_default, capture.lost))
    _add(digest, msgspec.json.encode((capture.rollout_id, capture.attempt, capture.records, lost)))
    for call_id in sorted(capture.tokens):
        _add_delta(digest, call_id, capture.tokens[call_id])
    for call_id, texts in _texts(capture.exchanges):
        _add_exchange(digest, call_id, texts)
    for call in late:
        call_id = call.record.model_call_id
        _add(digest, b"late " + msgspec.json.encode(call.record))
        if call.tokens is not None:
            _add_delta(digest, call_id, call.tokens)
        if call.exchange is not None:
            _add_exchange(digest, call_id, exchange_texts(call.exchange))
    if result is not None:
        reward = None if result.reward is None else float(result.reward)
        _add(digest, msgspec.json.encode((reward, result.group_id)))
        _add(digest, written(result.value, "$.result"))
        _add(digest, written(_read_back(dict(result.metadata)), "$.metadata"))
        credit = credit_json(result)
        if credit:
            _add(digest, b"credit " + written(credit, "$"))
    if setup is not None:
        _add(digest, b"setup " + msgspec.json.encode(setup.group_id))
        _add(digest, written(_read_back(dict(setup.metadata)), "$.metadata"))
        _add(digest, written(_read_back(dict(setup.overrides)), "$.overrides"))
    return digest.hexdigest()


def _with_default(lost: LostCall) -> LostCall:
    """Return an equal lost call that is written alike: msgspec leaves out a default only if it is the same object."""
    return msgspec.structs.replace(lost, reason=_NO_OUTCOME) if lost.reason == _NO_OUTCOME else lost


def _read_back(metadata: dict[str, object]) -> JsonValue:
    """Return metadata as a ledger gives it back: with plain numbers."""
    try:
        return plain_numbers(metadata, "$.metadata")
    except Unexpected:
        return metadata


def _texts(exchanges: Mapping[str, Exchange]) -> Iterator[tuple[str, ExchangeTexts]]:
    if isinstance(exchanges, StoredExchanges):
        yield from exchanges.texts()
    else:
        for call_id in sorted(exchanges):
            yield call_id, exchange_texts(exchanges[call_id])


def _add(digest: _Digest, data: bytes) -> None:
    digest.update(b"%d\n" % len(data))
    digest.update(data)


def _add_exchange(digest: _Digest, call_id: str, texts: ExchangeTexts) -> None:
    _add(digest, f"exchange {call_id} {texts.status}".encode())
    for text in texts[:3]:
        _add(digest, text)


def _add_delta(digest: _Digest, call_id: str, delta: TokenDelta) -> None:
    arrays = {"ids": delta.ids_T, "mask": delta.mask_T, "logprobs": delta.logprobs_T}
    arrays |= {f"extras.{name}": delta.extras[name] for name in sorted(delta.extras)}
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        _add(digest, f"{call_id} {name} {little.dtype.str} {array.shape}".encode())
        _add(digest, little.tobytes())
