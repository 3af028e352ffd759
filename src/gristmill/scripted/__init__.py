"""A scripted engine: a real tokenizer, scripted replies with true token ids and log-probabilities, faults on command.

Invariant: a reply depends on the script, the request and how often the same request was asked before, never on the
order in which other requests arrive. docs/reference/engine-script.md describes scripts.

Not here: the command (cli.engine).
"""

from __future__ import annotations

from gristmill.scripted.engine import ScriptedEngine
from gristmill.scripted.log import Seen
from gristmill.scripted.reading import SHIPPED, read_script, script_from
from gristmill.scripted.script import Script
from gristmill.scripted.serving import Serving, check_loopback

__all__ = ["SHIPPED", "Script", "ScriptedEngine", "Seen", "Serving", "check_loopback", "read_script", "script_from"]
