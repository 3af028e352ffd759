"""What the checks of ATIF share: rows as trajectories of a package's own classes, and back through the importer.

Invariant: what is imported is what the package itself wrote, not what was handed to it.
"""

from __future__ import annotations

from golden import Golden, rollouts  # isort: skip

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.captures import CapturedRollout
from gristmill.export.trainers.atif import ATIF, trajectories
from gristmill.interop import Report, importer_named
from gristmill.reconstruction import Rollout, Row, RowMode, SpanRole, rebuild
from tests.export.trainers.rollouts import generated
from tests.export.trainers.spoken import RETURNED, rebuilt, story
from tests.interop.foreign_files import TEXTS, TURNS, tokens_of, trajectory

__all__ = ["check", "imported", "restored", "written_by"]


def imported(name: str, path: Path) -> CapturedRollout:
    [rollout] = importer_named(name).read(path, Report())
    return rollout


def written_by(value: Any) -> Any:
    """Give what a package writes of one of its objects, as it is read from a file."""
    return json.loads(value.model_dump_json(exclude_none=True))


def check(golden: Golden, package: str, kind: Any) -> None:
    """Compare generated rollouts with a package's own trajectories of them, and with what is imported of those."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trajectory.json"
        for rows in rollouts():
            [made] = trajectories(rows, package=package)
            golden.is_type(type(made), kind, "class")
            path.write_text(json.dumps(written_by(made)))
            same_rows(golden, rows, made, imported("atif", path))
        for source in generated(seed=5, count=60):
            assert source.capture is not None
            first = source.rows[0]
            [made] = trajectories(source.rows, {(first.rollout_id, first.attempt): source.capture}, package=package)
            path.write_text(json.dumps(written_by(made)))
            same_rows(golden, source.rows, made, imported("atif", path))
        capture = story()
        [made] = trajectories(rebuilt(capture, RETURNED).rows, {("rollout", 0): capture}, package=package)
        path.write_text(json.dumps(written_by(made)))
        same_rows(golden, rebuilt(capture, RETURNED).rows, made, imported("atif", path))
        golden.is_type(
            [step.message for step in made.steps if step.source == "user"], ["Which names?", "In other words?"]
        )
        golden.is_type(len(made.subagent_trajectories), 1, "the helper's trajectory")
        # The files that the importer is tested on are documents of the format.
        path.write_text(json.dumps(written_by(kind.model_validate(trajectory()))))
        capture = imported("atif", path).capture
        golden.is_type(list(tokens_of(capture).values()), list(TURNS), "rebuilt file")
        golden.is_type([item.atoms[0].text for record in capture.records for item in record.output_items], list(TEXTS))


def restored(made: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for one in made:
        yield ATIF.restore(written_by(one))


def same_rows(golden: Golden, rows: Sequence[Row], made: Any, back: CapturedRollout) -> None:
    """Compare rows with what the package's object holds of them, and with rows of what was imported."""
    [kept] = restored([made])
    for row, one in zip(rows, kept, strict=True):
        golden.same(one.token_ids, row.token_ids, "ids")
        golden.same(one.loss_mask, row.loss_mask, "mask")
        golden.same(one.logprobs, row.logprobs, "log-probabilities")
    trained = {
        span.call_id: row.logprobs[span.start : span.end].tolist()
        for row in rows
        for span in row.spans
        if span.role is SpanRole.SAMPLED and span.weight_version is None
    }
    tokens = tokens_of(back.capture)
    for call_id, logprobs in trained.items():
        golden.is_type(tokens[call_id][2], logprobs, "log-probabilities of a call")
    calls = [record.model_call_id for record in back.capture.records]
    rollout = Rollout(rollout_id=back.capture.rollout_id, reward=back.result.reward if back.result else None)
    again = rebuild(back.capture.records, back.capture.tokens, calls, rollout, mode=RowMode.MERGED).rows
    golden.is_type(again[0].reward, rows[0].reward, "reward")
    golden.is_type(trained_tokens(again), trained_tokens(rows), "trained tokens")


def trained_tokens(rows: Sequence[Row]) -> int:
    return sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
