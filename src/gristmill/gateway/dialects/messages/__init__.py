"""The Anthropic Messages dialect on an engine's Chat route.

A request becomes a Chat request (request, conversation, blocks, tools), the reply becomes a message (encoder, calls,
arguments, usage, events), a served message can be streamed again (replay).
"""

from typing import Final

from gristmill.gateway.dialects.messages.front import MessagesFront
from gristmill.gateway.dialects.messages.request import count_body
from gristmill.gateway.front import Front

__all__ = ["MESSAGES", "count_body"]

MESSAGES: Final[Front] = MessagesFront()
