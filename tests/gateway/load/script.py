"""What the engine of a load run is told, and the texts by which a request says which reply it wants.

Invariant: the last message of a request holds a nonce that no other question of the run has, and the reply repeats it
with the number of the try and of the choice; so who was answered can be told from the texts alone.

Not here: the engine's process (engine), what a harness does with a reply (conversation).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final, NamedTuple

__all__ = ["END", "Heard", "Kind", "Nonce", "heard", "nonces", "question", "script"]

END: Final = "~"
"""Ends the text of a reply, and stands nowhere else."""


class Kind(StrEnum):
    """Which reply a request wants."""

    PLAIN = "plain"
    THINK = "think"
    TOOL = "tool"
    SAME = "same"
    SLOW = "slow"
    TRIP = "trip"
    CUT = "cut"


class Nonce(NamedTuple):
    """Who asks: an attempt of a rollout, the number of the question in it, and a random word."""

    rollout_id: str
    attempt: int
    number: int
    word: str

    def __str__(self) -> str:
        return f"{self.rollout_id}/{self.attempt}/{self.number}/{self.word}"


class Heard(NamedTuple):
    """What a reply says of itself: the nonce it answers, the try, the choice."""

    nonce: str
    attempt: int
    choice: int


_NONCE: Final = re.compile(r"\[\[([^\[\]]+)\]\]")
_HEARD: Final = re.compile(r"heard ([^ ,]+), try (\d+), choice (\d+)")
_SAYS: Final = "heard {{match.1}}, try {{try}}, choice {{choice}}"
_SAYS_AGAIN: Final = _SAYS.replace("{{try}}", "0")


def question(nonce: Nonce, kind: Kind, words: str) -> str:
    """Write the text of a request; the reply repeats the words."""
    return f"[[{nonce}]] {kind}: {words}"


def nonces(text: str) -> list[str]:
    """Return the nonces in a text, in their order."""
    return _NONCE.findall(text)


def heard(text: str) -> Heard | None:
    """Read what a reply says of itself; None where it does not."""
    found = _HEARD.search(text)
    return None if found is None else Heard(found[1], int(found[2]), int(found[3]))


def script(*, gap_s: float, slow_gap_s: float, seed: int) -> dict[str, Any]:
    """Return the engine's script.

    Args:
        gap_s: between the chunks of a reply.
        slow_gap_s: the same where a slow one is wanted.
        seed: for chunk sizes, splits and log-probabilities.
    """
    content = {"content": f"{_SAYS}. {{{{match.2}}}} {END}"}
    tripped = {"fault": {"kind": "status", "status": 503, "retry_after_s": 0.05}}
    arguments = {"at": "{{match.1}}", "said": _SAYS}
    replies: dict[Kind, Any] = {
        Kind.PLAIN: content,
        Kind.THINK: {"reasoning": "{{match.2}}, so I think.", **content},
        Kind.TOOL: {"reasoning": "I had better look.", "tool_calls": [{"name": "look", "arguments": arguments}]},
        # Asked again, it says the same again, as a model does that takes the likeliest token.
        Kind.SAME: {"content": f"{_SAYS_AGAIN}. {{{{match.2}}}} {END}"},
        Kind.SLOW: {"reasoning": "This takes a while.", **content, "gap_s": slow_gap_s, "chunks": 4},
        Kind.TRIP: [{**content, **tripped}, content],
        Kind.CUT: [{**content, "fault": {"kind": "eof", "after_chunks": 2}}, content],
    }
    rules = [
        {"name": kind, "when": {"last": {"matches": rf"\[\[([^\[\]]+)\]\] {kind}: ([^\[\n]*)\s*$"}}, "reply": reply}
        for kind, reply in replies.items()
    ]
    # What the gateway samples to find out what the engine gives; a question that arrives changed ends here as well.
    rules.append({"name": "probe", "when": {}, "reply": {"content": "one two three four five six seven eight nine"}})
    return {
        "models": ["scripted"],
        "max_model_len": 131072,
        "thinking": True,
        "split": 0.02,
        "seed": seed,
        "behaviour": {"chunks": "uneven", "gap_s": gap_s},
        "rules": rules,
    }
