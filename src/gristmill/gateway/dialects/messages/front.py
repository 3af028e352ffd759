"""The Messages dialect as a `Front`."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.gateway.dialects.messages.encoder import MessagesEncoder
from gristmill.gateway.dialects.messages.errors import error_body
from gristmill.gateway.dialects.messages.replay import events_of
from gristmill.gateway.dialects.messages.request import translate
from gristmill.gateway.front import Encoder, HistoryOf, JsonObject, ServedNames, Translated
from gristmill.records import Dialect

__all__ = ["MessagesFront"]


class MessagesFront:
    """Serves Messages clients from an engine's Chat route."""

    @property
    def dialect(self) -> Dialect:
        return Dialect.MESSAGES

    def translate(self, body: JsonObject, history_of: HistoryOf) -> Translated:
        """Turn a request into a Chat request, as `Front.translate`; the dialect refers to no earlier response."""
        return translate(body)

    def encoder(self, body: JsonObject, translated: Translated, names: ServedNames) -> Encoder:
        """Make the encoder of one call."""
        return MessagesEncoder(names)

    def error(self, status: int, code: str, message: str) -> JsonObject:
        """Return the body of an error."""
        return error_body(status, message, code)

    def replay(self, served: JsonObject) -> Iterable[bytes]:
        """Return an event stream of a message that was served before."""
        return events_of(served)
