from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gristmill.continuation import REASON_MEANINGS
from gristmill.records import (
    OLDEST_SCHEMA,
    CallRecord,
    Continuation,
    ContinuationReason,
    ContinuationState,
    schema_of,
)

ADDED: dict[str, Any] = {
    "requested_model": "asked",
    "upstream": "a",
    "upstream_id": "chatcmpl-1",
    "engine_epoch": 0,
    "weights_at_start": "7",
    "weights_at_end": "8",
    "changes": ("removed:cache_salt",),
    "retry_of": "c0",
    "request_digest": "0" * 64,
}
CONTINUED = Continuation(state=ContinuationState.CONTINUED, parent_call_id="c0", suffix_len=3)


# A reader that does not know a field must refuse the record, and must not refuse one that it understands.
@pytest.mark.parametrize("name", ADDED)
def test_a_record_states_what_a_reader_has_to_know(name: str) -> None:
    record = CallRecord(model_call_id="c", response_id="r")
    assert schema_of(record) == record.schema == OLDEST_SCHEMA
    assert schema_of(msgspec.structs.replace(record, **{name: ADDED[name]})) == 2
    assert schema_of(msgspec.structs.replace(record, continuation=CONTINUED, **{name: ADDED[name]})) == 4
    assert schema_of(msgspec.structs.replace(record, schema=9)) == 9


# The digest of an attempt that was frozen before must not change with the version that reads it.
def test_what_is_not_new_is_written_as_before() -> None:
    assert msgspec.json.encode(CallRecord(model_call_id="c", response_id="r")) == (
        b'{"model_call_id":"c","response_id":"r"}'
    )


# The reference page says of every reason what it means.
def test_every_reason_not_to_continue_has_a_meaning() -> None:
    assert list(REASON_MEANINGS) == list(ContinuationReason)
    assert all(meaning.endswith(".") and len(meaning) > 15 for meaning in REASON_MEANINGS.values())
