"""Harnesses that `gristmill run` knows: one module each, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

from gristmill.service.harnesses.claude_code import ClaudeCode
from gristmill.service.harnesses.codex import Codex
from gristmill.service.harnesses.harness import Harness, Ran, Reach, Setup
from gristmill.service.harnesses.mini_swe_agent import MiniSweAgent
from gristmill.service.harnesses.openai import OpenAI
from gristmill.service.harnesses.opencode import Opencode
from gristmill.service.harnesses.pi import Pi

__all__ = ["HARNESSES", "Harness", "Ran", "Reach", "Setup", "harness_of"]

HARNESSES: Final[Mapping[str, Harness]] = {
    harness.name: harness for harness in (ClaudeCode(), Codex(), Opencode(), Pi(), MiniSweAgent(), OpenAI())
}
"""By name."""


def harness_of(command: Sequence[str]) -> Harness:
    """Tell a harness by the name of its program; any other is one that reads the usual variables."""
    program = PurePath(command[0]).name if command else ""
    return next((each for each in HARNESSES.values() if program in each.programs), HARNESSES["openai"])
