"""Claude Code: speaks Messages, keeps sessions in its configuration folder.

The user's own folder stays in use, with its settings and permissions; the session file is found by the id that the
captured calls carried.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.service.harnesses.harness import Ran, Reach, Setup
from gristmill.service.histories.claude_code import read_claude_code
from gristmill.service.histories.history import ReturnedHistory

__all__ = ["ClaudeCode"]

_ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_BEDROCK_BASE_URL",
    "ANTHROPIC_VERTEX_BASE_URL",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)


class ClaudeCode:
    """Sets address, token and model names."""

    name = "claude-code"
    programs = ("claude",)

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """A token in `ANTHROPIC_AUTH_TOKEN` is used without being asked about, unlike one in `ANTHROPIC_API_KEY`."""
        variables = {"ANTHROPIC_BASE_URL": reach.anthropic_base_url, "ANTHROPIC_AUTH_TOKEN": reach.key}
        if reach.model is not None:
            variables |= dict.fromkeys(
                (
                    "ANTHROPIC_MODEL",
                    "ANTHROPIC_DEFAULT_OPUS_MODEL",
                    "ANTHROPIC_DEFAULT_SONNET_MODEL",
                    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                ),
                reach.model,
            )
        return Setup(variables=variables, removed=_ELSEWHERE)

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read the session files."""
        given = ran.environment.get("CLAUDE_CONFIG_DIR")
        folder = Path(given) if given else Path(ran.environment.get("HOME", "~")).expanduser() / ".claude"
        return read_claude_code(folder, ran.sessions, ran.since_s)
