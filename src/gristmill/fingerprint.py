"""Versioned digests of canonical atoms.

A fingerprint is the SHA-256 of the version and the length-delimited fields of one item's atoms: no two different
tuples of atoms have the same encoding. Lone surrogates pass through a reversible escape, so hashing never fails.

Not here: how an item becomes atoms (atoms), how calls are chained (lineage).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import cast

from gristmill.atoms import Item, read_item
from gristmill.canonical import JsonValue, canonical_text
from gristmill.errors import Code, SelectionError
from gristmill.records import Atom, ItemKind, OutputItem

__all__ = [
    "FINGERPRINT_VERSION",
    "atoms_fingerprint",
    "encode_atom",
    "fingerprint",
    "output_items",
    "output_items_of",
    "utf8",
]

FINGERPRINT_VERSION = 1
_PREFIX = f"gristmill-fingerprint-{FINGERPRINT_VERSION}\n"

_KINDS = {
    "text": ItemKind.TEXT,
    "reasoning": ItemKind.REASONING,
    "reasoning_payload": ItemKind.REASONING,
    "refusal": ItemKind.REFUSAL,
    "tool_call": ItemKind.TOOL_CALL,
    "other": ItemKind.OTHER,
    "empty": ItemKind.EMPTY,
}


def encode_atom(atom: Atom) -> str:
    """Write one atom so that different atoms never have equal text: lengths (in characters) go before content."""
    text = atom.text
    if atom.kind != "tool_call" and not atom.call_id:
        return f"{atom.kind} {len(text)}\n{text}"
    name, call_id = atom.name, atom.call_id
    lengths = f"{len(name)} {len(call_id)} {len(text)}"
    return f"{atom.kind} {atom.form} {atom.tool} {lengths}\n{name}{call_id}{text}"


def atoms_fingerprint(atoms: Sequence[Atom]) -> str:
    """Digest the atoms of one item: 64 hexadecimal digits."""
    if len(atoms) == 1:
        encoded = _PREFIX + encode_atom(atoms[0])
    else:
        encoded = _PREFIX + "".join(map(encode_atom, atoms))
    return sha256(utf8(encoded)).hexdigest()


def utf8(text: str) -> bytes:
    """Encode text reversibly: a lone surrogate becomes bytes that no valid text has, so nothing collides."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def fingerprint(item: JsonValue, where: str = "$") -> str:
    """Digest one authored item of any dialect: 64 hexadecimal digits.

    Raises:
        SelectionError: `output_malformed`, `item_type_unsupported` (also for an environment item: no model made
            it), `item_too_deep`, `item_too_large`.
    """
    read = read_item(item, where)
    if not read.authored:
        raise SelectionError(
            Code.ITEM_TYPE_UNSUPPORTED, f"expected an item that a model made, got {read.type!r}", where=where
        )
    return atoms_fingerprint(read.atoms)


def output_items_of(item: Item) -> Iterable[OutputItem]:
    """Split one authored item into one output item per atom, each with the item's id."""
    for atom in item.atoms:
        yield OutputItem(_KINDS[atom.kind], atoms_fingerprint((atom,)), item.id, (atom,), item.type)


def output_items(served: Sequence[JsonValue]) -> tuple[OutputItem, ...]:
    """Turn what a client was served into output items, in order.

    An item that cannot be read, or that no model made, becomes one of kind `unsupported` without atoms: the call is
    kept, and never matched.
    """
    made: list[OutputItem] = []
    for value in served:
        try:
            item = read_item(value)
        except SelectionError as error:
            made.append(_unsupported(value, str(error.code)))
            continue
        if item.authored:
            made.extend(output_items_of(item))
        else:
            made.append(_unsupported(value, item.type))
    return tuple(made)


def _unsupported(value: JsonValue, reason: str) -> OutputItem:
    try:
        text = canonical_text(value)
    except SelectionError as error:
        text = str(error.code)
    item_id = cast(dict[str, JsonValue], value).get("id") if isinstance(value, dict) else None
    digest = sha256(utf8(f"{_PREFIX}unsupported\n{text}")).hexdigest()
    kept_id = item_id if isinstance(item_id, str) else None
    return OutputItem(ItemKind.UNSUPPORTED, digest, kept_id, None, reason)
