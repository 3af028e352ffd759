"""Versioned digests of canonical atoms, and output items made of what was served."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code, SelectionError
from gristmill.fingerprint import atoms_fingerprint, encode_atom, fingerprint, output_items, utf8
from gristmill.records import Atom, ItemKind


def test_a_known_digest_never_changes() -> None:
    # Stored fingerprints of last year's captures must still be found: sha256 of `gristmill-fingerprint-1\\ntext 1\\n4`.
    assert fingerprint({"role": "assistant", "content": "4"}) == (
        "c84c9ef8e38f06149be0881d48e3dfae042d02fd669f0bd869ba6627ef3112ac"
    )


def test_lengths_separate_fields() -> None:
    # Fields that run into each other would make two different calls equal.
    first = Atom("tool_call", "x", "json", "function", "ab", "c")
    second = Atom("tool_call", "x", "json", "function", "a", "bc")
    assert encode_atom(first) != encode_atom(second)
    assert atoms_fingerprint((Atom("text", "a"), Atom("text", "b"))) != atoms_fingerprint((Atom("text", "ab"),))
    assert atoms_fingerprint((Atom("text", "1\na"),)) != atoms_fingerprint((Atom("refusal", "1\na"),))
    assert encode_atom(Atom("tool_result", "x", "text", call_id="t")) != encode_atom(Atom("tool_result", "x"))


def test_surrogates_are_escaped_reversibly() -> None:
    # Two different halves of an emoji must stay different, and no text may equal the escape.
    assert utf8("a\ud83d") != utf8("a\ud83e")
    assert utf8("a\ud83d").decode("utf-8", "surrogatepass") == "a\ud83d"
    assert utf8("é") == "é".encode()


@pytest.mark.parametrize("item", [{"role": "user", "content": "hi"}, {"type": "function_call_output"}])
def test_environment_items_have_no_fingerprint(item: Any) -> None:
    # A user turn that could be matched would be trained.
    with pytest.raises(SelectionError) as caught:
        fingerprint(item)
    assert caught.value.code is Code.ITEM_TYPE_UNSUPPORTED


def test_output_items_are_one_per_atom() -> None:
    # A message with text and a call is the same as a message item and a function_call item.
    chat = output_items(
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "t", "function": {"name": "f"}}], "id": "m"}]
    )
    items = output_items(
        [
            {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "a"}]},
            {"type": "function_call", "call_id": "t", "name": "f"},
        ]
    )
    assert [item.fingerprint for item in chat] == [item.fingerprint for item in items]
    assert [item.kind for item in chat] == [ItemKind.TEXT, ItemKind.TOOL_CALL]
    assert [item.id for item in chat] == ["m", "m"]


def test_every_kind_of_atom_has_a_kind_of_item() -> None:
    # A reply with any supported part can be stored.
    kinds = [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"type": "reasoning", "summary": [{"text": "hm"}]},
        {"type": "reasoning", "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "output_image", "image": "x"}]},
    ]
    assert [item.kind for item in output_items(kinds)] == [
        ItemKind.EMPTY,
        ItemKind.REFUSAL,
        ItemKind.REASONING,
        ItemKind.REASONING,
        ItemKind.OTHER,
    ]


@pytest.mark.parametrize(
    ("served", "item_id"),
    [
        ({"type": "web_search_call", "id": "ws"}, "ws"),
        ({"role": "user", "content": "hi", "id": 7}, None),
        ("text", None),
        ({"type": "compaction", "id": "k"}, "k"),
        ({"role": "assistant", "content": 5}, None),
        ({"role": "assistant", "content": float("nan")}, None),
    ],
)
def test_what_cannot_be_read_is_kept_and_never_matched(served: Any, item_id: str | None) -> None:
    # A reply of an unknown kind must stay in the ledger, and must not be trained for something else.
    [item] = output_items([served])
    assert (item.kind, item.atoms, item.id) == (ItemKind.UNSUPPORTED, None, item_id)
