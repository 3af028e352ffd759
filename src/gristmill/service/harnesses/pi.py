"""pi: speaks Chat here, through a provider in an agent folder that is made for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.service.harnesses.harness import Ran, Reach, Setup, option_value, write_private
from gristmill.service.harnesses.openai import openai_variables
from gristmill.service.histories.history import ReturnedHistory
from gristmill.service.histories.pi import read_pi

__all__ = ["Pi"]

_OUTPUT = 8192


class Pi:
    """Writes `models.json` and `settings.json`; the user's own agent folder is not read."""

    name = "pi"
    programs = ("pi",)

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """The provider's key is the name of a variable."""
        model: dict[str, Any] = {"id": reach.named_model, "name": reach.named_model, "reasoning": True}
        if reach.max_model_len is not None:
            model |= {
                "contextWindow": reach.max_model_len,
                "maxTokens": min(_OUTPUT, max(1, reach.max_model_len // 4)),
            }
        provider = {
            "baseUrl": reach.openai_base_url,
            "api": "openai-completions",
            "apiKey": "OPENAI_API_KEY",
            "models": [model],
        }
        write_private(folder / "models.json", json.dumps({"providers": {"gristmill": provider}}))
        settings = {"defaultProvider": "gristmill", "defaultModel": reach.named_model}
        write_private(folder / "settings.json", json.dumps(settings))
        variables = {
            **openai_variables(reach),
            "PI_CODING_AGENT_DIR": str(folder),
            "PI_CODING_AGENT_SESSION_DIR": str(folder / "sessions"),
        }
        return Setup(variables=variables, removed=("ANTHROPIC_OAUTH_TOKEN",))

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read the session files, which `--session-dir` may have put elsewhere."""
        given = option_value(ran.command, "--session-dir")
        return read_pi(ran.folder / "sessions" if given is None else ran.working_directory / given)
