"""miles' own Sample: its validation, its reading of files, its figures."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

from collections import Counter

import msgspec
import numpy as np
import orjson
from miles.utils.types import Sample

from gristmill.export.trainers import Source
from gristmill.export.trainers.miles import MILES, samples
from gristmill.export.trainers.samples import sample_lines
from gristmill.export.trainers.slime import advantages
from gristmill.reconstruction import RowExtras, SpanArray

LISTS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")


def main() -> None:
    golden = Golden("miles", "miles-rl")
    for rows in rollouts():
        made = samples(rows)
        lines = sample_lines(MILES, Source(rows), Counter())
        golden.is_type(len({(sample.rollout_id, sample.group_index) for sample in made}), 1, "one rollout")
        golden.is_type(len({sample.index for sample in made}), len(rows), "one sample a row")
        golden.is_type(advantages(None, made), ([row.reward for row in rows], [0.5] * len(rows)), "advantages")
        for row, sample, record in zip(rows, made, lines, strict=True):
            golden.is_type(type(sample), Sample, "class")
            golden.is_type({type(getattr(sample, name)) for name in LISTS}, {list}, "types")
            at = len(sample.tokens) - sample.response_length
            golden.same(sample.tokens, row.token_ids, "ids")
            golden.same([0] * at + sample.loss_mask, row.loss_mask, "mask")
            golden.same(np.float32([0.0] * at + sample.rollout_log_probs), row.logprobs, "log-probabilities")
            golden.is_type(sample.effective_response_length, int(row.loss_mask.sum()), "trained tokens")
            golden.is_type(sample.get_reward_value(type("Args", (), {"reward_key": None})), row.reward, "reward")
            status = Sample.Status.TRUNCATED if row.truncated else Sample.Status.COMPLETED
            golden.is_type(sample.status, status, "status")
            read = Sample.from_dict(orjson.loads(record.line)["sample"])
            read.validate()
            golden.same(np.float32(read.rollout_log_probs), np.float32(sample.rollout_log_probs), "from a file")
            read.rollout_log_probs = sample.rollout_log_probs
            golden.is_type(read.to_dict(), sample.to_dict(), "from a file")
            with_experts(golden, row)
    with following("miles.md", rows_at="rows/3") as (page, read):
        golden.is_type(len(page["generate_rollout"](None, 3, None)), len(read), "page")
    golden.report(Sample)


def with_experts(golden: Golden, row: object) -> None:
    """Routed experts have the shape that `validate` asks for."""
    size = row.token_ids.size - 1
    values = np.arange(size * 6, dtype=np.int64).reshape(size, 2, 3)
    call_id = row.spans[0].call_id
    extras = RowExtras((SpanArray("routed_experts", call_id, 0, values),))
    [sample] = samples([msgspec.structs.replace(row, extras=extras, row_index=0, row_count=1)])
    golden.is_type(sample.rollout_routed_experts.dtype, np.dtype(np.int32), "experts")
    golden.same(sample.rollout_routed_experts, values, "experts")


if __name__ == "__main__":
    main()
