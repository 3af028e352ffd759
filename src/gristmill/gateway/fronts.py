"""The dialects that are served, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gristmill.gateway.dialects.messages import MESSAGES
from gristmill.gateway.dialects.passthrough import CHAT, COMPLETIONS
from gristmill.gateway.dialects.responses import RESPONSES
from gristmill.gateway.front import Front
from gristmill.records import Dialect

__all__ = ["FRONTS"]

FRONTS: Final[Mapping[Dialect, Front]] = {
    Dialect.CHAT: CHAT,
    Dialect.COMPLETIONS: COMPLETIONS,
    Dialect.RESPONSES: RESPONSES,
    Dialect.MESSAGES: MESSAGES,
}
