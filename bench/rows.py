"""Rows: from stored deltas to training rows, and the check of finished ones.

The floor of linearising is what any implementation has to do: concatenate the ids, masks and log-probabilities. Ours
proves the recorded lengths and digests first, and gives spans, certificates and row ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.lineage import conversation, paired, stored
from gristmill.reconstruction import Rollout, RowMode, rebuild, verify_rows

ROLLOUT = Rollout(rollout_id="bench", reward=1.0)
LIMIT_s = 0.001
ROUNDS = 101


def run() -> list[dict[str, Any]]:
    """Verify and linearise one rollout of 50 calls and 100,000 tokens; a second or two."""
    records, tokens = stored(conversation(50, 2000), chained=True)
    selected = [record.model_call_id for record in records]
    rows = rebuild(records, tokens, selected, ROLLOUT).rows

    def floor() -> object:
        deltas = list(tokens.values())
        return (
            np.concatenate([delta.ids_T for delta in deltas]),
            np.concatenate([delta.mask_T for delta in deltas]),
            np.concatenate([delta.logprobs_T for delta in deltas]),
        )

    jobs = (
        ("verify + linearise 100k tokens, 1 ms", lambda: rebuild(records, tokens, selected, ROLLOUT), LIMIT_s),
        (
            "segments of 100k tokens and back, 3 ms",
            lambda: rebuild(records, tokens, selected, ROLLOUT, mode=RowMode.TREE),
            3 * LIMIT_s,
        ),
        (
            "check finished rows of 100k tokens, 4 ms",
            lambda: verify_rows(records, tokens, selected, rows, rollout=ROLLOUT),
            4 * LIMIT_s,
        ),
    )
    results: list[dict[str, Any]] = []
    for name, job, limit_s in jobs:
        work_s, floor_s = paired(job, floor, ROUNDS)
        results.append(
            {
                "name": name,
                "seconds": work_s,
                "floor_seconds": floor_s,
                "ratio": work_s / floor_s,
                "target": limit_s / floor_s,
                "ok": work_s <= limit_s,
            }
        )
    return results
