"""`gristmill engine`: serve scripted replies with true token ids, until it is stopped.

JSON, once it serves: `{"url", "script", "profile", "models", "rules"}`; `rules` are their names.

Invariant: it listens on loopback only, and ends in order, with exit code 0, when it is interrupted or terminated.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from gristmill.cli.document import json_text
from gristmill.cli.visible import visible

if TYPE_CHECKING:
    from gristmill.scripted import ScriptedEngine

__all__ = ["command"]


@click.command("engine")
@click.option(
    "--script",
    required=True,
    metavar="FILE",
    help="Script of the replies, .json or .jsonl; `agent` and `demo` ship with Gristmill.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 takes a free one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, once it serves.")
def command(*, script: str, host: str, port: int, as_json: bool) -> int:
    """Serve scripted replies with true token ids, for trying things out.

    It answers as a vLLM or SGLang server would, so that a harness and the gateway can be tried without a GPU; what it
    answers, and what goes wrong on the way, stands in the script.
    """
    engine = _engine(script)
    with _ended_by_signals() as ended, engine.serve(host, port) as url:
        _tell(engine, url, script, as_json)
        ended.wait()
    sys.stderr.write(f"stopped after {engine.log.requests} requests\n")
    return 0


def _engine(script: str) -> ScriptedEngine:
    from gristmill.service.packages import packages_of

    with packages_of("engine"):
        from gristmill.scripted import ScriptedEngine
    return ScriptedEngine(script)


@contextmanager
def _ended_by_signals() -> Generator[threading.Event]:
    """Give an event that is set by an interrupt or a termination."""
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(engine: ScriptedEngine, url: str, script: str, as_json: bool) -> None:
    settings = engine.script.settings
    if as_json:
        told: dict[str, Any] = {
            "url": url,
            "script": script,
            "profile": settings.profile,
            "models": list(settings.models),
            "rules": [rule.name for rule in engine.script.rules],
        }
        sys.stdout.write(json_text(told) + "\n")
        sys.stdout.flush()
    models = ", ".join(settings.models)
    sys.stderr.write(f"engine   {url}  ({settings.profile}, model {visible(models)}, script {visible(script)})\n")
    sys.stderr.write(f"try      curl -s {url}/v1/models\nstop it with Ctrl-C\n")
    sys.stderr.flush()
