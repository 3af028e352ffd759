from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from gristmill.errors import Code
from gristmill.export import check_capture
from gristmill.records import Capture
from tests.cli.stories import Json, call, said
from tests.export.attempts import captured

USER = {"role": "user", "content": "go"}
TOOLS = [{"type": "function", "function": {"name": "t"}}]


def turns(*texts: str) -> list[Json]:
    """A conversation: user, reply, user, …"""
    return [message for text in texts for message in (USER, said(text))] + [USER]


def requested(call_id: str, text: str, history: tuple[str, ...], parent: str | None, **fields: Any) -> Json:
    request = {"model": "m", "messages": turns(*history)}
    line = call(call_id, text, [1], [2], request=request, parent_call_id=parent)
    return {**line, **fields}


def chain(**parents: str | None) -> list[Json]:
    """Three turns, a retry of the second, and a sub-agent; parents may be replaced."""
    lines = [
        requested("a", "one", (), None),
        requested("x", "other", ("one",), "a"),
        requested("b", "two", ("one",), "a"),
        requested("c", "three", ("one", "two"), "b"),
        requested("s", "aside", (), None),
    ]
    for line in lines:
        if line["model_call_id"] in parents:
            line["parent_call_id"] = parents[line["model_call_id"]]
    return lines


def found(capture: Capture) -> list[tuple[Code, str]]:
    return [(finding.code, finding.where) for finding in check_capture(capture)]


def test_a_good_capture_has_no_findings() -> None:
    """A check that finds faults in good captures is a check that nobody runs."""
    assert found(captured(chain())) == []


@pytest.mark.parametrize(
    ("call_id", "parent"),
    [("c", "a"), ("c", "x"), ("b", "x"), ("b", None), ("s", "c"), ("a", "s"), ("c", "nobody")],
)
def test_a_changed_parent_is_found(call_id: str, parent: str | None) -> None:
    """A wrong parent makes wrong certificates, and can decide between equal calls."""
    assert (Code.ROW_LINEAGE_DIFFERS, f"call={call_id}") in found(captured(chain(**{call_id: parent})))


def test_captures_without_parents_contradict_nothing() -> None:
    """Many systems record no lineage at all."""
    assert found(captured(chain(x=None, b=None, c=None))) == []


def test_equal_replies_leave_the_parent_open() -> None:
    """Where two calls could be the parent, either may be recorded, and no third."""
    lines = [
        requested("a", "same", (), None),
        requested("b", "same", (), None),
        requested("z", "else", (), None),
        requested("c", "end", ("same",), "b"),
    ]
    assert found(captured(lines)) == []
    lines[-1]["parent_call_id"] = "z"
    assert found(captured(lines)) == [(Code.ROW_LINEAGE_DIFFERS, "call=c")]


def test_a_lost_parent_is_no_finding() -> None:
    """A call that was admitted and lost can be continued; selection judges that."""
    lines = [*chain(c="gone"), {"kind": "lost", "model_call_id": "gone"}]
    assert found(captured(lines)) == []


def test_edited_history_is_drift_and_no_finding() -> None:
    """A harness may change an earlier text; that forks a row and contradicts no parent."""
    lines = [*chain(), requested("d", "four", ("one", "two", "three, edited"), "c")]
    assert found(captured(lines)) == []


@pytest.mark.parametrize("name", ["context_digest", "system_digest", "tools_digest"])
def test_digests_that_are_not_the_requests(name: str) -> None:
    """A forged lineage key would fake a conversation."""
    capture = captured(chain())
    records = tuple(
        msgspec.structs.replace(record, **{name: "0" * 64}) if record.model_call_id == "b" else record
        for record in capture.records
    )
    codes = found(msgspec.structs.replace(capture, records=records))
    assert (Code.ROW_LINEAGE_DIFFERS, "call=b") in codes


def test_requests_that_cannot_be_read_say_nothing() -> None:
    """Unreadable evidence is no evidence."""
    capture = captured(chain())
    broken = {
        call_id: msgspec.structs.replace(exchange, request={"messages": 7} if call_id == "b" else None)
        for call_id, exchange in capture.exchanges.items()
    }
    assert found(msgspec.structs.replace(capture, exchanges=broken)) == []


def test_changed_tokens_are_found() -> None:
    """Ids, masks, log-probabilities and bases of the capture are proved by their digests."""
    capture = captured(chain())
    delta = capture.tokens["b"]
    for code, tokens in (
        (Code.ROW_TOKENS_DIFFER, msgspec.structs.replace(delta, ids_T=delta.ids_T + 1)),
        (Code.ROW_MASK_DIFFERS, msgspec.structs.replace(delta, mask_T=np.ones_like(delta.mask_T))),
        (Code.ROW_LOGPROBS_DIFFER, msgspec.structs.replace(delta, logprobs_T=delta.logprobs_T * np.float32(2))),
    ):
        changed = msgspec.structs.replace(capture, tokens={**capture.tokens, "b": tokens})
        assert (code, "call=b") in found(changed)
    gone = {call_id: held for call_id, held in capture.tokens.items() if call_id != "b"}
    assert (Code.ROW_TOKENS_DIFFER, "call=b") in found(msgspec.structs.replace(capture, tokens=gone))
