"""Which earlier call a request continues, and the forest that the recorded parents make.

Invariant: a parent is the call whose *request + reply* is exactly the beginning of the new request's conversation, by
chained digests over canonical atoms; a changed earlier text has no parent, and equal candidates are ambiguous. System
and developer text only mark their position in the chain; tools stand apart; of what a model said, white space alone is
nothing beside anything else.

Not here: token prefixes (tokens, reconstruction) and membership (selection): a parent is evidence, nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from gristmill.atoms import Item, environment_atoms, read_item, strip_transport
from gristmill.canonical import JsonValue, canonical_text
from gristmill.errors import Code, SelectionError
from gristmill.fingerprint import FINGERPRINT_VERSION, encode_atom, utf8
from gristmill.records import Atom, Delivery, ParentResolution

__all__ = [
    "BILLING_TEXT",
    "MISSING_PARENT",
    "NO_PARENT",
    "NO_TOOLS",
    "Forest",
    "LineageIndex",
    "ParentLink",
    "RequestDigests",
    "Turn",
    "conversation",
    "request_digests",
]

NO_PARENT: Final = -1
MISSING_PARENT: Final = -2

_CHAIN_START: Final = f"gristmill-chain-2-{FINGERPRINT_VERSION}\n".encode()
BILLING_TEXT: Final = "x-anthropic-billing-header"
"""Begins a system block that says what a request is billed as; it changes by the call and never reaches a model."""
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_REASONING: Final = frozenset({"reasoning", "reasoning_payload"})
_UNDELIVERED: Final = frozenset({Delivery.ABORTED, Delivery.PARTIAL})


class RequestDigests(msgspec.Struct, frozen=True):
    """Lineage keys of one call: 64 hexadecimal digits each, None where the request is not known.

    `context` is the request's conversation, `continuation` the same with the reply; `bare` leaves reasoning out.
    """

    context_digest: str | None = None
    continuation_digest: str | None = None
    continuation_digest_bare: str | None = None
    system_digest: str | None = None
    tools_digest: str | None = None


class ParentLink(msgspec.Struct, frozen=True):
    """The parent of a request, how sure it is, and what changed beside the conversation.

    System text has changed where what stands before the parent's reply has; what is new may have some of its own.
    """

    parent_call_id: str | None
    resolution: ParentResolution
    candidates: tuple[str, ...] = ()
    system_changed: bool = False
    tools_changed: bool = False


class _Chain:
    """Two running digests over a conversation: with and without reasoning."""

    def __init__(self) -> None:
        self._full = sha256(_CHAIN_START)
        self._bare = sha256(_CHAIN_START)

    def add(self, atom: Atom) -> None:
        encoded = utf8(encode_atom(atom))
        self._full.update(encoded)
        if atom.kind not in _REASONING:
            self._bare.update(encoded)

    def mark(self, role: str) -> None:
        encoded = f"role {role}\n".encode()
        self._full.update(encoded)
        self._bare.update(encoded)

    @property
    def full(self) -> str:
        return self._full.hexdigest()

    @property
    def bare(self) -> str:
        return self._bare.hexdigest()


class Turn(msgspec.Struct):
    """One message or item of a request's conversation; the role of tool results and of what a model said is empty."""

    authored: bool
    role: str
    atoms: tuple[Atom, ...]


def conversation(request: Mapping[str, JsonValue]) -> Iterator[Turn]:
    """Read the conversation of a request in any dialect, system text reduced to its position.

    Raises:
        SelectionError: `output_malformed`, `item_too_deep`, `item_too_large`.
    """
    if "messages" in request:
        messages, where = request["messages"], "$.messages"
    elif "input" in request:
        messages, where = request["input"], "$.input"
    else:
        messages, where = request.get("prompt"), "$.prompt"
    if isinstance(messages, str):
        yield Turn(False, "user", (Atom("text", messages),) if messages else ())
        return
    if not isinstance(messages, list):
        if messages is None:
            return
        raise SelectionError(Code.OUTPUT_MALFORMED, "expected an array of messages or a string", where=where)
    if where == "$.prompt":
        yield Turn(False, "user", (Atom("other", canonical_text(messages, where)),))
        return
    for index, value in enumerate(cast(list[JsonValue], messages)):
        yield _turn(value, f"{where}[{index}]")


def _is_system(role: JsonValue) -> bool:
    return isinstance(role, str) and role in _SYSTEM_ROLES


def _turn(value: JsonValue, where: str) -> Turn:
    role = cast(dict[str, JsonValue], value).get("role") if isinstance(value, dict) else None
    if _is_system(role):
        return Turn(False, "system", ())
    try:
        item: Item | None = read_item(value, where)
    except SelectionError as error:
        if error.code is not Code.ITEM_TYPE_UNSUPPORTED:
            raise
        # A type that no call can be matched with still changes what the model saw.
        atom = Atom("other", canonical_text(strip_transport(cast(Mapping[str, JsonValue], value)), where))
        return Turn(True, "", (atom,))
    if item.authored:
        return Turn(True, "", item.atoms)
    return Turn(False, "" if item.tool_result else str(role or item.type), environment_atoms(value, where))


def _extend(chain: _Chain, turn: Turn) -> None:
    if turn.role:
        chain.mark(turn.role)
    for atom in turn.atoms:
        chain.add(atom)


def _runs(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Put what a model said in one go into one turn, and leave out of it what says nothing.

    Harnesses drop text that is white space alone, which chat templates leave between reasoning and a tool call, and
    some add an empty message of their own. Where a model said nothing else, that is what it said.
    """
    said: list[Atom] = []
    spoke = False
    for turn in turns:
        if turn.authored:
            spoke = True
            said += turn.atoms
            continue
        if spoke:
            yield Turn(True, "", _substance(said))
            said, spoke = [], False
        yield turn
    if spoke:
        yield Turn(True, "", _substance(said))


def _substance(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    kept = tuple(atom for atom in atoms if atom.kind != "empty" and (atom.kind != "text" or atom.text.strip()))
    return kept or tuple(atoms)


def _system_digest(request: Mapping[str, JsonValue]) -> str:
    """Digest what the system and developer texts say, wherever the dialect puts them."""
    parts: list[JsonValue] = [_system_text(request.get("system")), request.get("instructions")]
    for key in ("messages", "input"):
        messages = request.get(key)
        for message in cast(list[JsonValue], messages) if isinstance(messages, list) else ():
            if isinstance(message, dict) and _is_system(cast(dict[str, JsonValue], message).get("role")):
                said = strip_transport(cast(Mapping[str, JsonValue], message))
                parts.append({**said, "content": _system_text(said.get("content"))})
    return sha256(utf8(canonical_text(parts))).hexdigest()


def _system_text(blocks: JsonValue) -> JsonValue:
    """Leave out what a client says to whoever bills or caches a request: the model is not told."""
    if not isinstance(blocks, list):
        return blocks
    kept: list[JsonValue] = []
    for value in cast(list[JsonValue], blocks):
        block = strip_transport(cast(Mapping[str, JsonValue], value)) if isinstance(value, dict) else value
        text = cast(dict[str, JsonValue], block).get("text") if isinstance(block, dict) else None
        if not (isinstance(text, str) and text.startswith(BILLING_TEXT)):
            kept.append(block)
    return kept


def _tools_digest(request: Mapping[str, JsonValue]) -> str:
    given = request.get("tools")
    tools: JsonValue = None
    if isinstance(given, list) and given:
        tools = [
            strip_transport(cast(Mapping[str, JsonValue], tool)) if isinstance(tool, dict) else tool
            for tool in cast(list[JsonValue], given)
        ]
    return sha256(utf8(canonical_text(tools, "$.tools"))).hexdigest()


NO_TOOLS: Final = _tools_digest({})
"""Tools digest of a request without tools."""


def request_digests(request: JsonValue, served: Sequence[JsonValue]) -> RequestDigests:
    """Compute the lineage keys of a call from its request body and the items that were served.

    Returns all None where the request is not an object, or holds what cannot be read; a reply with nothing in it has
    no continuation, since nothing can continue it.
    """
    if not isinstance(request, Mapping):
        return RequestDigests()
    body = cast(Mapping[str, JsonValue], request)
    chain = _Chain()
    try:
        for turn in _runs(conversation(body)):
            _extend(chain, turn)
        context = chain.full
        system, tools = _system_digest(body), _tools_digest(body)
        reply = [_turn(value, f"reply[{index}]") for index, value in enumerate(served)]
    except SelectionError:
        # Not hidden: a call without lineage keys is never anyone's parent, and says so by having none.
        return RequestDigests()
    for turn in _runs(reply):
        _extend(chain, turn)
    if not reply:
        return RequestDigests(context_digest=context, system_digest=system, tools_digest=tools)
    return RequestDigests(context, chain.full, chain.bare, system, tools)


class LineageIndex:
    """Finds the parent of a request among the calls added so far; one pass over the request, one dictionary."""

    def __init__(self) -> None:
        self._full: dict[str, list[str]] = {}
        self._bare: dict[str, list[str]] = {}
        self._digests: dict[str, RequestDigests] = {}
        self._undelivered: set[str] = set()

    def add(self, call_id: str, digests: RequestDigests, delivery: Delivery = Delivery.UNKNOWN) -> None:
        """Make a captured call a possible parent."""
        self._digests[call_id] = digests
        if delivery in _UNDELIVERED:
            self._undelivered.add(call_id)
        if digests.continuation_digest is not None and digests.continuation_digest_bare is not None:
            self._full.setdefault(digests.continuation_digest, []).append(call_id)
            self._bare.setdefault(digests.continuation_digest_bare, []).append(call_id)

    def deliver(self, call_id: str, delivery: Delivery) -> None:
        """Note what became of a call's reply; the last statement counts."""
        if delivery in _UNDELIVERED:
            self._undelivered.add(call_id)
        else:
            self._undelivered.discard(call_id)

    def parent_of(self, request: JsonValue) -> ParentLink:
        """Name the call that a request continues.

        Raises:
            SelectionError: `output_malformed`, `item_too_deep`, `item_too_large` for a request that cannot be read.
        """
        if not isinstance(request, Mapping):
            raise SelectionError(Code.OUTPUT_MALFORMED, "expected a request object", where="$.request")
        body = cast(Mapping[str, JsonValue], request)
        chain = _Chain()
        found: list[str] = []
        behind = False
        turns = list(conversation(body))
        for turn in _runs(turns):
            if not turn.authored:
                _extend(chain, turn)
                continue
            for atom in turn.atoms:
                chain.add(atom)
                matched = self._full.get(chain.full)
                # A reasoning atom leaves the second chain where it was, so a hit there would be the turn before.
                if matched is None and atom.kind not in _REASONING:
                    matched = self._bare.get(chain.bare)
                if matched:
                    found, behind = matched, False
                else:
                    behind = True
        if not found:
            return ParentLink(None, ParentResolution.ROOT)
        if behind:
            return ParentLink(None, ParentResolution.UNRESOLVED, tuple(found))
        return self._link(found, body, max(at for at, turn in enumerate(turns) if turn.authored))

    def _link(self, found: list[str], body: Mapping[str, JsonValue], reply: int) -> ParentLink:
        received = [call_id for call_id in found if call_id not in self._undelivered] or found
        if len(received) > 1:
            return ParentLink(None, ParentResolution.AMBIGUOUS, tuple(received))
        digests = self._digests[received[0]]
        return ParentLink(
            received[0],
            ParentResolution.RESOLVED,
            (),
            digests.system_digest != _system_digest(_up_to(body, reply)),
            digests.tools_digest != _tools_digest(body),
        )


def _up_to(body: Mapping[str, JsonValue], last: int) -> Mapping[str, JsonValue]:
    """Leave out of a request, in which a model has spoken, the messages after one."""
    name = "messages" if "messages" in body else "input"
    return {**body, name: cast(list[JsonValue], body[name])[: last + 1]}


class Forest:
    """Parents of the calls of one attempt, by position in commit order.

    `parents_C` holds, per call, the position of its parent, `NO_PARENT` for a root, or `MISSING_PARENT` where the
    recorded parent was not captured.
    """

    def __init__(self, records: Sequence[Any]) -> None:
        self.ids: list[str] = [record.model_call_id for record in records]
        self.positions: dict[str, int] = {call_id: index for index, call_id in enumerate(self.ids)}
        position_of = self.positions.get
        self.parents_C: list[int] = [
            NO_PARENT if (parent := record.parent_call_id) is None else position_of(parent, MISSING_PARENT)
            for record in records
        ]

    def path_to_root(self, position: int) -> tuple[list[int], int]:
        """Return the ancestors of a call, nearest first, and why the walk ended.

        The second value is `NO_PARENT` at a root, `MISSING_PARENT` where a parent was not captured, and the position
        that came round again where the links form a cycle.
        """
        path: list[int] = []
        seen = {position}
        parent = self.parents_C[position]
        while parent >= 0:
            if parent in seen:
                return path, parent
            seen.add(parent)
            path.append(parent)
            parent = self.parents_C[parent]
        return path, parent

    def children(self) -> dict[int, list[int]]:
        """Return the calls that continue each call, in commit order; roots stand under `NO_PARENT`."""
        children: dict[int, list[int]] = {}
        for position, parent in enumerate(self.parents_C):
            children.setdefault(parent, []).append(position)
        return children

    def with_ancestors(self, positions: Iterable[int]) -> set[int]:
        """Return the given calls and everything they continue; missing parents and cycles just end a walk."""
        closed: set[int] = set()
        for position in positions:
            at = position
            while at >= 0 and at not in closed:
                closed.add(at)
                at = self.parents_C[at]
        return closed
