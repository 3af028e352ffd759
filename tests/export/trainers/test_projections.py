"""What holds of every projection, whatever its trainer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given

from gristmill.errors import Code, ReconstructionError
from gristmill.export import FORMATS, loss_lines, open_export
from gristmill.export.trainers import PROJECTIONS, Kept, Projection, Source, read_samples
from gristmill.export.trainers.samples import sample_lines
from gristmill.pipeline import run_rollout
from gristmill.reconstruction import Row, RowExtras, RowMode
from gristmill.records import MediaSpan, Result
from gristmill.selection import resolve_selection_policy
from tests.cli.stories import TWO_TURNS, returned, story
from tests.export.attempts import captured
from tests.export.folders import findings, reseal
from tests.export.trainers.rollouts import generated, plain, source_of
from tests.reconstruction.attempts import Call, call_forests, chain

ALL = pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=list(PROJECTIONS))


def restored(projection: Projection, source: Source) -> tuple[list[Row], list[Kept]]:
    """Project, write, read and restore; the rows are in the order of the records."""
    rows = {row.row_id: row for row in source.rows}
    order: list[Row] = []
    kept: list[Kept] = []
    for record in sample_lines(projection, source, Counter()):
        line = orjson.loads(record.line)
        order += [rows[row_id] for row_id in line["rows"]]
        kept += projection.restore(line["sample"])
    return order, kept


def same(row: Row, kept: Kept) -> None:
    assert (kept.token_ids.dtype, kept.loss_mask.dtype) == (np.int32, np.uint8)
    assert np.array_equal(kept.token_ids, row.token_ids)
    assert np.array_equal(kept.loss_mask, row.loss_mask)
    if kept.logprobs is not None:
        assert kept.logprobs.dtype == np.float32
        assert np.array_equal(kept.logprobs, row.logprobs)


def trainable(calls: list[Call]) -> bool:
    return any(call.generation for call in calls if call.fields.get("model", "m") == "m")


@ALL
@given(calls=call_forests())
def test_rows_come_back_equal(projection: Projection, calls: list[Call]) -> None:
    """A token, a mask bit or a log-probability that a format changes trains something else, silently."""
    for mode in RowMode if trainable(calls) else ():
        source = source_of(calls, mode=mode)
        for held in (source, plain(source)):
            order, kept = restored(projection, held)
            assert len(order) == len(kept)
            assert sorted(row.row_id for row in order) == sorted(row.row_id for row in source.rows)
            for row, one in zip(order, kept, strict=True):
                same(row, one)


@pytest.fixture(scope="module")
def many() -> list[Source]:
    """Made once for all formats: making them takes longer than projecting them."""
    return list(generated(seed=20_000, count=11_000))


@pytest.mark.slow
@ALL
def test_ten_thousand_rollouts_are_trained_once(projection: Projection, many: list[Source]) -> None:
    """Sampled tokens that a format repeats or leaves out, and rollouts that weigh more than one, bias every step."""
    assert len(many) >= 10_000
    for source in many:
        sampled = sum(record.cum_len - record.prompt_len for record in source.capture.records if record.model == "m")
        order, kept = restored(projection, source)
        assert sum(int(one.loss_mask.sum()) for one in kept) == sampled
        assert sum(row.loss_weight for row in order) == pytest.approx(1.0)
        for row, one in zip(order, kept, strict=True):
            assert row.loss_weight == int(one.loss_mask.sum()) / sampled
            same(row, one)


@ALL
def test_equal_rows_give_equal_bytes(projection: Projection) -> None:
    """A folder that is made again is compared byte by byte."""
    first, again = (sample_lines(projection, source_of(chain(3)), Counter()) for _ in range(2))
    assert first == again
    assert len({record.record_id for record in first}) == len(first)


@ALL
def test_every_loss_has_a_statement(projection: Projection) -> None:
    """A loss without words cannot be weighed, and words for a loss that cannot occur mislead."""
    losses = Counter[str]()
    for source in generated(seed=7, count=300):
        sample_lines(projection, source, losses)
    assert set(losses) <= set(projection.losses)
    assert all(text.endswith(".") for text in projection.losses.values())
    assert projection.made_for
    assert FORMATS[projection.name].losses == projection.losses


def tried(projection: Projection, source: Source, losses: Counter[str]) -> tuple[list[bytes], Code | None]:
    """The lines of a source, or why there are none."""
    try:
        return [record.line for record in sample_lines(projection, source, losses)], None
    except ReconstructionError as refusal:
        return [], refusal.code


@ALL
def test_a_refused_rollout_counts_no_losses(projection: Projection) -> None:
    """Losses of what was never written would not add up."""
    losses = Counter[str]()
    lines, code = tried(projection, source_of(chain(2), reward=None, advantage=None), losses)
    assert code in {None, Code.REWARD_MISSING, Code.ADVANTAGE_REQUIRED}
    assert bool(lines) == (code is None)
    assert not losses or lines


@ALL
def test_media_are_refused_or_carried(projection: Projection) -> None:
    """Training on a prompt without its pictures is training on another prompt."""
    [row] = source_of(chain(1)).rows
    pictured = msgspec.structs.replace(row, extras=RowExtras((), (MediaSpan("d" * 64, 0, 1),)))
    lines, code = tried(projection, Source([pictured]), Counter())
    assert code is Code.NOT_EXPRESSIBLE or any(b"d" * 64 in line for line in lines)


# Folders


@pytest.fixture
def attempts() -> list[Any]:
    result = Result(value=returned(*TWO_TURNS), reward=1.0, group_id="g")
    calls = [{**line, "sampling": {"temperature": 1.0}} for line in story()]
    captures = [captured(calls, rollout_id) for rollout_id in ("a", "b")]
    policy = resolve_selection_policy()
    return [(capture, result, run_rollout(capture, result, policy, advantage=0.5)) for capture in captures]


def exported(projection: Projection, folder: Path, attempts: list[Any]) -> Any:
    settings: dict[str, Any] = {"policy": "returned_history", "options": {}}
    with open_export(projection.name, folder, **settings) as writer:
        for attempt in attempts:
            writer.add(*attempt)
        return writer.finish()


@ALL
def test_a_folder_is_written_and_verified(projection: Projection, tmp_path: Path, attempts: list[Any]) -> None:
    """Files for trainers are proved like any other."""
    manifest = exported(projection, tmp_path / "out", attempts)
    assert manifest.format == projection.name
    assert findings(tmp_path / "out", attempts) == []
    assert all(projection.name in line for line in loss_lines(manifest))
    assert manifest.rollouts.selected == len(attempts)
    assert sum(1 for _ in read_samples(tmp_path / "out")) == manifest.files[-1].rows > 0


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, held in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(held, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@ALL
def test_a_changed_number_is_found(projection: Projection, tmp_path: Path, attempts: list[Any]) -> None:
    """Somebody edits an id, a mask bit or a reward in a trainer's file."""
    exported(projection, tmp_path / "out", attempts)
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    document = json.loads(lines[0])
    for place in list(_numbers(document["sample"]))[:40]:
        changed = json.loads(lines[0])
        holder = changed["sample"]
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] += 1
        path.write_bytes(b"".join([orjson.dumps(changed) + b"\n", *lines[1:]]))
        reseal(tmp_path / "out")
        assert findings(tmp_path / "out", attempts), place
