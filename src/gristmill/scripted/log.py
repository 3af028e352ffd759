"""What the scripted engine was asked and did: counts, and the last requests.

Invariant: nothing here decides what a reply is, but how often the same request was asked before.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

__all__ = ["Log", "Seen"]

_KEPT: Final = 256
_SECRET: Final = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})


class Seen(msgspec.Struct, kw_only=True):
    """One request that samples.

    Attributes:
        n: its number since the start.
        route: `chat` or `completions`.
        rule: name of the rule that answered, None where none did.
        attempt: how often the same request was asked before.
        turn: assistant messages in it.
        id: id of the reply.
        headers: header fields, without keys.
        body: the decoded body.
        status: of the answer, None before it began.
        ended: how the answer ended, None before it did.
        ids: how many ids of each choice were sent.
    """

    n: int
    route: str
    headers: dict[str, str]
    body: dict[str, Any]
    rule: str | None = None
    attempt: int = msgspec.field(default=0, name="try")
    turn: int = 0
    id: str | None = None
    status: int | None = None
    ended: str | None = None
    ids: tuple[int, ...] = ()


class Log:
    """Counts and the last requests."""

    def __init__(self) -> None:
        self.started_s = time.time()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen: deque[Seen] = deque(maxlen=_KEPT)
        self.by_rule: Counter[str] = Counter()
        self.by_ending: Counter[str] = Counter()
        self.requests = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._tries: Counter[str] = Counter()

    def begin(self, route: str, headers: Mapping[str, str], body: dict[str, Any]) -> Seen:
        """Note a request."""
        self.requests += 1
        kept = {name: value for name, value in headers.items() if name not in _SECRET}
        seen = Seen(n=self.requests, route=route, headers=kept, body=body)
        self.seen.append(seen)
        return seen

    def attempt(self, digest: str) -> int:
        """Return how often a request was asked before, and count it."""
        before = self._tries[digest]
        self._tries[digest] += 1
        return before

    def end(self, seen: Seen, status: int | None, ended: str, ids: tuple[int, ...] = ()) -> None:
        """Note how a request ended."""
        seen.status, seen.ended, seen.ids = status, ended, ids
        self.by_ending[ended] += 1
        self.completion_tokens += sum(ids)
