"""Call forests with known truth: what an agent and its harness did, and which calls the harness kept.

A forest grows turn by turn: retries (with equal or other words), failed calls, several choices, forks, sub-agents,
compaction. The truth is what the harness kept, in the order of its history; the calls are committed in any order in
which a parent comes before its children.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gristmill.fingerprint import output_items
from gristmill.records import CallRecord, Delivery, ParentResolution, WeightSpan
from tests.strategies.draws import Draws
from tests.strategies.replies import Piece, Reply, reply, wire_items, with_ids

__all__ = ["Call", "Event", "Forest", "Habits", "grow"]

UNLIKE: dict[str, Any] = {
    "logprobs_digest": "l-other",
    "weight_versions": (WeightSpan("2", 0, 2),),
    "model": "another",
    "delivery": Delivery.ABORTED,
    "usable": False,
    "prompt_len": 3,
    "sequence_digest": None,
}
"""One thing in which a call of equal tokens may differ; then it stands for nobody."""
MAX_CALLS = 10
MAX_ITEMS = 9


@dataclass(frozen=True)
class Habits:
    """How engine and harness of one history name things.

    Attributes:
        dialect: in which calls are served.
        item_ids: `unique`, `none`, `tool` (the id of the tool call), `shared` (restarted in every reply).
        tool_ids: `unique`, `restarted` in every reply, or `same` for every call.
        tokens: whether records carry token digests.
        terse: every reply is one of two words, so that only evidence beside the content can decide.
    """

    dialect: str
    item_ids: str
    tool_ids: str
    tokens: bool
    terse: bool


@dataclass
class Call:
    """One simulated call."""

    name: str
    pieces: Reply
    parent: str | None
    response_id: str
    choice: int = 0
    failed: bool = False
    twin: str | None = None
    unlike: str | None = None
    parent_known: bool = True


@dataclass(frozen=True)
class Event:
    """One entry of the returned history: a call, or what the environment said (`user`, `tool`, `compaction`)."""

    kind: str
    call: str | None = None


@dataclass
class Forest:
    """All calls in commit order, the returned history, and the calls whose place in it is the scored one."""

    habits: Habits
    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def truth(self) -> list[str]:
        return [event.call for event in self.events if event.call is not None]

    def call(self, name: str) -> Call:
        return next(call for call in self.calls if call.name == name)

    def returned_pieces(self) -> int:
        return sum(len(self.call(name).pieces) for name in self.truth)


class _Grower:
    def __init__(self, draws: Draws, habits: Habits) -> None:
        self.draws = draws
        self.forest = Forest(habits)

    def full(self, more: int = 1) -> bool:
        forest = self.forest
        return len(forest.calls) + more > MAX_CALLS or forest.returned_pieces() > MAX_ITEMS - 3

    def add(self, parent: str | None, pieces: Reply | None = None, **fields: object) -> Call:
        number = len(self.forest.calls)
        if pieces is None:
            habits = self.forest.habits
            pieces = (Piece("text", self.draws.pick("ab")),) if habits.terse else reply(self.draws, habits.dialect)
        call = Call(f"c{number}", self._named(pieces, number), parent, f"r{number}", **fields)
        self.forest.calls.append(call)
        return call

    def _named(self, pieces: Reply, number: int) -> Reply:
        """Give item ids and tool-call ids after the habits."""
        habits = self.forest.habits
        named: list[Piece] = []
        for index, piece in enumerate(pieces):
            if piece.kind == "tool":
                ids = {"unique": f"t{number}_{index}", "restarted": f"t_{index}", "same": f"t{index or ''}"}
                piece = replace(piece, call_id=ids[habits.tool_ids])  # noqa: PLW2901
            named.append(piece)
        item_ids = {
            "unique": lambda index: f"i{number}_{index}",
            "none": lambda index: None,
            "tool": lambda index: named[index].call_id or None,
            "shared": lambda index: f"i_{index}",
        }[habits.item_ids]
        one_message = habits.dialect != "responses"
        return with_ids(named, [None if one_message and i else item_ids(i) for i in range(len(named))])

    def words_of(self, call: Call) -> Reply:
        """Give the same words without their ids."""
        return tuple(Piece(piece.kind, piece.text, piece.name) for piece in call.pieces)

    def thread(self, parent: str | None, turns: int, depth: int, returned: bool) -> str | None:
        """Grow one conversation; return its last call."""
        draws, events = self.draws, self.forest.events
        kinds = ("none", "user", "tool", "retry", "retry", "choices", "subagent", "compaction", "fork", "decoy")
        for _ in range(turns):
            if self.full(3):
                break
            what = draws.pick(kinds if returned and depth < 2 else kinds[:5])
            if what in {"user", "tool"} and returned:
                events.append(Event(what))
            if what == "compaction":
                events.append(Event("compaction"))
                parent = None
            if what == "decoy":
                self._decoy()
            if what == "fork" and self.forest.truth:
                parent = draws.pick(self.forest.truth)
            before = self._siblings(parent) if what == "retry" else []
            call = self.add(parent, self._echo())
            if what == "choices":
                self._choices(call)
            for sibling in before:
                self._twin(sibling, call)
            if returned:
                events.append(Event("call", call.name))
            if what == "subagent":
                self.thread(None, draws.count(1, 2), depth + 1, draws.chance(60))
            parent = call.name
        return parent

    def _echo(self) -> Reply | None:
        """Sometimes say again what was said before."""
        if self.forest.calls and self.draws.chance(30):
            return self.words_of(self.draws.pick(self.forest.calls))
        return None

    def _siblings(self, parent: str | None) -> list[Call]:
        """Add attempts that the harness gave up, some of them continued before."""
        made: list[Call] = []
        for _ in range(self.draws.pick((1, 1, 2))):
            sibling = self.add(parent, self._echo(), failed=self.draws.chance(20))
            made.append(sibling)
            if self.draws.chance(15):
                self.add(sibling.name, self._echo())
        return made

    def _twin(self, sibling: Call, call: Call) -> None:
        """Let a given-up attempt have said the same, perhaps even in the same tokens."""
        if self.draws.chance(60):
            sibling.pieces = self._named(self.words_of(call), int(sibling.name[1:]))
            if self.draws.chance(40):
                sibling.twin, sibling.failed = call.name, False
                if self.draws.chance(50):
                    sibling.unlike = self.draws.pick(tuple(UNLIKE))

    def _choices(self, call: Call) -> None:
        for choice in range(1, self.draws.pick((2, 2, 3))):
            same = self.words_of(call) if self.draws.chance(40) else None
            other = self.add(call.parent, same)
            other.response_id, other.choice = call.response_id, choice

    def _decoy(self) -> None:
        """Add a call nobody kept that says what two kept calls say one after the other, or one half of one."""
        truth = [self.forest.call(name) for name in self.forest.truth]
        if len(truth) >= 2 and self.forest.habits.dialect == "responses":
            self.add(None, self.words_of(truth[-2]) + self.words_of(truth[-1]))
        elif truth and len(truth[-1].pieces) > 1:
            self.add(None, self.words_of(truth[-1])[:1])


def grow(draws: Draws) -> Forest:
    """Grow a forest of at most ten calls whose returned part has at most nine items."""
    terse = draws.chance(30)
    habits = Habits(
        draws.pick(("responses", "responses", "chat", "messages")),
        draws.pick(("none", "none", "unique") if terse else ("none", "unique", "unique", "tool", "shared")),
        draws.pick(("unique", "unique", "restarted", "same")),
        draws.chance(60),
        terse,
    )
    grower = _Grower(draws, habits)
    grower.thread(None, draws.count(1, 5), 0, True)
    while draws.chance(25) and not grower.full(2):
        grower.thread(None, draws.count(1, 2), 2, False)
    forest = grower.forest
    if draws.chance(30):
        forest.calls = _committed(draws, forest.calls)
    for call in forest.calls:
        call.parent_known = not draws.chance(15)
    return forest


def _committed(draws: Draws, calls: list[Call]) -> list[Call]:
    """Commit in another order: parents still come before their children."""
    waiting, done = list(calls), list[Call]()
    while waiting:
        ready = [call for call in waiting if all(call.parent != other.name for other in waiting)]
        call = draws.pick(ready)
        waiting.remove(call)
        done.append(call)
    return done


def record(call: Call, forest: Forest, draws: Draws) -> CallRecord:
    """Write a call down as the capture would."""
    served = wire_items(call.pieces, forest.habits.dialect, draws)
    parent = call.parent if call.parent_known else None
    made = CallRecord(
        model_call_id=call.name,
        response_id=call.response_id,
        choice_index=call.choice,
        parent_call_id=parent,
        parent_resolution=ParentResolution.RESOLVED if parent else ParentResolution.ROOT,
        output_items=output_items(served),
        response_status="failed" if call.failed else "completed",
        finish_reason=None if call.failed else "stop",
    )
    if not forest.habits.tokens or call.failed:
        return made
    tokens = call.twin or call.name
    made = msgspec.structs.replace(
        made,
        sequence_digest=f"s-{tokens}",
        logprobs_digest=f"l-{tokens}",
        prompt_len=4,
        cum_len=6,
        delta_len=6,
        model="m",
        weight_versions=(WeightSpan("1", 0, 2),),
        usable=True,
        delivery=Delivery.DELIVERED,
    )
    return msgspec.structs.replace(made, **{call.unlike: UNLIKE[call.unlike]}) if call.unlike else made
