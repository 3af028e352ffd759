"""Any program that reads the usual variables: SDKs of OpenAI and Anthropic, LiteLLM, and what is built on them."""

from __future__ import annotations

from pathlib import Path

from gristmill.service.harnesses.harness import Ran, Reach, Setup
from gristmill.service.histories.history import ReturnedHistory, no_history

__all__ = ["OpenAI", "openai_variables"]


def openai_variables(reach: Reach) -> dict[str, str]:
    """Return the variables that OpenAI's SDKs read, and what came before them."""
    return {
        "OPENAI_BASE_URL": reach.openai_base_url,
        "OPENAI_API_BASE": reach.openai_base_url,
        "OPENAI_API_KEY": reach.key,
    }


class OpenAI:
    """Sets the usual variables; knows no record of the program's own."""

    name = "openai"
    programs: tuple[str, ...] = ()

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """Set the usual variables."""
        anthropic = {"ANTHROPIC_BASE_URL": reach.anthropic_base_url, "ANTHROPIC_API_KEY": reach.key}
        return Setup(variables={**openai_variables(reach), **anthropic}, removed=("ANTHROPIC_AUTH_TOKEN",))

    def history(self, ran: Ran) -> ReturnedHistory:
        """Say that there is none: a program of one's own hands its result over with `--result-file`."""
        return no_history("this kind of harness has no record that is known; hand one over with --result-file")
