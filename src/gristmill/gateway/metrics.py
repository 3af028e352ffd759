"""Counters and gauges of one gateway, in Prometheus's text format.

Invariant: labels have few values and none of them comes from a request's content: dialect, outcome, code, engine.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_COMMIT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """What a gateway counts; a registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self.calls: Final = self._counter("calls", "Calls by dialect and outcome.", "dialect", "outcome")
        self.refused: Final = self._counter("requests_refused", "Requests refused, by code.", "code")
        self.unusable: Final = self._counter("calls_unusable", "Stored calls that cannot be trained.", "reason")
        self.sampled_tokens: Final = self._counter("sampled_tokens", "Tokens sampled in usable calls.", "dialect")
        self.prompt_tokens: Final = self._counter("prompt_tokens", "Prompt tokens of usable calls.", "dialect")
        self.deliveries: Final = self._counter("deliveries", "Replies by what became of them.", "state")
        self.replays: Final = self._counter("replays", "Retries answered from the record.")
        self.aborts: Final = self._counter("aborts", "Generations that the gateway aborted.", "cause")
        self.parents: Final = self._counter("parents", "Calls by how their parent was resolved.", "resolution")
        self.abandoned: Final = self._counter("rollouts_abandoned", "Rollouts abandoned for being idle.")
        self.engine_errors: Final = self._counter("engine_errors", "Engine errors by kind.", "engine", "fault")
        self.continuations: Final = self._counter(
            "continuations",
            "Calls for which continuation was asked, by what became of it: continued, or why not.",
            "outcome",
        )
        self.continuation_alarms: Final = self._counter(
            "continuation_alarms", "Replies of engines that sampled from another prompt than was sent.", "engine"
        )
        self.renders: Final = self._counter(
            "renders", "Renderings for continuation: rendered, kept from before, failed.", "renderer", "outcome"
        )
        self.in_flight: Final = Gauge("gristmill_calls_in_flight", "Calls in flight.", registry=self.registry)
        self.ledger_waiting: Final = Gauge(
            "gristmill_ledger_writes_waiting", "Writes that wait for the ledger.", registry=self.registry
        )
        self.free_bytes: Final = Gauge(
            "gristmill_ledger_free_bytes", "Free space on the ledger's disk.", registry=self.registry
        )
        self.engine_up: Final = Gauge(
            "gristmill_engine_up", "1 while an engine answers.", ("engine",), registry=self.registry
        )
        self.seconds: Final = Histogram(
            "gristmill_call_seconds",
            "From the request to the last byte for the client.",
            ("dialect",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.commit_seconds: Final = Histogram(
            "gristmill_commit_seconds",
            "Until an outcome was durable.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )

        self.continuation_seconds: Final = Histogram(
            "gristmill_continuation_seconds",
            "What planning the continuation of a call adds to it.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )
        self.render_seconds: Final = Histogram(
            "gristmill_render_seconds",
            "One rendering.",
            ("renderer",),
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"gristmill_{name}", meaning, labels, registry=self.registry)

    def text(self) -> bytes:
        """Return all of it in the text format."""
        return generate_latest(self.registry)
