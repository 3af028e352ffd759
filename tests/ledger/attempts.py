"""Calls to store: chained tokens, a conversation that grows, everything a record can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from gristmill.canonical import loads
from gristmill.errors import Code, LedgerError
from gristmill.ledger import AttemptKey, Ledger, StoredCall
from gristmill.records import Atom, CallRecord, Capture, Exchange, ItemKind, OutputItem, Result, TokenDelta
from gristmill.tokens import TokenBook

__all__ = ["ODD_JSON", "chain", "comparable", "fill", "lone", "refused", "same_tokens"]

ODD_JSON = loads(
    rb'{"a": 1.10, "b": 1e999, "c": [9007199254740993.0, -0, -0.0, 12345678901234567890123], "d": "\ud800",'
    rb' "e": {"k": 1, "k": 2}, "f": "\u0001\u0000", "": null, "g": [[], {}, [[]], ""], "h": true, "i": "\\u0001"}'
)
"""A value that most JSON libraries change."""


def lone(call_id: str, **fields: Any) -> StoredCall:
    """Make a call without tokens."""
    return StoredCall(record=CallRecord(model_call_id=call_id, response_id=call_id, **fields))


def chain(calls: int, seed: int = 0, new_T: int = 24, long_chars: int = 300) -> Iterator[StoredCall]:
    """Make calls of which each continues the one before."""
    rng = np.random.default_rng(seed)
    book = TokenBook()
    messages: list[Any] = [{"role": "user", "content": f"do task {seed} " + "x" * long_chars}]
    for n in range(calls):
        call_id = f"c{n}"
        ids_T = rng.integers(0, 2**31 - 1, new_T, dtype=np.int32)
        suffix_T, sampled_T = ids_T[: new_T // 2], ids_T[new_T // 2 :]
        logprobs_T = -rng.random(sampled_T.size, dtype=np.float32)
        extras = {"experts": rng.integers(0, 60, (sampled_T.size, 2), dtype=np.int16)} if n == 1 else {}
        if n:
            stored = book.extend(call_id, f"c{n - 1}", suffix_T, sampled_T, logprobs_T, extras=extras)
        else:
            stored = book.add(call_id, suffix_T, sampled_T, logprobs_T, extras=extras)
        fields = {name: getattr(stored, name) for name in stored.__struct_fields__ if name != "delta"}
        said = f"answer {n} of {seed} " + "y" * long_chars
        record = CallRecord(
            model_call_id=call_id,
            response_id=f"r{n}",
            parent_call_id=f"c{n - 1}" if n else None,
            model="m" if n % 3 else "other",
            output_items=(OutputItem(ItemKind.TEXT, "f" * 64, atoms=(Atom("text", said),)),),
            usable=n % 2 == 0,
            admitted_at=100.0 + n,
            completed_at=200.0 + n,
            **fields,
        )
        exchange = Exchange(
            model_call_id=call_id,
            request={"model": "m", "messages": list(messages), "temperature": loads("0.70")},
            reply={"id": f"r{n}", "choices": [{"message": {"role": "assistant", "content": said}}]},
            headers={"x-session-id": "s"},
            status=200,
        )
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": f"result {n}"}]
        yield StoredCall(record=record, tokens=stored.delta, exchange=exchange)


def fill(ledger: Ledger, key: AttemptKey, calls: int = 5, seed: int = 0) -> None:
    """Admit and commit a chain."""
    for call in chain(calls, seed):
        ledger.admit(key, call.record.model_call_id, call.record.parent_call_id)
        ledger.commit(key, call)


def same_tokens(one: TokenDelta, other: TokenDelta) -> bool:
    """Tell whether two deltas hold the same bytes."""
    pairs = [(one.ids_T, other.ids_T), (one.mask_T, other.mask_T), (one.logprobs_T, other.logprobs_T)]
    if one.extras.keys() != other.extras.keys():
        return False
    pairs += [(values, other.extras[name]) for name, values in one.extras.items()]
    return all(
        left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        for left, right in pairs
    )


def comparable(capture: Capture, result: Result | None) -> Any:
    """Turn an attempt into a value that `==` compares."""
    tokens = {
        call_id: [
            (array.dtype.str, array.shape, array.tobytes())
            for array in (delta.ids_T, delta.mask_T, delta.logprobs_T, *delta.extras.values())
        ]
        for call_id, delta in capture.tokens.items()
    }
    return msgspec.structs.replace(capture, tokens={}, exchanges=dict(capture.exchanges)), tokens, result


def refused(code: Code, work: object, *args: object, **kwargs: object) -> LedgerError:
    """Do what a ledger has to refuse, with this code."""
    assert callable(work)
    with pytest.raises(LedgerError) as caught:
        work(*args, **kwargs)
    assert caught.value.code == code, caught.value.message
    return caught.value
