"""From a message or item of any dialect to its canonical atoms.

Invariant: equal meaning, equal atoms, whether the item came as Chat message, Responses item or Anthropic message. The
item's type decides before its role; a type that is on no list is refused, never ignored. What only transports
(ids, status, `cache_control`, signatures, token arrays) is left out on the item and its parts, and never inside
arguments, inputs or media.

Not here: digests (fingerprint), what is matched with what (selection), what a request continues (lineage).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import msgspec

from gristmill.canonical import MAX_ITEM_CHARS, JsonValue, canonical_text
from gristmill.errors import Code, SelectionError
from gristmill.item_fields import item_id_of, list_of, malformed, object_of, text_of, unsupported, word_of
from gristmill.records import Atom
from gristmill.tool_calls import chat_tool_call, exact_atom, function_atom, tool_name

__all__ = ["EMPTY", "Item", "environment_atoms", "read_item", "strip_transport"]

EMPTY: Final = Atom("empty")
_EMPTY_ATOMS: Final = (EMPTY,)

_CONTEXT_MARKERS: Final = frozenset(
    {"compaction", "compaction_summary", "compaction_trigger", "context_compaction", "context_management"}
)
_ENVIRONMENT_ROLES: Final = frozenset({"user", "system", "developer", "tool", "function"})
_MEDIA_PARTS: Final = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "output_image",
        "audio",
        "input_audio",
        "output_audio",
        "file",
        "input_file",
        "document",
        "video",
        "video_url",
        "input_video",
    }
)
_TEXT_PARTS: Final = frozenset({"text", "output_text", "input_text"})
_TRANSPORT: Final = frozenset(
    {
        "id",
        "status",
        "index",
        "cache_control",
        "annotations",
        "logprobs",
        "token_ids",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
    }
)


class Item(msgspec.Struct, frozen=True, gc=False):
    """One returned or served item, read.

    Attributes:
        authored: the model made it; False for what the environment (user, tools, harness markers) put there.
        atoms: what it says; of authored items never empty (`(EMPTY,)` if nothing is visible).
        id: its item id, if it has one.
        type: its type, or `message`.
        tool_result: an environment item that is nothing but results of tool calls.
        tool_call_id: of an authored item that is one tool call: the id its result refers to.
    """

    authored: bool
    atoms: tuple[Atom, ...]
    id: str | None
    type: str
    tool_result: bool = False
    tool_call_id: str | None = None


_FUNCTION_RESULT: Final = Item(False, (), None, "function_call_output", True)


def read_item(value: JsonValue, where: str = "$") -> Item:
    """Read one item of a history or a reply.

    Args:
        value: a decoded Chat or Anthropic message, or a Responses item.
        where: JSON path of the item, for errors.

    Raises:
        SelectionError: `output_malformed`, `item_type_unsupported`, `item_too_deep`, `item_too_large`.
    """
    plain = value.__class__
    item: dict[str, JsonValue] = value if plain is dict else object_of(value, where)
    kind = item.get("type")
    if kind is None or kind == "message":
        role = item.get("role")
        if role == "assistant":
            return _assistant_message(item, where)
        if not isinstance(role, str):
            raise malformed(where + ".role", "a string", role)
        if role in _ENVIRONMENT_ROLES:
            return Item(False, (), item_id_of(item, where), "message", _is_tool_result(item, role))
        raise unsupported(item, f"message of role {role!r}", where)
    if not isinstance(kind, str):
        raise malformed(where + ".type", "a string", kind)
    reader = _AUTHORED_TYPES.get(kind)
    if reader is not None:
        return reader(item, where)
    if kind.endswith("_output"):
        if kind == "function_call_output" and item.get("id") is None:
            return _FUNCTION_RESULT
        return Item(False, (), item_id_of(item, where), kind, True)
    if kind in _CONTEXT_MARKERS:
        return Item(False, (), item_id_of(item, where), kind)
    raise unsupported(item, f"item type {kind!r}", where)


# Assistant messages


def _assistant_message(value: dict[str, JsonValue], where: str) -> Item:
    item_id = value.get("id")
    if item_id is not None and type(item_id) is not str:
        raise malformed(where + ".id", "a string or null", item_id)
    content = value.get("content")
    # A text and nothing else that the model can see is by far the most frequent message.
    if value.keys() <= _PLAIN_MESSAGE_KEYS:
        text = _only_text(content, where)
        if text is not None:
            return Item(True, (Atom("text", text),) if text else _EMPTY_ATOMS, item_id or None, "message")
    parts = _MessageParts()
    parts.read_reasoning_fields(value, where)
    parts.read_content(content, where + ".content")
    parts.read_refusal(text_of(value.get("refusal"), where + ".refusal"))
    audio = value.get("audio")
    if audio is not None:
        parts.visible.append(_other({"type": "audio", "audio": audio}, where + ".audio"))
    for index, call in enumerate(list_of(value.get("tool_calls"), where + ".tool_calls")):
        parts.calls.append(chat_tool_call(call, f"{where}.tool_calls[{index}]"))
    if value.get("function_call") is not None:
        legacy = object_of(value["function_call"], where + ".function_call")
        parts.calls.append(function_atom(legacy, "", where + ".function_call", legacy.get("arguments")))
    atoms = parts.atoms()
    only_call = atoms[0].call_id if len(atoms) == 1 and atoms[0].kind == "tool_call" else None
    return Item(True, atoms, item_id or None, "message", tool_call_id=only_call)


def _only_text(content: JsonValue, where: str) -> str | None:
    """Return the text of content that is a string or one text part, None for any other."""
    kind = content.__class__
    if kind is str:
        return content if len(content) <= MAX_ITEM_CHARS else text_of(content, where + ".content")
    if kind is list and len(content) == 1:
        part = content[0]
        kind = part.__class__
        if kind is dict and word_of(part.get("type")) in _TEXT_PARTS:
            return text_of(part.get("text"), where + ".content[0].text")
    return None


def _joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Make one text of texts that follow each other."""
    if len(atoms) < 2:
        return tuple(atoms)
    joined: list[Atom] = []
    texts: list[str] = []
    for atom in atoms:
        if atom.kind == "text":
            texts.append(atom.text)
            continue
        if texts:
            joined.append(Atom("text", "".join(texts)))
            texts = []
        joined.append(atom)
    if texts:
        joined.append(Atom("text", "".join(texts)))
    return tuple(joined)


_PLAIN_MESSAGE_KEYS: Final = frozenset({"type", "role", "content", "id", "status"})


class _MessageParts:
    """Collects the parts of one message, to be put into the canonical order."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.payloads: list[Atom] = []
        self.visible: list[Atom] = []
        self.calls: list[Atom] = []

    def read_reasoning_fields(self, value: dict[str, JsonValue], where: str) -> None:
        first = text_of(value.get("reasoning_content"), where + ".reasoning_content")
        second = text_of(value.get("reasoning"), where + ".reasoning")
        if first and second and first != second:
            raise SelectionError(
                Code.OUTPUT_MALFORMED,
                "expected `reasoning` and `reasoning_content` to be equal where both are given, got two texts",
                where=where,
            )
        if first or second:
            self.reasoning.append(first or second)

    def read_content(self, content: JsonValue, where: str) -> None:
        if content is None:
            return
        if isinstance(content, str):
            self.read_text(text_of(content, where))
            return
        if not isinstance(content, list | tuple):
            raise malformed(where, "a string, an array of parts or null", content)
        for index, raw in enumerate(cast(Sequence[JsonValue], content)):
            place = f"{where}[{index}]"
            self.read_part(object_of(raw, place), place)

    def read_text(self, text: str) -> None:
        if text:
            self.visible.append(Atom("text", text))

    def read_refusal(self, text: str) -> None:
        if text:
            self.visible.append(Atom("refusal", text))

    def read_part(self, part: dict[str, JsonValue], where: str) -> None:
        kind = word_of(part.get("type"))
        if kind in _TEXT_PARTS:
            self.read_text(text_of(part.get("text"), where + ".text"))
        elif kind == "refusal":
            self.read_refusal(text_of(part.get("refusal"), where + ".refusal"))
        elif kind == "thinking":
            self.reasoning.append(text_of(part.get("thinking"), where + ".thinking"))
        elif kind == "redacted_thinking":
            data = text_of(part.get("data"), where + ".data")
            if data:
                self.payloads.append(Atom("reasoning_payload", data))
        elif kind == "tool_use":
            self.calls.append(function_atom(part, part.get("id"), where, part.get("input")))
        elif kind in _MEDIA_PARTS:
            self.visible.append(_other(part, where))
        elif kind:
            raise unsupported(part, f"content part {kind!r} of an assistant message", where)
        else:
            raise malformed(where + ".type", "a string", part.get("type"))

    def atoms(self) -> tuple[Atom, ...]:
        text = "".join(self.reasoning)
        reasoning = (Atom("reasoning", text),) if text else ()
        return (*reasoning, *self.payloads, *_joined(self.visible), *self.calls) or _EMPTY_ATOMS


def strip_transport(part: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Leave out the keys of a part that only transport, and its null-valued keys; deeper ones stay."""
    return {key: value for key, value in part.items() if value is not None and key not in _TRANSPORT}


def _other(part: Mapping[str, JsonValue], where: str) -> Atom:
    return Atom("other", canonical_text(strip_transport(part), where))


def _function_call(value: dict[str, JsonValue], where: str) -> Item:
    call_id = value.get("call_id")
    atom = function_atom(value, call_id, where, value.get("arguments"))
    return Item(True, (atom,), item_id_of(value, where), "function_call", tool_call_id=atom.call_id)


def _custom_tool_call(value: dict[str, JsonValue], where: str) -> Item:
    atom = exact_atom("custom", tool_name(value, where), value.get("call_id"), value.get("input"), where)
    return Item(True, (atom,), item_id_of(value, where), "custom_tool_call", tool_call_id=atom.call_id)


def _action_call(kind: str, tool: str, *fields: str) -> Callable[[dict[str, JsonValue], str], Item]:
    """Make the reader of a call type whose input stands in the first of `fields` that is given."""

    def read(value: dict[str, JsonValue], where: str) -> Item:
        given = next((value[name] for name in fields if value.get(name) is not None), None)
        atom = exact_atom(tool, tool, value.get("call_id"), given, where)
        return Item(True, (atom,), item_id_of(value, where), kind, tool_call_id=atom.call_id)

    return read


def _reasoning(value: dict[str, JsonValue], where: str) -> Item:
    text = "".join(
        _reasoning_text(part, f"{where}.content[{index}]")
        for index, part in enumerate(list_of(value.get("content"), where + ".content"))
    )
    if not text:
        text = "".join(
            _reasoning_text(part, f"{where}.summary[{index}]")
            for index, part in enumerate(list_of(value.get("summary"), where + ".summary"))
        )
    payload = text_of(value.get("encrypted_content"), where + ".encrypted_content")
    atoms = _EMPTY_ATOMS
    if text:
        atoms = (Atom("reasoning", text),)
    elif payload:
        atoms = (Atom("reasoning_payload", payload),)
    return Item(True, atoms, item_id_of(value, where), "reasoning")


def _reasoning_text(raw: JsonValue, where: str) -> str:
    return text_of(object_of(raw, where).get("text"), where + ".text")


_AUTHORED_TYPES: Final[Mapping[str, Callable[[dict[str, JsonValue], str], Item]]] = {
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_tool_call,
    "local_shell_call": _action_call("local_shell_call", "local_shell", "action"),
    "shell_call": _action_call("shell_call", "shell", "action"),
    "apply_patch_call": _action_call("apply_patch_call", "apply_patch", "operation", "input"),
    "computer_call": _action_call("computer_call", "computer", "actions", "action"),
}


# Environment items


def _is_tool_result(value: Mapping[str, JsonValue], role: str) -> bool:
    """Tell whether a message holds results of tool calls and nothing else."""
    if role in {"tool", "function"}:
        return True
    content = value.get("content")
    if not isinstance(content, list) or not content:
        return False
    parts = cast(list[JsonValue], content)
    return all(
        isinstance(part, dict) and cast(dict[str, JsonValue], part).get("type") == "tool_result" for part in parts
    )


def environment_atoms(value: JsonValue, where: str = "$") -> tuple[Atom, ...]:
    """Give the atoms of an environment item, for lineage: text joined, tool results, anything else as JSON.

    A Chat `tool` message, a Responses `*_output` item and an Anthropic `tool_result` block of one result are equal.

    Raises:
        SelectionError: `output_malformed`, `item_too_deep`, `item_too_large`.
    """
    item = object_of(value, where)
    kind = item.get("type")
    if isinstance(kind, str) and kind.endswith("_output"):
        return (_result_atom(item.get("call_id"), item.get("output"), where),)
    if word_of(item.get("role")) in {"tool", "function"}:
        return (_result_atom(item.get("tool_call_id"), item.get("content"), where),)
    if kind is not None and kind != "message":
        return (_other(item, where),)
    return _content_atoms(item.get("content"), where + ".content")


def _result_atom(call_id: JsonValue, content: JsonValue, where: str) -> Atom:
    atoms = _content_atoms(content, where)
    if not atoms or (len(atoms) == 1 and atoms[0].kind == "text"):
        text = atoms[0].text if atoms else ""
        return Atom("tool_result", text, "text", call_id=text_of(call_id, where))
    pieces = [[atom.kind, atom.text] for atom in atoms]
    return Atom("tool_result", canonical_text(pieces, where), "json", call_id=text_of(call_id, where))


def _content_atoms(content: JsonValue, where: str) -> tuple[Atom, ...]:
    if content is None or isinstance(content, str):
        return (Atom("text", content),) if content else ()
    if not isinstance(content, list | tuple):
        return (Atom("other", canonical_text(content, where)),)
    atoms: list[Atom] = []
    for index, raw in enumerate(cast(Sequence[JsonValue], content)):
        place = f"{where}[{index}]"
        part = {"type": "text", "text": raw} if isinstance(raw, str) else object_of(raw, place)
        kind = word_of(part.get("type"))
        if kind in _TEXT_PARTS:
            text = text_of(part.get("text"), place + ".text")
            if text:
                atoms.append(Atom("text", text))
        elif kind == "tool_result":
            atoms.append(_result_atom(part.get("tool_use_id"), part.get("content"), place))
        else:
            atoms.append(_other(part, place))
    return _joined(atoms)
