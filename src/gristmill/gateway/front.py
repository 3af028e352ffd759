"""What a dialect must do so that the gateway can serve it: the request to the engine's route, the reply back.

Invariant: a front changes form, never meaning; whatever it leaves out or bounds is noted, and what it cannot carry over
is refused. Everything after the first held byte stays held, so that no client learns of a finish before the call is
durable.

Not here: any particular dialect (dialects/), token fields (upstream/), the path of a call (call).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gristmill.errors import Code
from gristmill.records import Dialect

__all__ = ["NOTHING", "Encoder", "Front", "JsonObject", "RequestRefused", "Served", "ServedNames", "Translated"]

JsonObject = dict[str, Any]

HistoryOf = Callable[[str], Sequence[Any] | None]
"""From the id of a response of this attempt to its whole conversation, input then output; None: not captured."""


class RequestRefused(Exception):
    """A request that is not served: HTTP status, code, what, and where in the body."""

    def __init__(self, status: int, code: Code, message: str, where: str = "$") -> None:
        self.status = status
        self.code = code
        self.message = message
        self.where = where
        super().__init__(message)


class Translated(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine's route takes it.

    Attributes:
        route: the engine's route: `chat`, or `completions`.
        body: its body, without the fields that ask for tokens.
        understood: the client's request with what it only referred to (`previous_response_id`) written out; lineage
            reads it.
        notes: what was removed, bounded or replaced, each `verb:what` in ASCII without commas.
        choices: how many choices the engine will sample.
        stream: the client wants an event stream.
    """

    route: Dialect
    body: JsonObject
    understood: JsonObject
    notes: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False


class ServedNames(NamedTuple):
    """What the client is told: ids minted by the gateway, and the model name it asked for.

    `token` is unique for the call: letters and digits; ids of responses, messages and items are made from it.
    """

    token: str
    model: str
    created_s: int


class Served(NamedTuple):
    """Bytes for the client: `now` may go at once, `held` (and everything after it) waits for the durable record."""

    now: bytes = b""
    held: bytes = b""


NOTHING = Served()


class Encoder(Protocol):
    """Turns one reply of the engine's route into what the client is served; used for one call."""

    def begin(self) -> bytes:
        """Return what a stream starts with before the engine has said anything; may be empty."""
        ...

    def chunk(self, chunk: JsonObject) -> Served:
        """Encode one chunk of the engine's stream, decoded; token fields in it are not passed on unless asked for.

        Raises:
            Unexpected: the chunk is not one of its route.
        """
        ...

    def end(self) -> Served:
        """Encode the end of the engine's stream (`[DONE]` was received); all of it is held."""
        ...

    def body(self, body: JsonObject) -> JsonObject:
        """Encode a whole reply that was not streamed, instead of chunks; what `served` returns afterwards.

        Raises:
            Unexpected: the body is not one of its route.
        """
        ...

    def failure(self, status: int, message: str) -> bytes:
        """Return the events that tell the client of a stream that it failed."""
        ...

    def served(self) -> JsonObject:
        """Return the whole reply as the client got it: the body, or the object that the stream's events add up to."""
        ...


class Front(Protocol):
    """One dialect."""

    @property
    def dialect(self) -> Dialect: ...

    def translate(self, body: JsonObject, history_of: HistoryOf) -> Translated:
        """Turn a client's request into one of the engine's route.

        Raises:
            RequestRefused: `parameter_refused` or `request_malformed`, with the JSON path.
        """
        ...

    def encoder(self, body: JsonObject, translated: Translated, names: ServedNames) -> Encoder:
        """Make the encoder of one call from the client's body and its translation."""
        ...

    def error(self, status: int, code: str, message: str) -> JsonObject:
        """Return the body of an error in this dialect's shape."""
        ...

    def replay(self, served: JsonObject) -> Iterable[bytes]:
        """Return an event stream that adds up to a reply that was served before."""
        ...
