"""Fingerprints: microseconds for one text message of 219 bytes and for one tool call with 75 bytes of arguments.

The floor is sha256 of the same bytes. The targets are absolute times; they are shown as the ratio to that floor which
the absolute time is in this run.
"""

from __future__ import annotations

import gc
import hashlib
import json
from statistics import median
from time import process_time
from typing import Any

from bench.selection import text_item, tool_item
from gristmill.fingerprint import fingerprint

ITEMS = 2_000
TARGETS_us = {"text message of 219 bytes": 1.5, "tool call with 75 bytes of arguments": 5.0}


def _per_item(items: list[Any], payloads: list[bytes], rounds: int) -> tuple[float, float]:
    """Return the median seconds of one fingerprint, and of one sha256 of the same bytes."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        gc.disable()
        try:
            start = process_time()
            for item in items:
                fingerprint(item)
            middle = process_time()
            for payload in payloads:
                hashlib.sha256(payload).hexdigest()
            end = process_time()
        finally:
            gc.enable()
        times.append(((middle - start) / len(items), (end - middle) / len(items)))
    return median(pair[0] for pair in times), median(pair[1] for pair in times)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Run the benchmark."""
    texts = [text_item(number) for number in range(ITEMS)]
    tools = [tool_item(number) for number in range(ITEMS)]
    text_bytes = [item["content"][0]["text"].encode() for item in texts]
    tool_bytes = [item["arguments"].encode() for item in tools]
    rows: list[dict[str, Any]] = []
    for (name, target_us), items, payloads in zip(
        TARGETS_us.items(), (texts, tools), (text_bytes, tool_bytes), strict=True
    ):
        seconds, floor_seconds = _per_item(items, payloads, 5 if quick else 25)
        rows.append(
            {
                "name": f"fingerprint of a {name}, target {target_us} µs",
                "seconds": seconds,
                "floor_seconds": floor_seconds,
                "ratio": seconds / floor_seconds,
                "target": target_us / 1e6 / floor_seconds,
                "ok": seconds <= target_us / 1e6,
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
