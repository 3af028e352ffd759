"""What the engine tells of itself: its control routes and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gristmill.scripted.log import Log

if TYPE_CHECKING:
    from gristmill.scripted.engine import ScriptedEngine

__all__ = ["metrics", "requests_json", "state_json"]


def state_json(engine: ScriptedEngine, running: int) -> dict[str, Any]:
    """Return the engine's state and counts."""
    return {
        "profile": engine.script.settings.profile,
        "models": engine.models,
        "weights": engine.weights,
        "healthy": engine.healthy,
        "renders": engine.renders,
        "requests": engine.log.requests,
        "in_flight": running,
        "by_rule": dict(engine.log.by_rule),
        "by_ending": dict(engine.log.by_ending),
        "prompt_tokens": engine.log.prompt_tokens,
        "completion_tokens": engine.log.completion_tokens,
    }


def requests_json(log: Log) -> dict[str, Any]:
    """Return the last requests."""
    return {"requests": msgspec.to_builtins(list(log.seen)), "total": log.requests}


def metrics(log: Log, running: int) -> str:
    """Return the counts in the text form of Prometheus."""
    values = {
        "process_start_time_seconds": ("gauge", log.started_s),
        "vllm:num_requests_running": ("gauge", running),
        "vllm:prompt_tokens_total": ("counter", log.prompt_tokens),
        "vllm:generation_tokens_total": ("counter", log.completion_tokens),
        "vllm:request_success_total": ("counter", log.by_ending["complete"]),
    }
    return "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in values.items())
