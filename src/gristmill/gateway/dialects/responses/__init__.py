"""The Responses dialect: requests to Chat, Chat replies to Responses objects and event streams.

Invariant: what is served can be sent back. The items of a reply, echoed in a later request, become the assistant
message that the engine said, with its reasoning and tool calls; and the events of a stream add up to the object that a
request without a stream would have got.

Not here: token fields (upstream), what is recorded (captures), forbidden parameters (gateway.parameters).
"""

from __future__ import annotations

from gristmill.gateway.dialects.responses.front import RESPONSES, ResponsesFront
from gristmill.gateway.dialects.responses.referred import responses_named

__all__ = ["RESPONSES", "ResponsesFront", "responses_named"]
