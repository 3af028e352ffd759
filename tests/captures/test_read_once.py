"""A body that is read in one pass gives what two passes give, or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.captures import chat
from gristmill.gateway.dialects.passthrough import without_tokens
from tests.captures.engine import FOLDER


def _chat_bodies() -> dict[str, bytes]:
    recorded = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("chat_*.json"))}
    return {
        name: json.dumps(held["body"]).encode()
        for name, held in recorded.items()
        if held["status"] == 200 and isinstance(held.get("body"), dict) and "choices" in held["body"]
    }


BODIES = _chat_bodies()
USUAL = [name for name, body in BODIES.items() if chat.read_body_and_rest(body) is not None]


def agrees(body: bytes) -> bool:
    """Compare with two passes; False where one pass is not enough."""
    once = chat.read_body_and_rest(body)
    if once is None:
        return False
    reply, rest = once
    twice = chat.read_body(body)
    assert [list(choice.token_ids or ()) for choice in reply.choices] == [
        list(choice.token_ids or ()) for choice in twice.choices
    ]
    assert str(reply) == str(twice)
    assert json.loads(rest) == json.loads(without_tokens(body, logprobs=False))
    return True


def test_most_recorded_replies_are_read_once() -> None:
    """An engine's new field would send every reply the slow way, and nobody would see it."""
    trainable = [name for name, body in BODIES.items() if all(c.reason is None for c in chat.read_body(body).choices)]
    assert len(trainable) > 20
    assert set(USUAL) >= set(trainable) - {"chat_prompt_logprobs"}


@pytest.mark.parametrize("name", BODIES)
def test_recorded_replies(name: str) -> None:
    """The client must get, and the ledger keep, what they got before."""
    assert agrees(BODIES[name]) == (name in USUAL)


@pytest.mark.parametrize("where", ["root", "choice"])
def test_a_field_that_nobody_knows_is_not_lost(where: str) -> None:
    """The one-pass view must give up rather than leave a field out of what the client is served."""
    document = json.loads(BODIES[USUAL[0]])
    (document if where == "root" else document["choices"][0])["brand_new"] = {"kept": True}
    assert chat.read_body_and_rest(json.dumps(document).encode()) is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def _changed(data: st.DataObject, value: Any) -> Any:
    """Put another value at some place."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 4)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        copy = value.copy()
        copy[key] = _changed(data, value[key])
        return copy
    return data.draw(_VALUES)


@given(st.data())
def test_changed_replies(data: st.DataObject) -> None:
    """Whatever stands anywhere in a body, one pass says the same as two, or nothing."""
    agrees(json.dumps(_changed(data, json.loads(BODIES[data.draw(st.sampled_from(USUAL))]))).encode())
