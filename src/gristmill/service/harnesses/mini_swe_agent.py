"""mini-swe-agent: speaks Chat through LiteLLM, writes one trajectory file."""

from __future__ import annotations

from pathlib import Path

from gristmill.service.harnesses.harness import Ran, Reach, Setup, option_value
from gristmill.service.harnesses.openai import openai_variables
from gristmill.service.histories.history import ReturnedHistory
from gristmill.service.histories.mini_swe_agent import read_mini_swe_agent

__all__ = ["MiniSweAgent"]


class MiniSweAgent:
    """Sets LiteLLM's variables and a configuration folder for this run."""

    name = "mini-swe-agent"
    programs = ("mini", "mini-swe-agent", "mini-extra")

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """Costs of models that nobody sells are not known, and not asked for over the network."""
        variables = {
            **openai_variables(reach),
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        if reach.model is not None:
            variables["MSWEA_MODEL_NAME"] = f"openai/{reach.model}"
        return Setup(variables=variables)

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read the trajectory where `-o` says, else where it is written by default."""
        given = option_value(ran.command, "-o", "--output")
        default = ran.folder / "last_mini_run.traj.json"
        return read_mini_swe_agent([default] if given is None else [ran.working_directory / given])
