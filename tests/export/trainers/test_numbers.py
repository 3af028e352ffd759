"""Rewards, advantages, credits and temperatures that float32 cannot hold, over all formats and their functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import orjson
import pytest

from gristmill.errors import Code, ReconstructionError
from gristmill.export import open_export
from gristmill.export.trainers import (
    PROJECTIONS,
    Projection,
    Source,
    areal,
    atif,
    layout,
    miles,
    nemo_gym,
    nemo_rl,
    prime_rl,
    read_samples,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from gristmill.export.trainers.samples import sample_lines
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import Row, TokenCredit
from gristmill.records import Result
from gristmill.selection import resolve_selection_policy
from tests.cli.stories import TWO_TURNS, returned, story
from tests.export.attempts import captured
from tests.export.folders import findings
from tests.export.trainers.fakes import module
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import chain

replace = msgspec.structs.replace

ALL = pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=list(PROJECTIONS))
PLACES = ("reward", "advantage", "credit reward", "credit advantage")
AT_PLACES = pytest.mark.parametrize("place", PLACES)

IN_FILES: Mapping[str, set[str]] = {
    "areal": {"reward"},
    "tinker": {"advantage", "credit advantage"},
    "prime-rl": {"advantage", "credit advantage"},
    "nemo-rl": {"advantage", "credit advantage"},
}
"""Formats whose files hold float32, and of what. All others hold doubles, or nothing."""

FUNCTIONS: Mapping[str, tuple[Callable[[Sequence[Row]], Any], set[str]]] = {
    "verl": (verl.agent_loop_outputs, set()),
    "verl batch": (lambda rows: verl.data_proto(rows, pad_token_id=0), set(PLACES)),
    "trl": (trl.rollout_output, set()),
    "trl async": (lambda rows: trl.rollout_samples(rows, model_version=1), set()),
    "trl-sft": (trl.sft_dataset, set()),
    "skyrl": (skyrl.generator_output, {"credit reward"}),
    "tinker": (tinker.datums, {"advantage", "credit advantage"}),
    "tinker by rollout": (lambda rows: tinker.datums(rows, rollouts_equal=True), {"advantage", "credit advantage"}),
    "slime": (slime.samples, set()),
    "miles": (miles.samples, set()),
    "prime-rl": (prime_rl.training_samples, {"advantage", "credit advantage"}),
    "prime-rl bytes": (lambda rows: msgspec.msgpack.decode(prime_rl.to_bytes(rows)), {"advantage", "credit advantage"}),
    "areal": (areal.trajectories, {"reward"}),
    "nemo-rl": (nemo_rl.message_logs, {"advantage", "credit advantage"}),
    "nemo-rl batch": (nemo_rl.train_batch, {"advantage", "credit advantage"}),
    "nemo-gym": (nemo_gym.responses, set()),
    "nemo-gym-traces": (nemo_gym.training_traces, set()),
    "atif": (atif.trajectories, set()),
}
"""What makes each trainer's objects, and which numbers it holds as float32."""

AT_FUNCTIONS = pytest.mark.parametrize(("make", "narrow"), FUNCTIONS.values(), ids=list(FUNCTIONS))


class Made(SimpleNamespace):
    """An object of a trainer that takes any fields."""

    @classmethod
    def from_dict(cls, fields: Any = None, /, **named: Any) -> Made:
        return cls(**(fields or {}), **named)

    model_validate = from_dict
    from_ints = list

    def validate(self) -> None: ...


class Wire(msgspec.Struct, array_like=True):
    """A sample off the wire, as far as numbers stand in it."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    others: Any
    more: Any
    fields: Any
    without: Any
    numbers: Any
    at: Any
    all_: Any
    here: Any
    advantages: list[float]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, as far as they are given numbers."""
    module(monkeypatch, "torch", from_numpy=lambda array: array)
    module(monkeypatch, "verl", DataProto=Made)
    module(monkeypatch, "verl.experimental.agent_loop.agent_loop", AgentLoopOutput=Made)
    module(monkeypatch, "trl.experimental.async_grpo.async_rollout_worker", RolloutSample=Made)
    module(monkeypatch, "datasets", Dataset=Made)
    output = SimpleNamespace(__annotations__={"rewards": None})
    module(monkeypatch, "skyrl.train.generators.base", GeneratorOutput=output, TrajectoryID=Made)
    module(monkeypatch, "tinker", Datum=Made, ModelInput=Made)
    module(monkeypatch, "slime.utils.types", Sample=Made)
    module(monkeypatch, "miles.utils.types", Sample=Made)
    module(monkeypatch, "prime_rl.transports.batch.types", TrainingSample=Wire)
    module(monkeypatch, "nemo_rl.distributed.batched_data_dict", BatchedDataDict=dict)
    module(monkeypatch, "nemo_gym.openai_utils", NeMoGymResponse=Made)
    module(monkeypatch, "atif", Trajectory=Made)


def source_with(place: str, value: float) -> Source:
    """A rollout of one row that has the number in this place, and plain ones in all others."""
    given = {"reward": 1.0, "advantage": 0.5, "credit reward": 0.25, "credit advantage": 0.125, place: value}
    source = source_of(chain(2), reward=given["reward"], advantage=given["advantage"])
    [row] = source.rows
    credit = TokenCredit("c0", 3, 5, reward=given["credit reward"], advantage=given["credit advantage"])
    return replace(source, rows=[replace(row, credits=(credit,))])


def numbers(value: Any) -> Iterator[float]:
    """Every number that is held somewhere in an object."""
    if isinstance(value, np.ndarray):
        value = cast(Any, value).tolist()
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, Mapping):
        value = list(cast(Mapping[str, Any], value).values())
    if isinstance(value, list | tuple):
        for held in cast(Sequence[Any], value):
            yield from numbers(held)
    elif isinstance(value, int | float):
        yield value


def refusal(make: Callable[[], Any]) -> ReconstructionError:
    with pytest.raises(ReconstructionError) as raised:
        make()
    assert raised.value.code is Code.NOT_EXPRESSIBLE
    return raised.value


# Files


@ALL
@AT_PLACES
@pytest.mark.parametrize("value", [1e39, -1e39])
def test_files_hold_a_large_number_exactly_or_refuse_it(projection: Projection, place: str, value: float) -> None:
    """An infinite reward makes every weight of the model not a number in one step."""
    source = source_with(place, value)
    losses = Counter[str]()
    if place in IN_FILES.get(projection.name, ()):
        assert str(value) in refusal(lambda: sample_lines(projection, source, losses)).message
        assert not losses
        return
    for record in sample_lines(projection, source, losses):
        held = {number for number in numbers(orjson.loads(record.line)) if abs(number) > 1e30}
        assert held <= {value}


@ALL
@AT_PLACES
def test_files_round_what_is_next_to_zero(projection: Projection, place: str) -> None:
    """It is nearer to 0 than anything that training can tell from it."""
    for record in sample_lines(projection, source_with(place, 1e-320), Counter()):
        held = {number for number in numbers(orjson.loads(record.line)) if 0 < abs(number) < 1e-30}
        assert held <= {1e-320}


def attempts_with(value: float) -> list[Any]:
    """Three attempts, the second with this reward and this advantage."""
    policy = resolve_selection_policy()
    calls = [{**line, "sampling": {"temperature": 1.0}} for line in story()]
    made: list[Any] = []
    for rollout_id, given in (("a", 1.0), ("b", value), ("c", 1.0)):
        capture = captured(calls, rollout_id)
        result = Result(value=returned(*TWO_TURNS), reward=given, group_id="g")
        made.append((capture, result, run_rollout(capture, result, policy, advantage=given)))
    return made


def exported(projection: Projection, folder: Path, attempts: Sequence[Any]) -> tuple[int, int]:
    """Write a folder; give how many rollouts were selected and rejected."""
    settings: dict[str, Any] = {"policy": "returned_history", "options": {}}
    with open_export(projection.name, folder, **settings) as writer:
        for attempt in attempts:
            writer.add(*attempt)
        counted = writer.finish().rollouts
    return counted.selected, counted.rejected


@ALL
def test_one_rollout_does_not_stop_the_others(projection: Projection, tmp_path: Path) -> None:
    """A harness hands back one absurd reward in a day of rollouts."""
    attempts = attempts_with(1e39)
    narrow = projection.name in IN_FILES
    assert exported(projection, tmp_path / "out", attempts) == ((2, 1) if narrow else (3, 0))
    assert sum(1 for _ in read_samples(tmp_path / "out")) >= 2
    assert findings(tmp_path / "out", attempts) == []


@ALL
def test_a_number_that_json_has_not_refuses_its_rollout(projection: Projection, tmp_path: Path) -> None:
    """Whoever makes rows with own code may hand over anything."""
    attempts = attempts_with(1.0)
    capture, result, outcome = attempts[1]
    assert isinstance(outcome, RebuiltRollout)
    rows = tuple(replace(row, logprobs=np.full_like(row.logprobs, np.nan), reward=math.inf) for row in outcome.rows)
    attempts[1] = (capture, result, replace(outcome, rebuilt=replace(outcome.rebuilt, rows=rows)))
    # trl-sft has neither log-probabilities nor rewards.
    expected = (3, 0) if projection.name == "trl-sft" else (2, 1)
    assert exported(projection, tmp_path / "out", attempts) == expected


# Functions


def test_no_format_is_forgotten() -> None:
    """A format that is new has functions too."""
    assert {name.split()[0] for name in FUNCTIONS} == set(PROJECTIONS)


@pytest.mark.usefixtures("trainers")
@AT_FUNCTIONS
@AT_PLACES
@pytest.mark.parametrize("value", [1e39, -1e39])
def test_objects_hold_a_large_number_or_are_refused(make: Any, narrow: set[str], place: str, value: float) -> None:
    """Nobody reads a file between these functions and the optimizer."""
    rows = source_with(place, value).rows
    if make is FUNCTIONS["skyrl"][0] and place == "reward":
        # With rewards of calls SkyRL gets one reward a token.
        narrow = {*narrow, "reward"}
    if make is FUNCTIONS["trl async"][0]:
        rows = [replace(row, credits=()) for row in rows]
    if place in narrow:
        assert str(value) in refusal(lambda: make(rows)).message
    else:
        assert {number for number in numbers(make(rows)) if abs(number) > 1e30} <= {value}


@pytest.mark.usefixtures("trainers")
@AT_FUNCTIONS
@AT_PLACES
def test_objects_round_what_is_next_to_zero(make: Any, narrow: set[str], place: str) -> None:
    """As files do."""
    rows = source_with(place, 1e-320).rows
    if make is FUNCTIONS["trl async"][0]:
        rows = [replace(row, credits=()) for row in rows]
    held = {number for number in numbers(make(rows)) if 0 < abs(number) < 1e-30}
    assert held <= (set() if place in narrow else {1e-320})


def test_an_advantage_that_no_token_takes_refuses_nothing() -> None:
    """Credits stand before the rollout's own, which then is in no array."""
    [row] = source_with("advantage", 1e39).rows
    spans = [(start, end) for start, end, trained in layout.turns_of(row) if trained]
    row = replace(row, credits=tuple(TokenCredit("c", start, end, advantage=2.0) for start, end in spans))
    assert layout.advantages_of(row).tolist() == (2.0 * row.loss_mask).tolist()


@pytest.mark.parametrize("value", [3e38, 1.7e308])
def test_rewards_that_add_up_to_too_much_are_refused(value: float) -> None:
    """Each is a float32 or a double, the sum on the last token is none."""
    [row] = source_of(chain(1), reward=value).rows
    size = row.token_ids.size
    row = replace(row, credits=(TokenCredit("c0", size - 1, size, reward=value),))
    refusal(lambda: layout.rewards_of([row], calls=True))
    if value < 1e39:
        assert layout.rewards_of([row], calls=False)[0].sum() == np.float32(value)


@pytest.mark.parametrize("temperature", [1e39, 1e-320, math.nan, math.inf])
def test_a_temperature_that_is_no_float32_is_refused(temperature: float) -> None:
    """Logits are divided by it, and one next to zero becomes zero."""
    [row] = source_of(chain(1)).rows
    row = replace(row, spans=tuple(replace(span, temperature=temperature) for span in row.spans))
    assert str(temperature) in refusal(lambda: prime_rl.to_bytes([row])).message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 3.4028236e38])
def test_only_finite_numbers_are_given(value: float) -> None:
    """The last is the first that rounds beyond the largest float32."""
    [row] = source_of(chain(1)).rows
    assert row.row_id in refusal(lambda: layout.as_float32([1.0, value], row, "rewards")).message


def test_the_largest_float32_is_given() -> None:
    """A limit that is too narrow loses rollouts."""
    [row] = source_of(chain(1)).rows
    most = float(np.finfo(np.float32).max)
    assert layout.as_float32([most, -most], row, "rewards").tolist() == [most, -most]
    assert layout.as_float32(0.1, row, "the reward") == np.float32(0.1)
