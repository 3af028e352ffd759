"""What the oracle's two halves talk about: options, steps, readings, flattenings, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gristmill.atoms import Item
from gristmill.errors import Code
from gristmill.records import CallRecord

__all__ = ["NEVER", "Answer", "Flat", "Options", "Question", "Reading", "Refused", "Step", "TooManyReadings"]

NEVER = frozenset[Code]()


class TooManyReadings(Exception):
    """The history is not small."""


class Refused(Exception):
    def __init__(self, code: Code, also: frozenset[Code] = NEVER, readings: Sequence[Reading] = ()) -> None:
        super().__init__(code)
        self.code, self.also, self.readings = code, also, readings


@dataclass(frozen=True)
class Options:
    """The options of the policy."""

    reasoning_optional: bool = False
    trim: bool = False
    renamed: bool = False
    context: bool = False


@dataclass(frozen=True)
class Step:
    """A call read from the authored items [start, end)."""

    start: int
    end: int
    call: int
    renames: tuple[tuple[str, str], ...] = ()


Reading = tuple[Step, ...]


@dataclass(frozen=True)
class Answer:
    """What the page says: calls and terminal, or the refusal.

    Attributes:
        calls: model call ids in order; None for a refusal.
        terminal: response id of the scored call, or None.
        code: why it is refused.
        also: codes that the page allows as well.
        readings: the calls of every reading that remains after the filters, in order.
    """

    calls: tuple[str, ...] | None = None
    terminal: str | None = None
    code: Code | None = None
    also: frozenset[Code] = NEVER
    readings: frozenset[tuple[str, ...]] = frozenset()

    def allows(self, code: Code) -> bool:
        return self.code is not None and (code == self.code or code in self.also)


@dataclass
class Flat:
    """One flattening: authored items, the run that each stands in, and the envelopes [start, end) with their ids."""

    items: list[Item] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    envelopes: list[tuple[str | None, int, int]] = field(default_factory=list)


@dataclass
class Question:
    """What a result and the captured ids say before any content is compared (steps 1 to 3)."""

    records: Sequence[CallRecord]
    options: Options
    scored: frozenset[int]
    declared: frozenset[int]
    declared_id: str | None
    references: list[frozenset[int]] | None
    owners: dict[str, set[int]]

    @property
    def calls(self) -> range:
        return range(len(self.records))

    def named(self, response_id: str | None) -> frozenset[int]:
        """Give the calls of a response id."""
        return frozenset(call for call in self.calls if self.records[call].response_id == response_id)
