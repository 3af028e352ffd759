"""slime and miles: the fields of a Sample, by slime 0.4.0's documented schema."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source, miles, slime
from gristmill.export.trainers.samples import sample_lines
from gristmill.reconstruction import Row, RowExtras, SpanArray, TokenCredit
from gristmill.records import WeightSpan
from tests.export.trainers.rollouts import source_of
from tests.export.trainers.trainer_page import export_demo, run_page
from tests.reconstruction.attempts import Call, chain

# The fields that are written, and the JSON types that slime and miles take for them.
SCHEMA = {
    "group_index": int,
    "index": int,
    "rollout_id": int,
    "tokens": list,
    "response_length": int,
    "reward": float,
    "loss_mask": list,
    "weight_versions": list,
    "rollout_log_probs": list,
    "status": str,
    "session_id": str,
    "metadata": dict,
}


def fork() -> Source:
    """Two rows: the second reply follows another prompt."""
    versions = (WeightSpan("7", 0, 1), WeightSpan("8", 1, 2))
    calls = [
        Call("c0", [1, 2], [3, 4], fields={"weight_versions": versions}),
        Call("c1", [1, 2, 9], [5], parent="c0", fields={"finish_reason": "length"}),
    ]
    return source_of(calls)


def written(source: Source) -> list[dict[str, Any]]:
    return [orjson.loads(record.line)["sample"] for record in sample_lines(slime.SLIME, source, Counter())]


def test_a_sample_has_the_documented_fields() -> None:
    """slime reads a sample by field names and asserts on lengths."""
    for fields in written(fork()):
        assert {name: type(value) for name, value in fields.items()} == SCHEMA
        assert len(fields["loss_mask"]) == len(fields["rollout_log_probs"]) == fields["response_length"] > 0
        assert set(fields["loss_mask"]) == {1}
        assert all(0 <= fields[name] < 2**53 for name in ("group_index", "index", "rollout_id"))


def test_rows_of_a_rollout_share_its_number_and_no_other() -> None:
    """By rollout_id slime sums the tokens of a rollout: two rollouts in one would weigh as one."""
    first, second = written(fork())
    [other] = written(source_of(chain(1), rollout_id="r2"))
    assert first["rollout_id"] == second["rollout_id"] != other["rollout_id"]
    assert first["group_index"] == second["group_index"] == other["group_index"]
    assert len({first["index"], second["index"], other["index"]}) == 3
    [alone] = written(source_of(chain(1), rollout_id="r2", group_id=None))
    assert alone["group_index"] not in {other["group_index"], other["rollout_id"]}


def test_an_attempt_without_a_group_is_in_nobodys() -> None:
    """slime and miles normalise by group_index: a group that has a rollout's name would be mixed with the rollout."""
    losses = Counter[str]()
    alone = source_of(chain(1), rollout_id="r2", group_id=None)
    again = Source([msgspec.structs.replace(row, attempt=1) for row in alone.rows])
    named = source_of(chain(1), rollout_id="r3", group_id="r2")
    numbers = {
        sample.fields["group_index"]
        for source in (alone, again, named)
        for sample in slime.SLIME.samples(source, losses)
    }
    assert len(numbers) == 3
    assert losses["group"] == 2


def test_versions_and_status_are_those_of_the_row() -> None:
    """Staleness is measured by the oldest version that sampled what is trained."""
    first, second = written(fork())
    assert (first["weight_versions"], first["status"]) == (["7", "8"], "completed")
    assert (second["weight_versions"], second["status"]) == ([], "truncated")


def with_experts(*shapes: tuple[int, ...], dtype: str = "int16") -> Row:
    [row] = source_of(chain(1)).rows
    arrays: list[SpanArray] = []
    start = 0
    for shape in shapes:
        arrays.append(SpanArray("routed_experts", "c0", start, np.ones(shape, dtype)))
        start += shape[0]
    return msgspec.structs.replace(row, extras=RowExtras(tuple(arrays)))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (with_experts((5, 2, 4)), True),
        (with_experts((6, 2, 4)), True),
        (with_experts((2, 2, 4), (3, 2, 4)), True),
        (with_experts((4, 2, 4)), False),
        (with_experts((2, 2, 4), (3, 2, 8)), False),
        (with_experts((5, 8)), False),
        (with_experts((5, 2, 4), dtype="float32"), False),
    ],
)
def test_experts_go_along_where_all_tokens_have_them(row: Row, kept: bool) -> None:
    """slime replays routing for T − 1 tokens: experts of some tokens would be replayed for others."""
    losses = Counter[str]()
    [sample] = slime.SLIME.samples(Source([row]), losses)
    experts = sample.fields.get("rollout_routed_experts")
    assert (experts is not None) == kept == (losses["extras"] == 0)
    if kept:
        assert (experts.shape, experts.dtype) == ((5, 2, 4), np.int32)


def test_a_rollout_of_several_rewards_is_refused() -> None:
    """slime and its kin normalise one reward a rollout."""
    rows = fork().rows
    with pytest.raises(ReconstructionError) as raised:
        written(Source([rows[0], msgspec.structs.replace(rows[1], reward=0.0)]))
    assert raised.value.code is Code.REWARDS_DIFFER


def test_only_miles_loses_the_weight() -> None:
    """slime adds up by rollout_id, which the released miles does not know."""
    counted = {}
    for projection in (slime.SLIME, miles.MILES):
        losses = Counter[str]()
        projection.samples(fork(), losses)
        counted[projection.name] = losses["loss_weight"]
    assert counted == {"slime": 0, "miles": 2}


def test_credits_are_counted_as_lost() -> None:
    """A Sample has one reward."""
    [row] = source_of(chain(1)).rows
    losses = Counter[str]()
    credits = (TokenCredit("c0", 3, 6, advantage=1.0),)
    slime.SLIME.samples(Source([msgspec.structs.replace(row, credits=credits)]), losses)
    assert losses["credits"] == 1


def test_the_hook_gives_the_advantages_of_the_rows() -> None:
    """slime's own normalisation takes samples for rollouts, by position."""
    made = [SimpleNamespace(**fields) for fields in written(fork())]
    assert slime.advantages(None, made) == ([1.0, 1.0], [0.5, 0.5])
    made = [SimpleNamespace(**fields) for fields in written(source_of(chain(1), advantage=None))]
    with pytest.raises(ReconstructionError) as raised:
        slime.advantages(None, made)
    assert raised.value.code is Code.ADVANTAGE_REQUIRED


class FromDict:
    """Reads a sample as slime's class does: its status, then the fields."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> FromDict:
        return cls(dict(fields))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for slime, which no registry has."""
    module = ModuleType("slime.utils.types")
    module.__dict__["Sample"] = FromDict
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.utils.types", module)


@pytest.mark.usefixtures("installed")
def test_samples_are_made_by_slimes_class() -> None:
    """What Python gets and what a file holds must be the same sample."""
    made = [sample.fields for sample in slime.samples(fork().rows)]
    read = written(fork())
    for fields in (*made, *read):
        assert all(type(fields[name]) is list for name in ("tokens", "loss_mask", "rollout_log_probs"))
        # A file holds the shortest text of a float32, an object the same number as a float64.
        fields["rollout_log_probs"] = np.float32(fields["rollout_log_probs"]).tolist()
    assert made == read


@pytest.mark.usefixtures("installed")
def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout function is pasted from it."""
    monkeypatch.chdir(tmp_path)
    rows = export_demo(Path("rows/3"))
    made = run_page("slime.md")["generate_rollout"](None, 3, None)
    assert len(made) == sum(map(len, rows))
    assert len({sample.fields["rollout_id"] for sample in made}) == len(rows)


@pytest.mark.parametrize(("name", "made"), [("slime", slime.samples), ("miles", miles.samples)])
def test_without_the_trainer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str, made: Any) -> None:
    """The package called slime on PyPI is another one."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as raised:
        made(source_of(chain(1)).rows)
    assert raised.value.code is Code.TRAINER_MISSING
    assert raised.value.hint is not None
    assert "install" in raised.value.hint
