"""opencode: speaks Chat here, through a provider that a variable adds to the user's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.service.harnesses.harness import Ran, Reach, Setup
from gristmill.service.harnesses.openai import openai_variables
from gristmill.service.histories.history import ReturnedHistory
from gristmill.service.histories.opencode import read_opencode

__all__ = ["Opencode"]

_OUTPUT = 8192


class Opencode:
    """Adds a provider and makes its model the one that is used, for titles too."""

    name = "opencode"
    programs = ("opencode",)

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """`OPENCODE_CONFIG_CONTENT` goes over every file of the user's, and needs none of ours."""
        model: dict[str, Any] = {"name": reach.named_model, "tool_call": True, "reasoning": True}
        if reach.max_model_len is not None:
            output = min(_OUTPUT, max(1, reach.max_model_len // 4))
            model["limit"] = {"context": reach.max_model_len, "output": output}
        name = f"gristmill/{reach.named_model}"
        config = {
            "model": name,
            "small_model": name,
            "provider": {
                "gristmill": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Gristmill",
                    "options": {"baseURL": reach.openai_base_url, "apiKey": "{env:OPENAI_API_KEY}"},
                    "models": {reach.named_model: model},
                }
            },
        }
        variables = {**openai_variables(reach), "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
        return Setup(variables=variables, removed=("OPENCODE_CONFIG", "OPENCODE_API_KEY"))

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read the sessions in opencode's database."""
        given = ran.environment.get("OPENCODE_DB")
        data = ran.environment.get("XDG_DATA_HOME")
        home = Path(ran.environment.get("HOME", "~")).expanduser()
        folder = (Path(data) if data else home / ".local" / "share") / "opencode"
        # A relative name is one in the data folder.
        return read_opencode(folder / (given or "opencode.db"), ran.sessions, ran.since_s)
