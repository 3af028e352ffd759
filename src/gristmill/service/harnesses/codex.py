"""Codex: speaks Responses, and only through a provider that its configuration names.

It gets a home folder of its own with that provider; settings come from its command line (`-c KEY=VALUE`).
"""

from __future__ import annotations

import json
from pathlib import Path

from gristmill.service.harnesses.harness import Ran, Reach, Setup, write_private
from gristmill.service.harnesses.openai import openai_variables
from gristmill.service.histories.codex import read_codex
from gristmill.service.histories.history import ReturnedHistory

__all__ = ["Codex"]


class Codex:
    """Writes `config.toml` into a home folder for this run."""

    name = "codex"
    programs = ("codex",)

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """The key stays in a variable that the provider names."""
        # A JSON string without control characters is a TOML string.
        model = "" if reach.model is None else f"model = {json.dumps(reach.model)}\n"
        window = "" if reach.max_model_len is None else f"model_context_window = {reach.max_model_len}\n"
        config = (
            f'{model}{window}model_provider = "gristmill"\n'
            "[model_providers.gristmill]\n"
            'name = "Gristmill"\n'
            f"base_url = {json.dumps(reach.openai_base_url)}\n"
            'env_key = "OPENAI_API_KEY"\n'
            'wire_api = "responses"\n'
        )
        write_private(folder / "config.toml", config)
        return Setup(variables={**openai_variables(reach), "CODEX_HOME": str(folder)}, removed=("CODEX_API_KEY",))

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read the rollout files of the folder."""
        return read_codex(ran.folder)
