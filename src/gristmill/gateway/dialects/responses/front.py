"""The Responses dialect as the gateway serves it.

Not here: the request (request), the reply (encoder).
"""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.gateway.dialects.responses.encoder import ResponsesEncoder
from gristmill.gateway.dialects.responses.events import EventWriter
from gristmill.gateway.dialects.responses.items import IN_PROGRESS
from gristmill.gateway.dialects.responses.request import translate, wants_logprobs
from gristmill.gateway.dialects.responses.response import error_type
from gristmill.gateway.dialects.responses.tools import tools_of
from gristmill.gateway.front import Front, HistoryOf, JsonObject, ServedNames, Translated
from gristmill.records import Dialect

__all__ = ["RESPONSES", "ResponsesFront"]


class ResponsesFront:
    """OpenAI Responses."""

    @property
    def dialect(self) -> Dialect:
        return Dialect.RESPONSES

    def translate(self, body: JsonObject, history_of: HistoryOf) -> Translated:
        """Turn a request into one of Chat, as `Front.translate`."""
        return translate(body, history_of)

    def encoder(self, body: JsonObject, translated: Translated, names: ServedNames) -> ResponsesEncoder:
        """Make the encoder of one call, as `Front.encoder`; `body` is one that was translated."""
        alternatives = translated.body.get("top_logprobs") or 0
        return ResponsesEncoder(body, names, tools_of(body).origins, alternatives if wants_logprobs(body) else None)

    def error(self, status: int, code: str, message: str) -> JsonObject:
        """Return the body of an error."""
        return {"error": {"message": message, "type": error_type(status), "param": None, "code": code}}

    def replay(self, served: JsonObject) -> Iterator[bytes]:
        """Yield an event stream that adds up to a response that was served."""
        writer = EventWriter()
        started: JsonObject = {
            **served,
            "status": IN_PROGRESS,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        yield writer.event("response.created", {"response": started})
        yield writer.event("response.in_progress", {"response": started})
        for output_index, item in enumerate(served["output"]):
            yield writer.whole(item, output_index)
        yield writer.event(f"response.{served['status']}", {"response": served})


RESPONSES: Front = ResponsesFront()
"""The dialect, for the gateway's table of routes."""
