"""Small attempts for tests: calls given by their ids, stored as deltas or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from gristmill.reconstruction import Rollout
from gristmill.records import CallRecord, TokenDelta
from gristmill.tokens import TokenBook

ROLLOUT = Rollout(rollout_id="r1", attempt=0, group_id="g1", reward=1.0)


class Attempt(msgspec.Struct):
    """Records in commit order, tokens, and what was really in the prompts."""

    records: list[CallRecord]
    tokens: dict[str, TokenDelta]
    sequences: dict[str, tuple[list[int], list[int]]]

    def record(self, call_id: str) -> CallRecord:
        return next(record for record in self.records if record.model_call_id == call_id)

    def whole(self, call_id: str) -> list[int]:
        """Prompt and generation."""
        prompt, generation = self.sequences[call_id]
        return prompt + generation

    def change(self, call_id: str, **fields: Any) -> None:
        """Replace fields of one record."""
        self.records = [
            msgspec.structs.replace(record, **fields) if record.model_call_id == call_id else record
            for record in self.records
        ]

    def change_tokens(self, call_id: str, **arrays: Any) -> None:
        """Replace arrays of one delta."""
        self.tokens[call_id] = msgspec.structs.replace(self.tokens[call_id], **arrays)


class Call(msgspec.Struct):
    """One call; `fields` go into its record."""

    call_id: str
    prompt: Sequence[int]
    generation: Sequence[int]
    logprobs: Sequence[float] | None = None
    parent: str | None = None
    fields: Mapping[str, Any] = {}
    extras: Mapping[str, Any] = {}


def logprobs_of(call: Call) -> list[float]:
    """Values that no two tokens of a test share by accident."""
    if call.logprobs is not None:
        return list(call.logprobs)
    seed = sum(map(ord, call.call_id))
    return [-(seed % 97) / 100 - number / 1000 - 0.001 for number in range(len(call.generation))]


def attempt(*calls: Call, whole: bool = False) -> Attempt:
    """Store calls in commit order, against verified bases or (`whole`) each on its own."""
    book = TokenBook()
    made = Attempt([], {}, {})
    for call in calls:
        arrays = (
            np.array(call.prompt, np.int32),
            np.array(call.generation, np.int32),
            np.array(logprobs_of(call), np.float32),
        )
        used = TokenBook() if whole else book
        stored = used.add(call.call_id, *arrays, parent=call.parent, extras=call.extras)
        lengths = {name: getattr(stored, name) for name in stored.__struct_fields__ if name != "delta"}
        fields = {"finish_reason": "stop", "response_status": "completed", "usable": True} | dict(call.fields)
        made.records.append(
            CallRecord(
                model_call_id=call.call_id,
                response_id=f"resp-{call.call_id}",
                parent_call_id=call.parent,
                **lengths,
                **fields,
            )
        )
        made.tokens[call.call_id] = stored.delta
        made.sequences[call.call_id] = (list(call.prompt), list(call.generation))
    return made


def chain(count: int, new: int = 3) -> list[Call]:
    """A conversation in which every prompt extends the call before."""
    calls: list[Call] = []
    known: list[int] = []
    for number in range(count):
        prompt = known + [number * 10 + at for at in range(new)]
        generation = [1000 + number * 10 + at for at in range(new)]
        calls.append(Call(f"c{number}", prompt, generation, parent=f"c{number - 1}" if number else None))
        known = prompt + generation
    return calls


@st.composite
def call_forests(draw: st.DrawFn) -> list[Call]:
    """Call forests over a two-token alphabet, so that shared prefixes, equal sequences and forks are common."""
    ids = st.lists(st.integers(0, 1), max_size=3)
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 9))):
        if calls and draw(st.integers(0, 3)):
            before = draw(st.sampled_from(calls))
            known = [*before.prompt, *before.generation]
            cut = draw(st.integers(0, 2))
            prompt = known[: max(1, len(known) - cut)] + draw(ids)
        else:
            prompt = [draw(st.integers(0, 1)), *draw(ids)]
        parents = [None, *(call.call_id for call in calls)]
        model = draw(st.sampled_from(["m", "m", "m", "other"]))
        calls.append(
            Call(f"c{number}", prompt, draw(ids), parent=draw(st.sampled_from(parents)), fields={"model": model})
        )
    return calls
