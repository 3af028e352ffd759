"""What calls were for: the agent itself, a subagent, a compaction of the history, something on the side.

Invariant: a label comes with its evidence, a header or the calls that show it, and is advice: nothing here removes a
call, and no policy that proves membership reads it. What is not shown is `unknown`. Every request is read at most a few
times, so the work grows with the attempt's size.

Not here: retries (retry), who continues whom (lineage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from gristmill.canonical import JsonValue, loads
from gristmill.captures.headers import Session, session_of
from gristmill.errors import DecodeError, SelectionError
from gristmill.item_fields import word_of
from gristmill.lineage import NO_TOOLS, Forest, Turn, conversation
from gristmill.records import UNLABELLED, CallRecord, Exchange, Purpose, PurposeLabel

__all__ = ["first_label", "label_calls"]

_COMPACTION: Final = frozenset({"compact", "compaction"})
_STRUCTURED: Final = frozenset({"json_schema", "json_object", "json"})
_ENOUGH_CHARS: Final = 24
"""Shortest reply whose repetition inside a longer text shows anything."""
_TASK_CHARS: Final = 8
"""Shortest argument that may be a subagent's task, which has to be given word for word."""
_LOOKED_BACK: Final = 4
"""How many replies before a new conversation may be its summary."""


def first_label(session: Session, request: JsonValue) -> Purpose:
    """Label one call by itself, as it is admitted; `label_calls` says more when the attempt is over.

    Args:
        session: what the request says of its session.
        request: the decoded body.
    """
    marked = _marked(session)
    if marked is not None:
        return marked
    body = _body(request)
    if body.get("tools"):
        return Purpose(PurposeLabel.AGENT, "its request has tools")
    if session.session_id is not None and _structured(body) and not _has_authored(_turns(body)):
        return Purpose(
            PurposeLabel.AUXILIARY,
            f"asks for JSON without tools or a conversation, in the session of {session.places['session_id']}",
        )
    return UNLABELLED


def _marked(session: Session) -> Purpose | None:
    """Label a call whose harness says what it is."""
    for field, value in (("request_kind", session.request_kind), ("subagent", session.subagent)):
        if value in _COMPACTION:
            return Purpose(PurposeLabel.COMPACTION, f"{session.places[field]} says {value}")
    named = (
        ("agent_id", session.agent_id),
        ("subagent", session.subagent),
        ("parent_session_id", session.parent_session_id),
    )
    for field, value in named:
        if value is not None:
            return Purpose(PurposeLabel.SUBAGENT, f"{session.places[field]} says {value}")
    return None


def label_calls(records: Sequence[CallRecord], exchanges: Mapping[str, Exchange]) -> dict[str, Purpose]:
    """Label the calls of a whole attempt.

    Args:
        records: in commit order.
        exchanges: by call id, as far as they were kept.

    Returns:
        A label for every call id; `unknown` where neither the record nor an exchange shows anything.
    """
    attempt = _Attempt(records, exchanges)
    attempt.find_subagents()
    attempt.find_compactions()
    return {record.model_call_id: attempt.label(position) for position, record in enumerate(records)}


class _Attempt:
    """The calls of an attempt while they are labelled."""

    def __init__(self, records: Sequence[CallRecord], exchanges: Mapping[str, Exchange]) -> None:
        self.records = records
        self.exchanges = exchanges
        forest = Forest(records)
        self.children = forest.children()
        self.roots = _roots(forest)
        self.marks = [self._mark(position) for position in range(len(records))]
        self.with_tools: dict[str | None, str] = {}
        """First call with tools of each session."""
        for record in records:
            if _has_tools(record):
                self.with_tools.setdefault(record.session_id, record.model_call_id)
        self.of_root: dict[int, Purpose] = {}
        """Subagents by the first call of their conversation."""
        self.compactions: dict[int, Purpose] = {}

    def request(self, position: int) -> Mapping[str, JsonValue]:
        exchange = self.exchanges.get(self.records[position].model_call_id)
        return {} if exchange is None else _body(exchange.request)

    def _mark(self, position: int) -> Purpose | None:
        """Return what the harness said a call is; what was said at its admission needs no second look."""
        record = self.records[position]
        if record.purpose != UNLABELLED and record.parent_call_id is not None and _has_tools(record):
            stated = record.purpose.label in {PurposeLabel.SUBAGENT, PurposeLabel.COMPACTION}
            return record.purpose if stated else None
        exchange = self.exchanges.get(record.model_call_id)
        return None if exchange is None else _marked(session_of(exchange.headers, exchange.request))

    # ---- subagents ---------------------------------------------------------------------------------------------------

    def find_subagents(self) -> None:
        """Find conversations that begin with an argument of a tool call, and end with its result."""
        tasks: dict[str, tuple[int, str]] = {}
        last = self._last_texts()
        for position, record in enumerate(self.records):
            if self.roots[position] == position:
                mark = self.marks[position]
                if mark is not None and mark.label is PurposeLabel.SUBAGENT:
                    self.of_root[position] = mark
                elif tasks:
                    self._find_subagent(position, tasks, last.get(position, ""))
            for call_id, text in _arguments(record):
                tasks[text] = (position, call_id)

    def _last_texts(self) -> dict[int, str]:
        """Return the last reply without tool calls of each conversation, by its first call."""
        texts: dict[int, str] = {}
        for position, record in enumerate(self.records):
            text = _said(record)
            if text:
                texts[self.roots[position]] = text
        return texts

    def _find_subagent(self, root: int, tasks: Mapping[str, tuple[int, str]], last: str) -> None:
        for text in _first_texts(self.request(root)):
            caller, call_id = tasks.get(text, (-1, ""))
            if caller < 0 or not last:
                continue
            for child in self.children.get(caller, [])[:_LOOKED_BACK]:
                if any(last in result for result in _results(self.request(child), call_id)):
                    calls = self.records[caller].model_call_id, self.records[child].model_call_id
                    self.of_root[root] = Purpose(
                        PurposeLabel.SUBAGENT,
                        f"begins with an argument of tool call {call_id} of call {calls[0]}, whose result in call "
                        f"{calls[1]} is its last reply",
                    )
                    return

    # ---- compactions -------------------------------------------------------------------------------------------------

    def find_compactions(self) -> None:
        """Find replies that a new conversation of the session begins with, in the place of the old one."""
        recent: dict[str | None, list[int]] = {}
        for position, record in enumerate(self.records):
            before = recent.setdefault(record.session_id, [])
            if self.roots[position] == position and before and record.parent_call_id is None:
                self._find_compaction(position, before)
            if len(_said(record)) >= _ENOUGH_CHARS:
                before.append(position)
                del before[:-_LOOKED_BACK]

    def _find_compaction(self, root: int, before: Sequence[int]) -> None:
        turns = _turns(self.request(root))
        texts = [
            atom.text for turn in turns if turn.role or turn.authored for atom in turn.atoms if atom.kind == "text"
        ]
        held = "\n".join(texts)
        for position in reversed(before):
            if _said(self.records[position]) not in held:
                continue
            asked = _turns(self.request(position))
            question = next((turn for turn in reversed(asked) if turn.atoms and not turn.authored), None)
            continued = self.records[position].parent_call_id is not None or _has_authored(asked)
            if not continued or question is None or any(turn.atoms == question.atoms for turn in turns):
                continue
            if self.marks[position] is None:
                self.compactions[position] = Purpose(
                    PurposeLabel.COMPACTION,
                    f"call {self.records[root].model_call_id} begins anew with its reply and without its question",
                )
            # What goes on with a subagent's summary is that subagent.
            known = self.of_root.get(self.roots[position])
            if known is not None and root not in self.of_root:
                self.of_root[root] = known
            return

    # ---- one call ----------------------------------------------------------------------------------------------------

    def label(self, position: int) -> Purpose:
        record = self.records[position]
        known = self.marks[position] or self.compactions.get(position) or self.of_root.get(self.roots[position])
        return known or self._auxiliary(position) or self._agent(record)

    def _auxiliary(self, position: int) -> Purpose | None:
        """Label a call beside the conversation: without tools where its session has some, and never continued."""
        record = self.records[position]
        other = self.with_tools.get(record.session_id)
        if _has_tools(record) or other is None or self.children.get(position):
            return None
        request = self.request(position)
        if not request or _has_authored(_turns(request)):
            return None
        asks = "asks for JSON without tools" if _structured(request) else "has no tools"
        return Purpose(
            PurposeLabel.AUXILIARY, f"{asks}, where call {other} of its session has some; nothing continues it"
        )

    def _agent(self, record: CallRecord) -> Purpose:
        if _has_tools(record):
            return Purpose(PurposeLabel.AGENT, "its request has tools")
        if record.parent_call_id is not None:
            return Purpose(PurposeLabel.AGENT, f"continues call {record.parent_call_id}")
        if record.tools_digest is None:
            return UNLABELLED
        if record.session_id not in self.with_tools:
            return Purpose(PurposeLabel.AGENT, "no call of its session has tools")
        return Purpose(PurposeLabel.AGENT, "belongs to a conversation, though it has no tools")


def _roots(forest: Forest) -> list[int]:
    """Return the first call of each call's conversation, by position; links that form a cycle end somewhere in it."""
    roots = [-1] * len(forest.ids)
    for position in range(len(roots)):
        path: dict[int, None] = {}
        at = position
        while at >= 0 and roots[at] < 0 and at not in path:
            path[at] = None
            at = forest.parents_C[at]
        if path:
            first = roots[at] if at >= 0 and roots[at] >= 0 else next(reversed(path))
            for member in path:
                roots[member] = first
    return roots


def _has_tools(record: CallRecord) -> bool:
    return record.tools_digest is not None and record.tools_digest != NO_TOOLS


def _said(record: CallRecord) -> str:
    """Return the text of a reply that calls no tools, without blanks around it."""
    texts: list[str] = []
    for item in record.output_items:
        for atom in item.atoms or ():
            if atom.kind == "tool_call":
                return ""
            if atom.kind == "text":
                texts.append(atom.text)
    return "".join(texts).strip()


def _arguments(record: CallRecord) -> Iterator[tuple[str, str]]:
    """Yield the longer strings in a reply's tool calls, each with the id of its tool call."""
    for item in record.output_items:
        for atom in item.atoms or ():
            if atom.kind == "tool_call" and len(atom.text) >= _TASK_CHARS:
                for text in _strings(atom.text) if atom.form == "json" else (atom.text.strip(),):
                    if len(text) >= _TASK_CHARS:
                        yield atom.call_id, text


def _strings(arguments: str) -> Iterator[str]:
    try:
        waiting: list[JsonValue] = [loads(arguments)]
    except DecodeError:
        # Canonical text of a number that is none of JSON's.
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, dict):
            waiting.extend(cast("dict[str, JsonValue]", value).values())
        elif isinstance(value, list):
            waiting.extend(cast("list[JsonValue]", value))


def _body(request: JsonValue) -> Mapping[str, JsonValue]:
    return cast("Mapping[str, JsonValue]", request) if isinstance(request, Mapping) else {}


def _turns(request: Mapping[str, JsonValue]) -> list[Turn]:
    try:
        return list(conversation(request))
    except SelectionError:
        # What cannot be read shows nothing.
        return []


def _has_authored(turns: Sequence[Turn]) -> bool:
    return any(turn.authored for turn in turns)


def _results(request: Mapping[str, JsonValue], call_id: str) -> Iterator[str]:
    """Yield the results of a tool call that a request holds."""
    for turn in _turns(request):
        for atom in turn.atoms:
            if atom.kind == "tool_result" and atom.call_id == call_id:
                # A result in parts is a list of kinds and texts.
                yield atom.text if atom.form == "text" else "".join(part[1] for part in loads(atom.text))


def _first_texts(request: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield what a user says before the model does, part by part."""
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        yield messages.strip()
        return
    for value in cast("list[JsonValue]", messages) if isinstance(messages, list) else ():
        message = _body(value)
        role = word_of(message.get("role"))
        if role != "user":
            if role in {"system", "developer"}:
                continue
            return
        content = message.get("content")
        for part in cast("list[JsonValue]", content) if isinstance(content, list) else (content,):
            text = part if isinstance(part, str) else _body(part).get("text")
            if isinstance(text, str):
                yield text.strip()


def _structured(request: Mapping[str, JsonValue]) -> bool:
    """Tell whether a request wants JSON, in any dialect's words."""
    formats = (
        request.get("response_format"),
        _body(request.get("text")).get("format"),
        _body(request.get("output_config")).get("format"),
        request.get("output_format"),
    )
    return any(_body(value).get("type") in _STRUCTURED for value in formats)
